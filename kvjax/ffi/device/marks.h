// Marks: a digest of each row, made where the row is, by which two states of a device table are told apart.
//
// They are by row id, not by key: then what is compared lies in one order, and only keys whose row id has
// gone to another, which are few unless the table was loaded, have to be searched for.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/index.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// Of a row id: whose row it is, and 64 bits of all that the row has but its key; 0 where no key has it.
struct RowMark {
  uint64_t key, digest;

  bool operator==(const RowMark&) const = default;
};

/// Of a table at one version, in the host's memory.
struct Marks {
  uint32_t version;
  SlotLayout layout;
  std::vector<RowMark> rows;  // by row id
};

/// Bytes of a row that lie one after the other with no padding between, and the number of their first word.
struct Stretch {
  uint32_t offset, bytes;
  uint64_t first;

  [[nodiscard]] KVJAX_HD uint64_t end() const { return first + (bytes + 7) / 8; }
};

/// Those of the slots; what is left out is padding, which may hold anything.
inline std::vector<Stretch> StretchesOf(const SlotLayout& layout, uint64_t first) {
  std::vector<Stretch> out;
  for (const Slot& slot : layout.slots()) {
    const auto offset = static_cast<uint32_t>(slot.offset), bytes = static_cast<uint32_t>(slot.bytes);
    if (!out.empty() && out.back().offset + out.back().bytes == offset) {
      out.back().bytes += bytes;
    } else {
      out.push_back({offset, bytes, out.empty() ? first : out.back().end()});
    }
  }
  return out;
}

/// Up to eight bytes, from an address that is a multiple of four.
KVJAX_HD inline uint64_t LoadWord(const std::byte* at, size_t bytes) {
  uint64_t word = 0;
  if (bytes < sizeof(word)) {
    for (size_t b = 0; b < bytes; ++b) word |= static_cast<uint64_t>(at[b]) << (8 * b);
  } else if (reinterpret_cast<size_t>(at) % sizeof(word) == 0) {
    word = *reinterpret_cast<const uint64_t*>(at);
  } else {
    const auto* const half = reinterpret_cast<const uint32_t*>(at);
    word = half[0] | uint64_t{half[1]} << 32;
  }
  return word;
}

/// What the number-th word adds to a digest. It is a sum, so it does not matter which lane had which word;
/// and a bijection of each, so rows that differ in one word never have the same sum.
KVJAX_HD inline uint64_t DigestOf(uint64_t word, uint64_t number) {
  return Mix(word + (number + 1) * 0x9E3779B97F4A7C15ull);
}

/// What this lane of a tile adds to the digest of a row, of which `start` is where the stretch counts from.
template <class Tile>
KVJAX_HD uint64_t DigestOf(const Tile& tile, const std::byte* start, Stretch stretch) {
  uint64_t sum = 0;
  for (uint32_t at = 8 * static_cast<uint32_t>(tile.rank()); at < stretch.bytes;
       at += 8 * static_cast<uint32_t>(tile.size())) {
    sum += DigestOf(LoadWord(start + stretch.offset + at, stretch.bytes - at), stretch.first + at / 8);
  }
  return sum;
}

inline constexpr uint64_t kHeaderWords = sizeof(RowHeader) / sizeof(uint64_t);

/// Marks all rows that have a key; out: by row id, zeros before. slots: (num_slots,) stretches. The lanes of
/// a tile read their own rows' headers, and together one row's value and slots after the other.
template <class Q>
void MarkRows(Q& q, RowsView in, Stretch value, const Stretch* slots, size_t num_slots, RowMark* out) {
  q.Tiles(in.index.cells(), [=] KVJAX_HD(typename Q::Tile tile, size_t cell) {
    const IndexView::Entry* const entry = cell < in.index.cells() ? in.index.At(cell) : nullptr;
    if (tile.Count(entry != nullptr) == 0) return;
    const uint32_t row = entry != nullptr ? entry->row : kNoRow;
    uint64_t digest = 0;
    bool has_slots = false;
    if (entry != nullptr) {
      const RowHeader header = in.Header(row);
      uint64_t words[kHeaderWords];
      memcpy(words, &header, sizeof(header));
      for (uint64_t w = 0; w < kHeaderWords; ++w) digest += DigestOf(words[w], w);
      has_slots = header.has_slots != 0;
    }
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t of = tile.Shuffle(row, lane);
      if (of == kNoRow) continue;
      uint64_t sum = DigestOf(tile, in.Value(of), value);
      if (tile.Shuffle(has_slots, lane)) {  // or they are what an earlier key left there
        for (size_t s = 0; s < num_slots; ++s) sum += DigestOf(tile, in.Slots(of), slots[s]);
      }
      sum = SumOfLanes(tile, sum);
      if (lane == tile.rank()) digest += sum;
    }
    if (entry != nullptr) out[row] = {entry->key, digest != 0 ? digest : 1};
  });
}

/// The marks of all rows now. Waits for the device. Throws std::bad_alloc.
template <class Q>
Marks MarksOf(Q& q, const Contents<Q>& contents, size_t row_bytes, const Control& control) {
  const Stretch value{0, static_cast<uint32_t>(row_bytes), kHeaderWords};
  const std::vector<Stretch> slots = StretchesOf(contents.layout(), value.end());
  Marks marks{control.version, contents.layout(), std::vector<RowMark>(control.next_row)};
  const size_t bytes = marks.rows.size() * sizeof(RowMark);
  const Scratch<Q, Stretch> stretches(q, slots.size());
  const Scratch<Q, RowMark> there(q, marks.rows.size());
  q.Copy(stretches.data(), slots.data(), slots.size() * sizeof(Stretch));
  q.Fill(there.data(), 0, bytes);
  MarkRows(q, contents.view(), value, stretches.data(), slots.size(), there.data());
  q.Copy(marks.rows.data(), there.data(), bytes);
  q.Wait();
  return marks;
}

/// Rows that are others or new, and keys that have none any more, in no order.
struct Difference {
  std::vector<KeyRow> rows, removed;
};
inline Difference DifferenceOf(const std::vector<RowMark>& before, const std::vector<RowMark>& now) {
  constexpr RowMark kNone = {0, 0};
  const auto at = [&](const std::vector<RowMark>& marks, size_t row) {
    return row < marks.size() ? marks[row] : kNone;
  };
  Difference out;
  std::vector<KeyRow> gone;  // from their row ids
  for (size_t row = 0; row < std::max(before.size(), now.size()); ++row) {
    const RowMark was = at(before, row), is = at(now, row);
    if (was == is) continue;
    const bool stayed = was.key == is.key && was.digest != 0 && is.digest != 0;
    if (is.digest != 0) out.rows.push_back({is.key, static_cast<uint32_t>(row)});
    if (was.digest != 0 && !stayed) gone.push_back({was.key, static_cast<uint32_t>(row)});
  }
  if (gone.empty()) return out;
  KeyIndex left;
  left.Reserve(gone.size());
  for (const KeyRow& r : gone) left.Insert(r.key, r.row);
  std::erase_if(out.rows, [&](const KeyRow& r) {
    const uint32_t row = left.Erase(r.key);
    return row != kNoRow && before[row].digest == now[r.row].digest;  // it has only moved
  });
  left.ForEach([&](uint64_t key, uint32_t row) { out.removed.push_back({key, row}); });
  return out;
}

}  // namespace kvjax::device
