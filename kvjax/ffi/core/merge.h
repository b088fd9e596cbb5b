// The merge of a batch: the sums of the gradient rows of equal keys.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/secret.h"

namespace kvjax {

/// Distinct keys numbered in the order of their first occurrence, by a small hash set that lives as
/// long as one batch.
class KeyNumbering {
 public:
  explicit KeyNumbering(size_t max_keys)
      : cells_(std::bit_ceil(std::max<size_t>(2 * max_keys, 2)), kFree),
        shift_(64 - std::countr_zero(cells_.size())) {
    keys_.reserve(max_keys);
  }

  /// Number of `key`, which becomes the next free one if the key is new.
  uint32_t Add(uint64_t key) {
    for (size_t i = PlaceHash(key, secret_) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) {
        cells_[i] = static_cast<uint32_t>(keys_.size());
        keys_.push_back(key);
        return cells_[i];
      }
      if (keys_[cells_[i]] == key) return cells_[i];
    }
  }
  [[nodiscard]] bool Has(uint64_t key) const {
    for (size_t i = PlaceHash(key, secret_) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) return false;
      if (keys_[cells_[i]] == key) return true;
    }
  }
  [[nodiscard]] const std::vector<uint64_t>& keys() const& { return keys_; }
  [[nodiscard]] std::vector<uint64_t> keys() && { return std::move(keys_); }

 private:
  static constexpr uint32_t kFree = 0xFFFFFFFFu;
  std::vector<uint32_t> cells_;
  int shift_;
  uint64_t secret_ = Secret();
  std::vector<uint64_t> keys_;
};

/// Rows that are summed one after the other. A sum of more is the sum of the sums of so many rows each, in
/// order: as reproducible, more accurate, and the blocks can be summed at the same time.
inline constexpr uint32_t kSumBlock = 256;

/// Sums some of the rows (n, dim), one after the other.
struct SumInOrder {
  void operator()(float* __restrict sum, const float* __restrict rows, std::span<const uint32_t> which,
                  size_t dim) const {
    std::memcpy(sum, rows + which[0] * dim, dim * sizeof(float));
    for (const uint32_t r : which.subspan(1)) {
      for (size_t d = 0; d < dim; ++d) sum[d] += rows[r * dim + d];
    }
  }
};

/// The distinct keys of a batch in order of first occurrence, and which of its rows belong to each.
class KeyGroups {
 public:
  /// counts: (n,) how often each key occurred; 0 marks padding, which is skipped.
  KeyGroups(const uint64_t* keys, const int32_t* counts, size_t n) {
    KeyNumbering numbering(n);
    std::vector<uint32_t> numbers(n);
    counts_.reserve(n), begins_.reserve(n + 1);
    size_t rows = 0;
    for (size_t i = 0; i < n; ++i) {
      if (counts[i] <= 0) continue;
      const uint32_t u = numbers[i] = numbering.Add(keys[i]);
      ++rows;
      if (u == counts_.size()) {
        counts_.push_back(counts[i]);
        begins_.push_back(1);
        continue;
      }
      counts_[u] = static_cast<int32_t>(std::min<int64_t>(int64_t{counts_[u]} + counts[i], INT32_MAX));
      ++begins_[u];
    }
    uint32_t begin = 0;
    for (uint32_t& size : begins_) begin += std::exchange(size, begin);
    begins_.push_back(begin);
    rows_.resize(rows);
    std::vector<uint32_t> next(begins_.begin(), begins_.end() - 1);
    for (size_t i = 0; i < n; ++i) {
      if (counts[i] > 0) rows_[next[numbers[i]]++] = static_cast<uint32_t>(i);
    }
    keys_ = std::move(numbering).keys();
  }

  [[nodiscard]] size_t size() const { return keys_.size(); }
  [[nodiscard]] const std::vector<uint64_t>& keys() const { return keys_; }
  /// How often each key occurred, INT32_MAX for more.
  [[nodiscard]] const std::vector<int32_t>& counts() const { return counts_; }
  /// The rows of a group, in the order in which they stand.
  [[nodiscard]] std::span<const uint32_t> rows(size_t group) const {
    return {rows_.data() + begins_[group], begins_[group + 1] - begins_[group]};
  }

 private:
  std::vector<uint64_t> keys_;
  std::vector<int32_t> counts_;
  std::vector<uint32_t> begins_, rows_;
};

/// The sum of some of the rows (n, dim) in blocks, each of which `sum` sums as SumInOrder does. `memory` has
/// space for two rows; a sum of one row is that row itself.
template <class Sum>
const float* SumRows(const float* rows, std::span<const uint32_t> which, size_t dim, float* memory, Sum sum) {
  if (which.size() == 1) return rows + which[0] * dim;
  sum(memory, rows, which.first(std::min<size_t>(which.size(), kSumBlock)), dim);
  for (size_t begin = kSumBlock; begin < which.size(); begin += kSumBlock) {
    sum(memory + dim, rows, which.subspan(begin, std::min<size_t>(which.size() - begin, kSumBlock)), dim);
    for (size_t d = 0; d < dim; ++d) memory[d] += memory[dim + d];
  }
  return memory;
}

/// Merges n rows of `dim` floats into one row per distinct key, in order of first occurrence; the rows of
/// a key are added in blocks of kSumBlock, in the order in which they stand, so the result is reproducible to
/// the bit.
/// The outputs have space for n rows; what is behind the returned number of distinct keys is set to zero.
inline size_t MergeRows(const uint64_t* keys, const float* rows, const int32_t* counts, size_t n, size_t dim,
                        uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
  const KeyGroups groups(keys, counts, n);
  const size_t distinct = groups.size();
  std::copy(groups.keys().begin(), groups.keys().end(), out_keys);
  std::copy(groups.counts().begin(), groups.counts().end(), out_counts);
  std::vector<float> memory(2 * dim);
  for (size_t u = 0; u < distinct; ++u) {
    const float* const sum = SumRows(rows, groups.rows(u), dim, memory.data(), SumInOrder());
    std::memcpy(out_rows + u * dim, sum, dim * sizeof(float));
  }
  std::fill(out_keys + distinct, out_keys + n, uint64_t{0});
  std::fill(out_counts + distinct, out_counts + n, int32_t{0});
  std::fill(out_rows + distinct * dim, out_rows + n * dim, 0.0f);
  return distinct;
}

}  // namespace kvjax
