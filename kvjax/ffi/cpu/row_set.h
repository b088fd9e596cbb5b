// A set of row ids: a bit for each row of a table.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/sorted.h"

namespace kvjax {

class RowSet {
 public:
  RowSet() = default;
  /// Of rows below `end`, each of which is in the list once. Throws std::bad_alloc.
  RowSet(const ParallelFor& parallel, size_t end, const UnfilledResult<ListedRow>& rows)
      : end_(end), words_((end + 63) / 64) {
    const bool all = rows.size() == end;  // no row id is free
    parallel(words_.size(), kGrain, [&](size_t begin, size_t stop) {
      std::fill_n(words_.data() + begin, stop - begin, all ? ~uint64_t{0} : 0);
    });
    if (all) return;
    parallel(rows.size(), kGrain, [&](size_t begin, size_t stop) {
      for (size_t i = begin; i < stop; ++i) {
        const uint32_t row = rows[i].row;  // others set bits of the same word
        std::atomic_ref(words_[row / 64]).fetch_or(Bit(row), std::memory_order_relaxed);
      }
    });
  }

  /// The rows that may be in it are those below this.
  [[nodiscard]] size_t size() const { return end_; }
  [[nodiscard]] bool operator[](size_t row) const { return row < end_ && (words_[row / 64] & Bit(row)) != 0; }
  void Remove(size_t row) { words_[row / 64] &= ~Bit(row); }
  /// GCC drops calls of functions that only prefetch.
  [[gnu::always_inline]] void Prefetch(size_t row) const {
    if (row < end_) __builtin_prefetch(&words_[row / 64]);
  }

 private:
  static constexpr size_t kGrain = size_t{1} << 14;
  static uint64_t Bit(size_t row) { return uint64_t{1} << (row % 64); }

  size_t end_ = 0;
  Unfilled<uint64_t> words_;
};

}  // namespace kvjax
