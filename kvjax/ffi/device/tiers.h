// Tiers: rows of frequent keys stay in device memory where there is not space for all, by a pass over the
// index, now and then, which swaps them with the rows of rare keys.
//
// The pass counts rows by how frequent their keys are, in bins of a quarter of a power of two. From that the
// device finds the bin at which it is full, and then lists rows in pinned memory that belong on the device,
// and as many on the device that do not, or that no key has. A row is swapped only with one of a lower
// bin, so that none moves to and fro. A row id is written once, in the entry of its key or the stack
// of free ids; so two rows have been swapped when these words have, and what is kept under the ids.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// What a pass knows, in device memory; zeros before.
struct HotRows {
  static constexpr int kBins = 256, kFree = -2;
  enum List : uint32_t { kHot, kWarm, kCold, kCool, kLists };

  Counts counts[2 * kBins];  // rows by bin, those on the device and those in pinned memory
  Counts free;               // row ids on the device that no key has
  uint64_t rows[2 * kBins];  // the sums of the first
  int full;                  // the highest bin not all of whose rows fit on the device; -1 if everything does
  uint64_t swaps;            // pairs of rows to swap
  uint64_t begin[kLists], listed[kLists];

  /// Ascends with the frequency, to 1 + 4 * 61 + 3.
  KVJAX_HD static int Bin(uint64_t frequency) {
    if (frequency == 0) return 0;
    const int power = BitWidth(frequency) - 1;
    const uint64_t quarters = power >= 2 ? frequency >> (power - 2) : frequency << (2 - power);
    return 1 + 4 * power + static_cast<int>(quarters & 3);
  }

  KVJAX_HD void Count(uint64_t lane, int bin, bool on_device) {
    (bin == kFree ? free : counts[on_device ? bin : kBins + bin]).Add(lane, 1);
  }
  /// Rows of bins above `full` come first, and are swapped with any of a lower bin; what is left
  /// below `full` is swapped with rows of that bin.
  KVJAX_HD void Plan(uint64_t device_rows, uint64_t most) {
    uint64_t fitting = 0, hot = 0;
    for (full = kBins - 1; full >= 0; --full) {
      const uint64_t more = rows[full] + rows[kBins + full];
      if (fitting + more > device_rows) break;
      fitting += more;
      hot += rows[kBins + full];
    }
    uint64_t cold = free.Sum();
    for (int bin = 0; bin < full; ++bin) cold += rows[bin];
    const uint64_t warm = full < 0 ? 0 : rows[kBins + full], cool = full < 0 ? 0 : rows[full];
    swaps = hot > cold ? hot : hot + warm < cold ? hot + warm : cold;
    if (swaps > cold + cool) swaps = cold + cool;
    if (swaps > most) swaps = most;
    begin[kHot] = begin[kCold] = 0;
    begin[kWarm] = hot;
    begin[kCool] = cold;
  }
  /// Lists a row if it is to be swapped.
  KVJAX_HD void Enlist(uint32_t* id, int bin, bool on_device, uint32_t** coming, uint32_t** going) {
    if (on_device ? bin > full : bin < full) return;
    const List list = on_device ? (bin < full ? kCold : kCool) : (bin > full ? kHot : kWarm);
    if (begin[list] + Load(listed[list]) >= swaps) return;
    const uint64_t number = begin[list] + Add(listed[list], uint64_t{1});
    if (number < swaps) (on_device ? going : coming)[number] = id;
  }
};

/// All row ids where they are written: those of keys, then the free ones on the device.
struct RowIds {
  RowsView in;
  const Control* control;
  size_t device_rows;

  /// The word of the i-th, or nullptr, and the bin of its key.
  KVJAX_HD uint32_t* At(size_t i, int& bin) const {
    if (i < in.index.cells()) {
      IndexView::Entry* const entry = in.index.At(i);
      if (entry == nullptr) return nullptr;
      bin = HotRows::Bin(in.Header(entry->row).frequency);
      return &entry->row;
    }
    bin = HotRows::kFree;
    const size_t number = i - in.index.cells();
    return number < control->free_rows && in.free[number] < device_rows ? &in.free[number] : nullptr;
  }
};

/// The lanes of a tile swap two records, whose addresses and size are multiples of four.
template <class Piece, class Tile>
KVJAX_HD void SwapPieces(const Tile& tile, std::byte* a, std::byte* b, size_t bytes) {
  auto *const x = reinterpret_cast<Piece*>(a), *const y = reinterpret_cast<Piece*>(b);
  for (size_t i = tile.rank(); i < bytes / sizeof(Piece); i += tile.size()) {
    const Piece from_x = x[i], from_y = y[i];
    x[i] = from_y;
    y[i] = from_x;
  }
}
template <class Tile>
KVJAX_HD void SwapRecords(const Tile& tile, PlaneView plane, uint32_t a, uint32_t b) {
  if (plane.stride == 0) return;
  std::byte *const x = plane.At(a), *const y = plane.At(b);
  if (plane.stride % 16 == 0) {
    SwapPieces<Sixteen>(tile, x, y, plane.stride);
  } else {
    SwapPieces<uint32_t>(tile, x, y, plane.stride);
  }
}

/// Finds up to `most` pairs of rows to swap, unless the handle of the call is not the live
/// one. ids: how many RowIds has.
template <class Q>
void ListSwaps(Q& q, CallView call, RowIds rows, size_t ids, HotRows* hot, uint32_t** coming,
               uint32_t** going, size_t most) {
  q.Fill(hot, 0, sizeof(HotRows));
  q.Each(ids, [=] KVJAX_HD(size_t i) {
    int bin;
    const uint32_t* const id = rows.At(i, bin);
    if (id != nullptr) hot->Count(i, bin, *id < rows.device_rows);
  });
  q.Each(2 * HotRows::kBins, [=] KVJAX_HD(size_t i) { hot->rows[i] = hot->counts[i].Sum(); });
  q.Once([=] KVJAX_HD() {
    if (call.Current(false)) hot->Plan(rows.device_rows, most);
  });
  q.Each(ids, [=] KVJAX_HD(size_t i) {
    int bin;
    if (hot->swaps == 0) return;
    uint32_t* const id = rows.At(i, bin);
    if (id != nullptr) hot->Enlist(id, bin, *id < rows.device_rows, coming, going);
  });
}
template <class Q>
void SwapRows(Q& q, RowsView in, const HotRows* hot, uint32_t* const* coming, uint32_t* const* going,
              size_t most) {
  q.Tiles(most, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool swaps = i < hot->swaps;
    const uint32_t from = swaps ? *coming[i] : kNoRow, to = swaps ? *going[i] : kNoRow;
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t a = tile.Shuffle(from, lane), b = tile.Shuffle(to, lane);
      if (a == kNoRow) break;
      SwapRecords(tile, in.values, a, b);
      SwapRecords(tile, in.headers, a, b);
      SwapRecords(tile, in.slots, a, b);
    }
    if (swaps) *coming[i] = to, *going[i] = from;
  });
}

inline constexpr size_t kMostSwaps = size_t{1} << 20;  // so that a pass is short, and its lists are small

/// A pass. No row id may be in use outside of the table if the handle of the call is the live one. Throws
/// std::bad_alloc and has done nothing.
template <class Q>
void KeepHot(Q& q, CallView call, const Contents<Q>& contents, size_t most = kMostSwaps) {
  const size_t device_rows = contents.device_rows();
  if (device_rows == 0 || contents.rows() <= device_rows) return;
  most = std::min({most, device_rows, contents.rows() - device_rows});
  const Scratch<Q, HotRows> hot(q, 1);
  const Scratch<Q, uint32_t*> coming(q, most), going(q, most);
  const RowIds rows{contents.view(), call.control, device_rows};
  ListSwaps(q, call, rows, contents.index().cells() + contents.free_capacity(), hot.data(), coming.data(),
            going.data(), most);
  SwapRows(q, rows.in, hot.data(), coming.data(), going.data(), most);
}

/// What there is of a table in pinned memory, of its rows and of the occurrences of their keys; zeros before.
struct PinnedShare {
  Counts rows, occurrences, all_occurrences;
};
template <class Q>
void CountPinned(Q& q, RowsView in, size_t device_rows, PinnedShare* share) {
  q.Each(in.index.cells(), [=] KVJAX_HD(size_t cell) {
    const IndexView::Entry* const entry = in.index.At(cell);
    if (entry == nullptr) return;
    const uint64_t frequency = in.Header(entry->row).frequency;
    const bool pinned = entry->row >= device_rows;
    share->rows.Add(cell, pinned ? 1 : 0);
    share->occurrences.Add(cell, pinned ? frequency : 0);
    share->all_occurrences.Add(cell, frequency);
  });
}

template <class Q>
PinnedShare PinnedOf(Q& q, const Contents<Q>& contents) {
  if (contents.rows() <= contents.device_rows()) return {};
  PinnedShare share;
  const Scratch<Q, PinnedShare> there(q, 1);
  q.Fill(there.data(), 0, sizeof(share));
  CountPinned(q, contents.view(), contents.device_rows(), there.data());
  q.Copy(&share, there.data(), sizeof(share));
  q.Wait();
  return share;
}

}  // namespace kvjax::device
