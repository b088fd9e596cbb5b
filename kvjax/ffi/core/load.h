// Contents on their way into a table, some rows at a time.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/sorted.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// What is known of contents before their rows come.
struct LoadHead {
  size_t rows = 0;
  SlotLayout layout;
  int64_t last_step = 0;
  AdmissionState admission;
};

/// Fills an empty store with rows that come some at a time.
class StoreFill {
 public:
  /// Reserves space for all of them. Throws std::bad_alloc.
  static void Begin(RowStore& store, const LoadHead& head) {
    store.AttachSlots(head.layout);
    store.Reserve(head.rows);
    store.Widen(0, head.last_step);  // which is the version of rows that are written by hand
  }

  /// Adds rows with the slots of the head; returns the position of the first key that is there already, or
  /// in.n.
  size_t Add(RowStore& store, const SnapshotView& in, size_t row_bytes,
             const ParallelFor& parallel = Serial) {
    store.Reserve(in.n);
    for (size_t i = 0; i < in.n; ++i) store.Widen(static_cast<uint64_t>(in.frequencies[i]), in.versions[i]);
    const uint32_t first = store.end_row();  // row first + i is that of key i
    const size_t added = Enter(store, in, first, parallel);
    if (added < in.n) return added;
    // What comes first in a slab is at the beginning of a page.
    const bool streams = in.n * row_bytes >= kStreamFrom && CanStream(nullptr, row_bytes);
    parallel(in.n, kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const auto row = static_cast<uint32_t>(first + i);
        store.SetHeader(row, in.Header(i));
        if (streams) {
          StreamLines(store.Value(row), in.values + i * row_bytes, row_bytes);
        } else {
          CopyRecord(store.Value(row), in.values + i * row_bytes, row_bytes);
        }
        for (size_t s = 0; s < in.slots.size(); ++s) {
          const Slot& slot = in.layout.slots()[s];
          std::copy_n(in.slots[s] + i * slot.bytes, slot.bytes, store.Slots(row) + slot.offset);
        }
      }
      if (streams) EndStreams();
    });
    return in.n;
  }

 private:
  static constexpr size_t kGrain = 1024, kAhead = 16;

  /// Gives the keys rows that follow each other.
  size_t Enter(RowStore& store, const SnapshotView& in, uint32_t first, const ParallelFor& parallel) {
    if (in.n == 0) return 0;
    const auto* const keys = reinterpret_cast<const uint64_t*>(in.keys);
    std::atomic<bool> sorted =
        sorted_ && (first == 0 || PlaceByBucket(last_) < PlaceByBucket(keys[0]));  // then none comes twice
    parallel(in.n, kGrain, [&](size_t begin, size_t end) {
      for (size_t i = std::max<size_t>(begin, 1); i < end && sorted; ++i) {
        if (PlaceByBucket(keys[i - 1]) >= PlaceByBucket(keys[i])) sorted = false;
      }
    });
    sorted_ = sorted, last_ = keys[in.n - 1];
    for (size_t i = 0; !sorted_ && i < in.n; ++i) {
      if (i + kAhead < in.n) store.PrefetchKey(keys[i + kAhead]);
      if (store.index().Find(keys[i]) != kNoRow) return i;
      store.Insert(keys[i]);
    }
    std::array<uint32_t, kGrain> ids;
    for (size_t i = 0; sorted_ && i < in.n; i += kGrain) {
      std::iota(ids.begin(), ids.end(), static_cast<uint32_t>(first + i));
      store.Insert(keys + i, ids.data(), std::min(kGrain, in.n - i));
    }
    return in.n;
  }

  bool sorted_ = true;
  uint64_t last_ = 0;
};

}  // namespace kvjax
