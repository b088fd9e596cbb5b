// Rows as plain arrays, sorted by (bucket, key): equal tables give equal bytes.
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

/// All arrays have n rows. slots[s] is (n, bytes of slot s); has_slots is false where no optimizer has
/// written the row's slots. offsets: (kNumBuckets + 1,) first row of each bucket.
struct Snapshot {
  std::vector<int64_t> keys;
  std::vector<std::byte> values;
  std::vector<int64_t> frequencies;
  std::vector<int64_t> versions;
  std::vector<std::byte> has_slots;
  std::vector<std::byte> pinned;
  std::vector<std::vector<std::byte>> slots;
  std::vector<int64_t> offsets;
  SlotLayout layout;
  int64_t last_step = 0;
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
  out.keys.resize(n);
  out.values.resize(n * row_bytes);
  out.frequencies.resize(n);
  out.versions.resize(n);
  out.has_slots.resize(n);
  out.pinned.resize(n);
  for (const Slot& slot : out.layout.slots()) out.slots.emplace_back(n * slot.bytes);
  for (size_t i = 0; i < n; ++i) {
    const auto [key, row] = rows[i];
    const RowHeader& header = store.Header(row);
    out.keys[i] = static_cast<int64_t>(key);
    std::memcpy(out.values.data() + i * row_bytes, store.Value(row), row_bytes);
    out.frequencies[i] = static_cast<int64_t>(header.frequency);
    out.versions[i] = header.version;
    out.has_slots[i] = static_cast<std::byte>(header.has_slots);
    out.pinned[i] = static_cast<std::byte>(header.pinned);
    if (header.has_slots == 0) continue;  // what an earlier key left there stays behind
    for (size_t s = 0; s < out.slots.size(); ++s) {
      const Slot& slot = out.layout.slots()[s];
      std::copy_n(store.Slots(row) + slot.offset, slot.bytes, out.slots[s].data() + i * slot.bytes);
    }
  }
  return out;
}

/// The arrays of a snapshot that somebody else owns. `pinned` may be missing.
struct SnapshotView {
  size_t n = 0;
  const int64_t* keys = nullptr;
  const std::byte* values = nullptr;
  const int64_t* frequencies = nullptr;
  const int64_t* versions = nullptr;
  const std::byte* has_slots = nullptr;
  const std::byte* pinned = nullptr;
  std::vector<const std::byte*> slots;
  SlotLayout layout;
  int64_t last_step = 0;
};

/// Fills an empty store; returns the position of the first key that comes twice, or n.
inline size_t FillStore(RowStore& store, const SnapshotView& in, size_t row_bytes) {
  store.AttachSlots(in.layout);
  store.Reserve(in.n);
  for (size_t i = 0; i < in.n; ++i) {
    const auto key = static_cast<uint64_t>(in.keys[i]);
    if (store.index().Find(key) != kNoRow) return i;
    const uint32_t row = store.Insert(key);
    store.Header(row) = {.frequency = std::min(static_cast<uint64_t>(in.frequencies[i]), kMaxFrequency),
                         .pinned = in.pinned != nullptr && in.pinned[i] != std::byte{0},
                         .has_slots = !in.layout.empty() && in.has_slots[i] != std::byte{0},
                         .version = in.versions[i]};
    std::memcpy(store.Value(row), in.values + i * row_bytes, row_bytes);
    for (size_t s = 0; s < in.slots.size(); ++s) {
      const Slot& slot = in.layout.slots()[s];
      std::copy_n(in.slots[s] + i * slot.bytes, slot.bytes, store.Slots(row) + slot.offset);
    }
  }
  return in.n;
}

}  // namespace kvjax
