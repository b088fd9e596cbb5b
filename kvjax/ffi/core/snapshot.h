// Snapshots: rows as columns of plain arrays, sorted by (bucket, key), so that equal tables give equal bytes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// The columns of n rows, owned or not. slots[s] is (n, bytes of slot s); has_slots is false where no
/// optimizer has written the row's slots.
template <template <class> class Array>
struct Columns {
  Array<int64_t> keys{};
  Array<std::byte> values{};
  Array<int64_t> frequencies{};
  Array<int64_t> versions{};
  Array<std::byte> has_slots{};
  Array<std::byte> pinned{};
  std::vector<Array<std::byte>> slots;
  SlotLayout layout;
  int64_t last_step = 0;
};

/// Calls f(name, elements a row, the column of each of `all`) for each column that every table has. The names
/// are those that Python gives and gets.
template <class F, class... All>
void EachColumn(size_t row_bytes, F f, All&... all) {
  f("keys", size_t{1}, all.keys...);
  f("values", row_bytes, all.values...);
  f("freqs", size_t{1}, all.frequencies...);
  f("versions", size_t{1}, all.versions...);
  f("has_slots", size_t{1}, all.has_slots...);
  f("pinned", size_t{1}, all.pinned...);
}

template <class T>
using OwnedArray = std::vector<T>;
template <class T>
using BorrowedArray = const T*;

/// Rows in arrays of its own. offsets: (kNumBuckets + 1,) first row of each bucket.
struct Snapshot : Columns<OwnedArray> {
  std::vector<int64_t> offsets;

  /// Makes all columns n rows long.
  void Resize(size_t n, size_t row_bytes) {
    EachColumn(row_bytes, [n](const char*, size_t width, auto& column) { column.resize(n * width); }, *this);
    for (const Slot& slot : layout.slots()) slots.emplace_back(n * slot.bytes);
  }
  /// Sets row i but for its value and slots.
  void Set(size_t i, uint64_t key, const RowHeader& header) {
    keys[i] = static_cast<int64_t>(key);
    frequencies[i] = static_cast<int64_t>(header.frequency);
    versions[i] = header.version;
    has_slots[i] = static_cast<std::byte>(header.has_slots);
    pinned[i] = static_cast<std::byte>(header.pinned);
  }
};

/// Rows in arrays that somebody else owns. `pinned` may be missing.
struct SnapshotView : Columns<BorrowedArray> {
  size_t n = 0;

  [[nodiscard]] RowHeader Header(size_t i) const {
    return {.frequency = std::min(static_cast<uint64_t>(frequencies[i]), kMaxFrequency),
            .pinned = pinned != nullptr && pinned[i] != std::byte{0},
            .has_slots = !layout.empty() && has_slots[i] != std::byte{0},
            .version = versions[i]};
  }
};

/// A key and the row it has.
struct KeyRow {
  uint64_t key;
  uint32_t row;
};

/// A counting sort by bucket, then a small sort by key inside each. Returns the first position of each
/// bucket.
inline std::vector<int64_t> SortByBucket(std::vector<KeyRow>& rows) {
  std::vector<int64_t> offsets(kNumBuckets + 1, 0);
  for (const KeyRow& r : rows) ++offsets[BucketOf(r.key) + 1];
  for (uint32_t b = 0; b < kNumBuckets; ++b) offsets[b + 1] += offsets[b];
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  std::vector<KeyRow> sorted(rows.size());
  for (const KeyRow& r : rows) sorted[static_cast<size_t>(next[BucketOf(r.key)]++)] = r;
  for (uint32_t b = 0; b < kNumBuckets; ++b) {
    std::sort(sorted.begin() + offsets[b], sorted.begin() + offsets[b + 1],
              [](const KeyRow& x, const KeyRow& y) {
                return static_cast<int64_t>(x.key) < static_cast<int64_t>(y.key);
              });
  }
  rows = std::move(sorted);
  return offsets;
}

/// Copies `rows` out in their order, each value `row_bytes` wide; `offsets` and `last_step` stay empty.
inline Snapshot CopyRows(const RowStore& store, const std::vector<KeyRow>& rows, size_t row_bytes,
                         bool with_slots) {
  const size_t n = rows.size();
  Snapshot out;
  if (with_slots) out.layout = store.layout();
  out.Resize(n, row_bytes);
  for (size_t i = 0; i < n; ++i) {
    const auto [key, row] = rows[i];
    const RowHeader& header = store.Header(row);
    out.Set(i, key, header);
    std::memcpy(out.values.data() + i * row_bytes, store.Value(row), row_bytes);
    if (header.has_slots == 0) continue;  // what an earlier key left there stays behind
    for (size_t s = 0; s < out.slots.size(); ++s) {
      const Slot& slot = out.layout.slots()[s];
      std::copy_n(store.Slots(row) + slot.offset, slot.bytes, out.slots[s].data() + i * slot.bytes);
    }
  }
  return out;
}

/// Fills an empty store; returns the position of the first key that comes twice, or n.
inline size_t FillStore(RowStore& store, const SnapshotView& in, size_t row_bytes) {
  store.AttachSlots(in.layout);
  store.Reserve(in.n);
  for (size_t i = 0; i < in.n; ++i) {
    const auto key = static_cast<uint64_t>(in.keys[i]);
    if (store.index().Find(key) != kNoRow) return i;
    const uint32_t row = store.Insert(key);
    store.Header(row) = in.Header(i);
    std::memcpy(store.Value(row), in.values + i * row_bytes, row_bytes);
    for (size_t s = 0; s < in.slots.size(); ++s) {
      const Slot& slot = in.layout.slots()[s];
      std::copy_n(in.slots[s] + i * slot.bytes, slot.bytes, store.Slots(row) + slot.offset);
    }
  }
  return in.n;
}

}  // namespace kvjax
