// The counts of keys without a row, as kernels see them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/index.h"

namespace kvjax::device {

struct AdmissionView {
  AdmissionSpec spec;
  IndexView waiting;  // keys that are counted one by one: words of counts instead of row ids
  uint32_t* sketch;   // two cells to a word

  /// The least of a key's cells.
  [[nodiscard]] KVJAX_HD uint32_t Estimate(uint64_t key) const {
    uint32_t least = 0xFFFFu;
    for (int row = 0; row < AdmissionSpec::kRows; ++row) {
      const size_t cell = spec.Cell(key, row);
      const uint32_t count = sketch[cell / 2] >> (16 * (cell % 2)) & 0xFFFFu;
      if (count < least) least = count;
    }
    return least;
  }
  /// Occurrences of a key without a row, as far as they are counted.
  [[nodiscard]] KVJAX_HD uint32_t Count(uint64_t key) const {
    if (spec.sketches()) return Estimate(key);
    const IndexView::Entry* const entry = spec.counts_keys() ? waiting.Locate(key) : nullptr;
    return entry == nullptr ? 0 : spec.CountOf(entry->row);
  }
  [[nodiscard]] KVJAX_HD bool ReadsInitial(uint64_t key) const { return spec.ReadsInitial(key, Count(key)); }
  /// No cell of the key stays below `count`; many lanes may do so at once.
  KVJAX_HD void RaiseCells(uint64_t key, uint32_t count) const {
    for (int row = 0; row < AdmissionSpec::kRows; ++row) {
      const size_t cell = spec.Cell(key, row);
      const uint32_t shift = 16 * (cell % 2);
      uint32_t& word = sketch[cell / 2];
      for (uint32_t seen = Load(word); (seen >> shift & 0xFFFFu) < count;) {
        if (Exchange(word, seen, (seen & ~(0xFFFFu << shift)) | count << shift)) break;
      }
    }
  }
};

}  // namespace kvjax::device
