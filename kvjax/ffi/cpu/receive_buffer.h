// The receive buffer of a shard: gradients that other devices send in rounds, and their sums by key.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kvjax/ffi/core/merge.h"

namespace kvjax {

/// Memory that is not set to zero and is kept for the next use.
template <class T>
class ReusedMemory {
 public:
  T* Resize(size_t n) {
    if (n > room_) data_.reset(new T[n]), room_ = n;
    return data_.get();
  }
  [[nodiscard]] T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  size_t room_ = 0;
};

/// Gradients that arrive from other devices in several rounds. Those of equal keys are summed in the order of
/// the senders, whatever the rounds.
class ReceiveBuffer {
 public:
  /// The gradients of distinct keys.
  struct Merged {
    size_t n = 0;
    const uint64_t* keys = nullptr;
    const int32_t* counts = nullptr;
    const float* rows = nullptr;
  };

  /// Forgets what has arrived.
  void Open(size_t senders) {
    sent_.assign(senders, {});
    given_.clear();
    given_rows_.clear();
    merged_ = {};
  }

  /// keys, counts: (senders, n); rows: (senders, n, dim); a count of 0 marks padding. `only` says that
  /// nothing else will come.
  void Add(const ParallelFor& parallel, const uint64_t* keys, const int32_t* counts, const float* rows,
           size_t n, size_t dim, bool only) {
    if (only) return Merge(parallel, keys, counts, rows, sent_.size() * n, dim);
    for (size_t s = 0; s < sent_.size(); ++s) {
      Sent& from = sent_[s];
      for (size_t i = s * n; i < (s + 1) * n; ++i) {
        if (counts[i] <= 0) continue;
        from.keys.push_back(keys[i]);
        from.counts.push_back(counts[i]);
        from.rows.insert(from.rows.end(), rows + i * dim, rows + (i + 1) * dim);
      }
    }
  }

  /// Remembers initial rows of keys that may turn out to be new.
  void Give(const std::vector<uint64_t>& keys, const std::byte* rows, size_t row_bytes) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!given_.emplace(keys[i], given_.size()).second) continue;
      given_rows_.insert(given_rows_.end(), rows + i * row_bytes, rows + (i + 1) * row_bytes);
    }
  }

  Merged Close(const ParallelFor& parallel, size_t dim) {
    if (merged_.keys != nullptr) return merged_;
    Sent all;
    for (Sent& from : sent_) {
      all.keys.insert(all.keys.end(), from.keys.begin(), from.keys.end());
      all.counts.insert(all.counts.end(), from.counts.begin(), from.counts.end());
      all.rows.insert(all.rows.end(), from.rows.begin(), from.rows.end());
      from = {};
    }
    Merge(parallel, all.keys.data(), all.counts.data(), all.rows.data(), all.keys.size(), dim);
    return merged_;
  }

  [[nodiscard]] size_t senders() const { return sent_.size(); }
  [[nodiscard]] const Merged& merged() const { return merged_; }

  /// The remembered rows of `keys`; keys that have none get zeros, which nobody will read.
  [[nodiscard]] std::vector<std::byte> Given(const std::vector<uint64_t>& keys, size_t row_bytes) const {
    std::vector<std::byte> rows(given_.empty() ? 0 : keys.size() * row_bytes);
    for (size_t i = 0; i * row_bytes < rows.size(); ++i) {
      const auto it = given_.find(keys[i]);
      if (it == given_.end()) continue;
      std::memcpy(rows.data() + i * row_bytes, given_rows_.data() + it->second * row_bytes, row_bytes);
    }
    return rows;
  }

 private:
  struct Sent {  // of one sender
    std::vector<uint64_t> keys;
    std::vector<int32_t> counts;
    std::vector<float> rows;
  };

  struct Placed {
    size_t operator()(uint64_t key) const { return PlaceHash(key, Secret()); }
  };

  void Merge(const ParallelFor& parallel, const uint64_t* keys, const int32_t* counts, const float* rows,
             size_t n, size_t dim) {
    uint64_t* const out_keys = keys_.Resize(n + 1);  // + 1: never null
    int32_t* const out_counts = counts_.Resize(n);
    float* const out_rows = rows_.Resize(n * dim);
    merged_ = {MergeUnpadded(parallel, keys, rows, counts, n, dim, out_keys, out_rows, out_counts), out_keys,
               out_counts, out_rows};
  }

  std::vector<Sent> sent_;
  std::unordered_map<uint64_t, size_t, Placed> given_;
  std::vector<std::byte> given_rows_;
  ReusedMemory<uint64_t> keys_;
  ReusedMemory<int32_t> counts_;
  ReusedMemory<float> rows_;
  Merged merged_;
};

}  // namespace kvjax
