// Snapshots: rows as columns of plain arrays, sorted by (bucket, key), so that equal tables give equal bytes.
#pragma once
#include <algorithm>
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
#include "kvjax/ffi/core/sorted.h"
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

  /// Sets row i but for its value and slots.
  void Set(size_t i, uint64_t key, const RowHeader& header) {
    keys[i] = static_cast<int64_t>(key);
    frequencies[i] = static_cast<int64_t>(header.frequency);
    versions[i] = header.version;
    has_slots[i] = static_cast<std::byte>(header.has_slots);
    if (pinned.data() != nullptr) pinned[i] = static_cast<std::byte>(header.pinned);
  }
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
using OwnedArray = UnfilledResult<T>;
template <class T>
using BorrowedArray = const T*;
template <class T>
using ArraySpace = std::span<T>;

/// Rows in arrays of its own. offsets: (kNumBuckets + 1,) first row of each bucket.
struct Snapshot : Columns<OwnedArray> {
  std::vector<int64_t> offsets;

  /// Makes all columns n rows long.
  void Resize(size_t n, size_t row_bytes) {
    EachColumn(row_bytes, [n](const char*, size_t width, auto& column) { column.resize(n * width); }, *this);
    for (const Slot& slot : layout.slots()) slots.emplace_back(n * slot.bytes);
  }
};

/// Space for rows in arrays that somebody else owns; none for `pinned` where no row is.
struct SnapshotSpace : Columns<ArraySpace> {
  size_t n = 0;  // rows that there is space for
};

/// A snapshot that is handed out as the rows of a table are that are copied out part by part.
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
  [[nodiscard]] size_t Next(const SnapshotSpace& to) {
    const size_t n = std::min(to.n, size_ - copied_);
    const auto copy = [&](size_t width, const auto& from, auto space) {
      if (!space.empty()) std::copy_n(from.begin() + copied_ * width, n * width, space.begin());
    };
    EachColumn(
        size_ == 0 ? 0 : all_.values.size() / size_,
        [&](const char*, size_t width, const auto& from, const auto& space) { copy(width, from, space); },
        all_, to);
    for (size_t s = 0; s < all_.slots.size(); ++s)
      copy(all_.layout.slots()[s].bytes, all_.slots[s], to.slots[s]);
    copied_ += n;
    return n;
  }
  [[nodiscard]] double pause() const { return 0; }

 private:
  Snapshot all_;
  size_t size_, copied_ = 0;
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

/// Copies `rows` in their order into `out`, which has space for them: the first becomes its row `at`. Of row
/// i, record(i) is what to take in its place: its header, its value and its slots one behind the other; or
/// nullptr for what the store has. With row_bytes 0 all but the values.
template <class Row, class Out, class Record>
void CopyRows(const RowStore& store, std::span<const Row> rows, size_t row_bytes, Out& out, size_t at,
              Record record) {
  constexpr size_t kAhead = 32, kAtOnce = 4096;
  const unsigned value = row_bytes > 0 ? RowStore::kValue : 0, slot = out.slots.empty() ? 0 : RowStore::kSlot;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i % kAtOnce == 0) {
      store.ReadAheadOf(std::min(kAtOnce, rows.size() - i), value | slot | RowStore::kHeader, [&](size_t j) {
        return record(i + j) == nullptr ? uint32_t{rows[i + j].row} : kNoRow;
      });
    }
    if (i + kAhead < rows.size()) {
      if (row_bytes > 0) store.PrefetchValue(rows[i + kAhead].row);
      store.PrefetchHeader(rows[i + kAhead].row);
      if (!out.slots.empty()) store.PrefetchSlots(rows[i + kAhead].row);
    }
    const KeyRow r = rows[i];
    const std::byte* const kept = record(i);
    RowHeader header;
    if (kept != nullptr) {
      std::memcpy(&header, kept, sizeof(header));
    } else {
      header = store.Header(r.row);
    }
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
  // What is not in memory was copied from the first place, where no row is.
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

/// Copies the value of each row to places[row] of `to`, or nowhere for kNoRow. Rows are read in the order of
/// memory, and written past the caches to where they belong: the processor waits for neither.
inline void ScatterValues(const RowStore& store, std::span<const uint32_t> places, size_t row_bytes,
                          std::byte* to, const ParallelFor& parallel) {
  constexpr size_t kGrain = 1024;
  parallel(places.size(), kGrain, [&](size_t begin, size_t end) {
    store.ReadAheadOf(end - begin, RowStore::kValue, [&](size_t i) {
      return places[begin + i] == kNoRow ? kNoRow : static_cast<uint32_t>(begin + i);
    });
    for (size_t row = begin; row < end; ++row) {
      if (places[row] == kNoRow) continue;
      StreamLines(to + places[row] * row_bytes, store.Value(static_cast<uint32_t>(row)), row_bytes);
    }
    EndStreams();
  });
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
    const bool scatter = CanStream(out.values.data(), row_bytes);
    UnfilledResult<uint32_t> places(scatter ? store.end_row() : 0);  // of each row
    if (n < places.size()) std::fill(places.begin(), places.end(), kNoRow);
    parallel(kParts, SortedRows::PartGrain(n), [&](size_t begin, size_t end) {
      for (size_t p = begin; p < end; ++p) {  // while the list of a part is in the cache
        sorted.SortPart(p);
        const size_t first = sorted.Begin(p);
        const std::span<const ListedRow> rows(sorted.rows.data() + first, sorted.Begin(p + 1) - first);
        CopyRows(store, rows, scatter ? 0 : row_bytes, out, first, NoRecord);
        for (size_t i = 0; scatter && i < rows.size(); ++i) {
          places[rows[i].row] = static_cast<uint32_t>(first + i);
        }
      }
    });
    ScatterValues(store, places, row_bytes, out.values.data(), parallel);
  }
  out.offsets = std::move(sorted.offsets);
  return out;
}

}  // namespace kvjax
