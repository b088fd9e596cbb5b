// The merge of a batch: the sums of the gradient rows of equal keys.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "kvjax/ffi/core/hash.h"

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
    for (size_t i = Mix(key) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) {
        cells_[i] = static_cast<uint32_t>(keys_.size());
        keys_.push_back(key);
        return cells_[i];
      }
      if (keys_[cells_[i]] == key) return cells_[i];
    }
  }
  [[nodiscard]] bool Has(uint64_t key) const {
    for (size_t i = Mix(key) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) return false;
      if (keys_[cells_[i]] == key) return true;
    }
  }
  [[nodiscard]] const std::vector<uint64_t>& keys() const { return keys_; }

 private:
  static constexpr uint32_t kFree = 0xFFFFFFFFu;
  std::vector<uint32_t> cells_;
  int shift_;
  std::vector<uint64_t> keys_;
};

/// Rows that are summed one after the other. A sum of more is the sum of the sums of so many rows each, in
/// order: as reproducible, more accurate, and the blocks can be summed at the same time.
inline constexpr uint32_t kSumBlock = 256;

inline void AddRow(float* __restrict sum, const float* __restrict row, size_t dim) {
  for (size_t d = 0; d < dim; ++d) sum[d] += row[d];
}

/// Merges n rows of `dim` floats into one row per distinct key, in order of first occurrence; the rows of
/// a key are added in blocks of kSumBlock, in the order in which they stand, so the result is reproducible to
/// the bit.
/// counts[i] is how often keys[i] occurred, 0 marks padding, which is skipped. The outputs have space for n
/// rows; what is behind the returned number of distinct keys is set to zero.
inline size_t MergeRows(const uint64_t* keys, const float* rows, const int32_t* counts, size_t n, size_t dim,
                        uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
  KeyNumbering numbering(n);
  uint64_t* const summed = out_keys;                    // until the end: how many rows of each key
  std::unordered_map<size_t, std::vector<float>> full;  // the sums of the blocks before the one under way
  for (size_t i = 0; i < n; ++i) {
    if (counts[i] <= 0) continue;
    const size_t known = numbering.keys().size();
    const size_t u = numbering.Add(keys[i]);
    const float* const row = rows + i * dim;
    float* const sum = out_rows + u * dim;
    if (u == known) {
      std::memcpy(sum, row, dim * sizeof(float));
      out_counts[u] = counts[i];
      summed[u] = 1;
      continue;
    }
    out_counts[u] = static_cast<int32_t>(std::min<int64_t>(int64_t{out_counts[u]} + counts[i], INT32_MAX));
    if (summed[u]++ % kSumBlock != 0) {
      AddRow(sum, row, dim);
    } else {
      const auto [before, is_first] = full.try_emplace(u, sum, sum + dim);
      if (!is_first) AddRow(before->second.data(), sum, dim);
      std::memcpy(sum, row, dim * sizeof(float));
    }
  }
  for (auto& [u, sum] : full) {
    AddRow(sum.data(), out_rows + u * dim, dim);
    std::copy(sum.begin(), sum.end(), out_rows + u * dim);
  }
  const size_t distinct = numbering.keys().size();
  std::copy(numbering.keys().begin(), numbering.keys().end(), out_keys);
  std::fill(out_keys + distinct, out_keys + n, uint64_t{0});
  std::fill(out_counts + distinct, out_counts + n, int32_t{0});
  std::fill(out_rows + distinct * dim, out_rows + n * dim, 0.0f);
  return distinct;
}

}  // namespace kvjax
