// Snapshots: rows as columns of plain arrays, sorted by (bucket, key), so that equal tables give equal bytes.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/pages.h"
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
using OwnedArray = Unfilled<T>;
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

/// A snapshot that is handed out as the rows of a table are that are copied out part by part: all at once.
class WholeSnapshot {
 public:
  explicit WholeSnapshot(Snapshot all) : all_(std::move(all)), size_(all_.keys.size()) {}
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] const std::vector<int64_t>& offsets() const { return all_.offsets; }
  [[nodiscard]] const SlotLayout& layout() const { return all_.layout; }
  [[nodiscard]] int64_t last_step() const { return all_.last_step; }
  [[nodiscard]] bool pinned() const {
    return std::any_of(all_.pinned.begin(), all_.pinned.end(), [](std::byte b) { return b != std::byte{0}; });
  }
  [[nodiscard]] Snapshot Next() {
    Snapshot rest;
    rest.layout = all_.layout;
    rest.Resize(0, 0);
    return std::exchange(all_, std::move(rest));
  }
  [[nodiscard]] double pause() const { return 0; }

 private:
  Snapshot all_;
  size_t size_;
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

/// A key and its row where there are lists of all of them: without the 4 bytes that align a KeyRow.
struct [[gnu::packed, gnu::aligned(4)]] ListedRow {
  uint64_t key;
  uint32_t row;

  operator KeyRow() const { return {key, row}; }
};
static_assert(sizeof(ListedRow) == 12);

/// Rows by (bucket, key), and where those of each bucket begin: (kNumBuckets + 1,).
struct SortedRows {
  Unfilled<ListedRow> rows;
  std::vector<int64_t> offsets;

  /// Buckets are sorted in so many parts, each of a width that fits into a cache. (Here, as GCC 12 behind
  /// nvcc fails on constants of a template's own.)
  static constexpr uint32_t kParts = 256, kWidth = kNumBuckets / kParts;
  using Places = std::array<size_t, kWidth>;

  /// The first row of a part, or the end.
  [[nodiscard]] size_t Begin(size_t part) const { return static_cast<size_t>(offsets[part * kWidth]); }

  /// Sorts a part that holds its rows in any order. Throws std::bad_alloc.
  void SortPart(size_t part) {
    const size_t begin = Begin(part), first_bucket = part * kWidth;
    ListedRow* const to = rows.data();
    const Unfilled<ListedRow> from(to + begin, to + Begin(part + 1));
    Places place;
    std::copy_n(offsets.begin() + static_cast<ptrdiff_t>(first_bucket), kWidth, place.begin());
    for (const ListedRow& r : from) to[place[BucketOf(r.key) % kWidth]++] = r;
    for (size_t b = 0, first = begin; b < kWidth; first = place[b++]) {
      std::sort(to + first, to + place[b], [](const ListedRow& x, const ListedRow& y) {
        return static_cast<int64_t>(x.key) < static_cast<int64_t>(y.key);
      });
    }
  }
};

/// Deals n rows out to the parts, which are still to be sorted: each(c, f) calls f for those in chunk c of
/// `chunks`, every time the same.
template <class Each>
SortedRows DealByBucket(const ParallelFor& parallel, size_t n, size_t chunks, Each each) {
  constexpr uint32_t kParts = SortedRows::kParts, kWidth = SortedRows::kWidth;
  std::vector<std::vector<uint32_t>> counts(chunks);  // how many rows of a bucket a chunk has
  parallel(chunks, 1, [&](size_t begin, size_t end) {
    for (size_t c = begin; c < end; ++c) {
      counts[c].resize(kNumBuckets);
      each(c, [&](const KeyRow& r) { ++counts[c][BucketOf(r.key)]; });
    }
  });
  SortedRows out{Unfilled<ListedRow>(n), std::vector<int64_t>(kNumBuckets + 1)};
  std::vector<std::array<size_t, kParts>> next(chunks);  // where the rows of a part that a chunk has go
  size_t at = 0;
  for (size_t p = 0; p < kParts; ++p) {
    size_t to = at;
    for (size_t c = 0; c < chunks; ++c) {
      next[c][p] = to;
      for (size_t b = p * kWidth; b < (p + 1) * kWidth; ++b) to += counts[c][b];
    }
    for (size_t b = p * kWidth; b < (p + 1) * kWidth; ++b) {
      for (const auto& chunk : counts) at += chunk[b];
      out.offsets[b + 1] = static_cast<int64_t>(at);
    }
  }
  parallel(chunks, 1, [&](size_t begin, size_t end) {
    for (size_t c = begin; c < end; ++c) {
      each(c, [&](const KeyRow& r) { out.rows[next[c][BucketOf(r.key) / kWidth]++] = {r.key, r.row}; });
    }
  });
  return out;
}

/// Sorts n rows.
///
/// They are dealt out by the high bits of their buckets, then part by part, which fits into a cache, by the
/// low ones; the few of a bucket are sorted by key.
template <class Each>
SortedRows SortByBucket(const ParallelFor& parallel, size_t n, size_t chunks, Each each) {
  constexpr uint32_t kParts = SortedRows::kParts;
  SortedRows out = DealByBucket(parallel, n, chunks, each);
  parallel(kParts, n < kParts ? kParts : 1, [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) out.SortPart(p);
  });
  return out;
}

/// Sorts rows by (bucket, key). Returns the first position of each bucket.
inline std::vector<int64_t> SortByBucket(std::vector<KeyRow>& rows) {
  SortedRows sorted = SortByBucket(Serial, rows.size(), 1, [&](size_t, auto f) {
    for (const KeyRow& r : rows) f(r);
  });
  std::copy(sorted.rows.begin(), sorted.rows.end(), rows.begin());
  return std::move(sorted.offsets);
}

/// All rows of a store, dealt out to the parts.
inline SortedRows DealByBucket(const ParallelFor& parallel, const RowStore& store) {
  constexpr size_t kFew = 2048;
  const size_t chunks = store.size() < kFew ? 1 : 16;
  return DealByBucket(parallel, store.size(), chunks, [&](size_t chunk, auto f) {
    store.index().ForEach(chunk, chunks, [&](uint64_t key, uint32_t row) { f(KeyRow{key, row}); });
  });
}

/// Copies `rows` in their order into `out`, which has space for them: the first becomes its row `at`. Of row
/// i, record(i) is what to take in its place: its header, its value and its slots one behind the other; or
/// nullptr for what the store has.
template <class Row, class Record>
void CopyRows(const RowStore& store, std::span<const Row> rows, size_t row_bytes, Snapshot& out, size_t at,
              Record record) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) {
      store.PrefetchValue(rows[i + kAhead].row);
      store.PrefetchHeader(rows[i + kAhead].row);
      if (!out.slots.empty()) store.PrefetchSlots(rows[i + kAhead].row);
    }
    const KeyRow r = rows[i];
    const std::byte* const kept = record(i);
    RowHeader header;
    std::memcpy(&header, kept != nullptr ? kept : reinterpret_cast<const std::byte*>(&store.Header(r.row)),
                sizeof(header));
    out.Set(at + i, r.key, header);
    CopyRecord(out.values.data() + (at + i) * row_bytes,
               kept != nullptr ? kept + sizeof(header) : store.Value(r.row), row_bytes);
    if (out.slots.empty()) continue;
    const std::byte* const slots = kept != nullptr ? kept + sizeof(header) + row_bytes : store.Slots(r.row);
    for (size_t s = 0; s < out.slots.size(); ++s) {
      const Slot& slot = out.layout.slots()[s];
      std::byte* const to = out.slots[s].data() + (at + i) * slot.bytes;
      if (header.has_slots != 0) {
        CopyRecord(to, slots + slot.offset, slot.bytes);
      } else {  // what an earlier key left there stays behind
        std::fill_n(to, slot.bytes, std::byte{0});
      }
    }
  }
}

/// For rows of which none has a record.
inline const std::byte* NoRecord(size_t /*row*/) { return nullptr; }

/// Copies `rows` out in their order, each value `row_bytes` wide; `offsets` and `last_step` stay empty.
inline Snapshot CopyRows(const RowStore& store, std::span<const KeyRow> rows, size_t row_bytes,
                         bool with_slots, const ParallelFor& parallel = Serial) {
  Snapshot out;
  if (with_slots) out.layout = store.layout();
  out.Resize(rows.size(), row_bytes);
  constexpr size_t kGrain = 1024;
  parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
    CopyRows(store, rows.subspan(begin, end - begin), row_bytes, out, begin, NoRecord);
  });
  if (store.away() == nullptr) return out;
  // What is not in memory was copied as zeros.
  store.away()->ReadAll(store, RowsAway::kValues, rows, [&](size_t i, const std::byte* value) {
    std::memcpy(out.values.data() + i * row_bytes, value, row_bytes);
  });
  if (out.slots.empty()) return out;
  store.away()->ReadAll(store, RowsAway::kSlots, rows, [&](size_t i, const std::byte* record) {
    for (size_t s = 0; s < out.slots.size(); ++s) {
      const Slot& slot = out.layout.slots()[s];
      std::copy_n(record + slot.offset, slot.bytes, out.slots[s].data() + i * slot.bytes);
    }
  });
  return out;
}

/// Copies all rows out, sorted; `last_step` stays empty.
inline Snapshot CopyAll(const RowStore& store, size_t row_bytes, bool with_slots,
                        const ParallelFor& parallel) {
  SortedRows sorted = DealByBucket(parallel, store);
  const size_t n = sorted.rows.size();
  constexpr uint32_t kParts = SortedRows::kParts;
  Snapshot out;
  if (store.away() != nullptr) {
    for (size_t p = 0; p < kParts; ++p) sorted.SortPart(p);
    out = CopyRows(store, std::vector<KeyRow>(sorted.rows.begin(), sorted.rows.end()), row_bytes, with_slots);
  } else {
    if (with_slots) out.layout = store.layout();
    out.Resize(n, row_bytes);
    parallel(kParts, n < kParts ? kParts : 1, [&](size_t begin, size_t end) {
      for (size_t p = begin; p < end; ++p) {  // while the list of a part is in the cache
        sorted.SortPart(p);
        const std::span<const ListedRow> rows(sorted.rows.data() + sorted.Begin(p),
                                              sorted.Begin(p + 1) - sorted.Begin(p));
        CopyRows(store, rows, row_bytes, out, sorted.Begin(p), NoRecord);
      }
    });
  }
  out.offsets = std::move(sorted.offsets);
  return out;
}

/// Fills an empty store; returns the position of the first key that comes twice, or n.
inline size_t FillStore(RowStore& store, const SnapshotView& in, size_t row_bytes,
                        const ParallelFor& parallel = Serial) {
  store.AttachSlots(in.layout);
  store.Reserve(in.n);
  constexpr size_t kGrain = 1024, kAhead = 16;
  std::atomic<bool> sorted = true;  // then none comes twice
  parallel(in.n, kGrain, [&](size_t begin, size_t end) {
    for (size_t i = std::max<size_t>(begin, 1); i < end && sorted; ++i) {
      const auto order = [&](size_t at) {
        return std::pair(BucketOf(static_cast<uint64_t>(in.keys[at])), in.keys[at]);
      };
      if (order(i - 1) >= order(i)) sorted = false;
    }
  });
  for (size_t i = 0; i < in.n; ++i) {  // row i is that of key i
    if (i + kAhead < in.n) store.PrefetchKey(static_cast<uint64_t>(in.keys[i + kAhead]));
    const auto key = static_cast<uint64_t>(in.keys[i]);
    if (!sorted && store.index().Find(key) != kNoRow) return i;
    store.Insert(key);
  }
  parallel(in.n, kGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const auto row = static_cast<uint32_t>(i);
      store.Header(row) = in.Header(i);
      CopyRecord(store.Value(row), in.values + i * row_bytes, row_bytes);
      for (size_t s = 0; s < in.slots.size(); ++s) {
        const Slot& slot = in.layout.slots()[s];
        std::copy_n(in.slots[s] + i * slot.bytes, slot.bytes, store.Slots(row) + slot.offset);
      }
    }
  });
  return in.n;
}

}  // namespace kvjax
