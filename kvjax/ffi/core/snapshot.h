// A table's contents as plain arrays, sorted by (bucket, key): equal tables give equal bytes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/table.h"

namespace kvjax {

/// All arrays have n rows. slots[s] is (n, bytes of slot s); has_slots is false where no optimizer has
/// written the row's slots. offsets: (kNumBuckets + 1,) first row of each bucket.
struct Snapshot {
  std::vector<int64_t> keys;
  std::vector<std::byte> values;
  std::vector<int64_t> frequencies;
  std::vector<int64_t> versions;
  std::vector<std::byte> has_slots;
  std::vector<std::vector<std::byte>> slots;
  std::vector<int64_t> offsets;
  SlotLayout layout;
  int64_t last_step = 0;
};

/// Copies the table out. `with_slots` false leaves the optimizer's slots behind.
inline Snapshot Export(const Table& table, uint32_t version, bool with_slots) {
  Snapshot out;
  table.Visit(version, [&](size_t n, const SlotLayout& layout, int64_t last_step, auto for_each) {
    struct Ref {
      int64_t key;
      RowHeader header;
      const std::byte* value;
      const std::byte* slots;
    };
    // A counting sort by bucket, then a small sort by key inside each.
    out.offsets.assign(kNumBuckets + 1, 0);
    for_each([&](uint64_t key, auto&&...) { ++out.offsets[BucketOf(key) + 1]; });
    for (uint32_t b = 0; b < kNumBuckets; ++b) out.offsets[b + 1] += out.offsets[b];
    std::vector<int64_t> next(out.offsets.begin(), out.offsets.end() - 1);
    std::vector<Ref> refs(n);
    for_each([&](uint64_t key, const RowHeader& header, const std::byte* value, const std::byte* slots) {
      refs[static_cast<size_t>(next[BucketOf(key)]++)] = {static_cast<int64_t>(key), header, value, slots};
    });
    for (uint32_t b = 0; b < kNumBuckets; ++b) {
      std::sort(refs.begin() + out.offsets[b], refs.begin() + out.offsets[b + 1],
                [](const Ref& x, const Ref& y) { return x.key < y.key; });
    }
    if (with_slots) out.layout = layout;
    out.last_step = last_step;
    out.keys.resize(n);
    out.values.resize(n * table.row_bytes());
    out.frequencies.resize(n);
    out.versions.resize(n);
    out.has_slots.resize(n);
    for (const Slot& slot : out.layout.slots()) out.slots.emplace_back(n * slot.bytes);
    for (size_t i = 0; i < n; ++i) {
      const Ref& ref = refs[i];
      out.keys[i] = ref.key;
      std::memcpy(out.values.data() + i * table.row_bytes(), ref.value, table.row_bytes());
      out.frequencies[i] = static_cast<int64_t>(ref.header.frequency);
      out.versions[i] = ref.header.version;
      out.has_slots[i] = static_cast<std::byte>(ref.header.has_slots);
      if (ref.header.has_slots == 0) continue;  // what an earlier key left there stays behind
      for (size_t s = 0; s < out.slots.size(); ++s) {
        const Slot& slot = out.layout.slots()[s];
        std::copy_n(ref.slots + slot.offset, slot.bytes, out.slots[s].data() + i * slot.bytes);
      }
    }
  });
  return out;
}

/// The arrays of a snapshot that somebody else owns.
struct SnapshotView {
  size_t n = 0;
  const int64_t* keys = nullptr;
  const std::byte* values = nullptr;
  const int64_t* frequencies = nullptr;
  const int64_t* versions = nullptr;
  const std::byte* has_slots = nullptr;
  std::vector<const std::byte*> slots;
  SlotLayout layout;
  int64_t last_step = 0;
};

/// Replaces the table's contents; returns its next version.
inline uint32_t Load(Table& table, uint32_t version, const SnapshotView& in) {
  std::vector<std::byte> record(in.layout.stride());
  return table.Replace(version, in.n, in.layout, in.last_step, [&](size_t i) {
    for (size_t s = 0; s < in.slots.size(); ++s) {
      const Slot& slot = in.layout.slots()[s];
      std::copy_n(in.slots[s] + i * slot.bytes, slot.bytes, record.data() + slot.offset);
    }
    const RowHeader header{.frequency = static_cast<uint64_t>(in.frequencies[i]),
                           .has_slots = !in.layout.empty() && in.has_slots[i] != std::byte{0},
                           .version = in.versions[i]};
    return std::tuple<uint64_t, RowHeader, const std::byte*, const std::byte*>{
        static_cast<uint64_t>(in.keys[i]), header, in.values + i * table.row_bytes(),
        in.layout.empty() ? nullptr : record.data()};
  });
}

}  // namespace kvjax
