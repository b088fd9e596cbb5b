// What reads do on the device. A read through a handle that is not the live one gives rows of NaN.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/cuda/contents.h"
#include "kvjax/ffi/cuda/control.h"
#include "kvjax/ffi/cuda/groups.h"
#include "kvjax/ffi/cuda/initial.h"
#include "kvjax/ffi/cuda/memory.h"

namespace kvjax::device {

/// A read is checked by the lane of its first key; one of no keys by this.
template <class Q>
void CheckEmpty(Q& q, CallView call, size_t n) {
  if (n == 0) q.Once([=] KVJAX_HD() { (void)call.Current(true); });
}

/// The rows (n,) of the keys that are meant, kNoRow where there is none or the call is not let in.
template <class Q>
void FindRows(Q& q, CallView call, IndexView index, const uint64_t* keys, Meant meant, size_t n,
              uint32_t* rows) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) {
    rows[i] = call.Current(i == 0) && meant(i) ? index.Find(keys[i]) : kNoRow;
  });
}

/// The distinct ones of n keys that are meant, numbered by first occurrence: number[first[i]] is that of
/// keys[i]. total: how many there are.
template <class Q>
void NumberKeys(Q& q, const uint64_t* keys, Meant meant, size_t n, uint32_t* first, uint32_t* number,
                uint32_t* total) {
  q.Fill(total, 0, sizeof(uint32_t));
  if (n == 0) return;
  Scratch<Q, uint32_t> flags(q, n);
  uint32_t* const flag = flags.data();
  GroupKeys(q, keys, meant, n, first, nullptr);
  q.Each(n, [=] KVJAX_HD(size_t i) { flag[i] = meant(i) && first[i] == i ? 1 : 0; });
  q.ExclusiveSum(flag, number, n);
  q.Once([=] KVJAX_HD() { *total = number[n - 1] + flag[n - 1]; });
}

/// See Table::Lookup. With rows that come with the call, first and number say which is whose.
struct LookupView {
  CallView call;
  RowsView in;
  InitialView initial;
  const uint64_t* keys;
  const bool* mask;
  bool zeros;  // what keys without a row read as
  const uint32_t* first;
  const uint32_t* number;
  const uint32_t* total;
  std::byte* rows;
  bool* found;
  bool shares = false;  // whether keys without a row read the row of a key, whose number is behind theirs
  uint64_t shared_key = 0;
  size_t shared_place = 0;
};

template <class Q>
void LookupRows(Q& q, LookupView v, size_t n) {
  CheckEmpty(q, v.call, n);
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool current = v.call.Current(i == 0);
    const bool meant = i < n && (v.mask == nullptr || v.mask[i]);
    const uint32_t row = current && meant ? v.in.index.Find(v.keys[i]) : kNoRow;
    if (i < n) v.found[i] = row != kNoRow;
    const int hits = tile.Count(row != kNoRow), misses = tile.Count(current && meant && row == kNoRow);
    const size_t base = i - tile.rank();
    if (tile.rank() == 0) {
      v.call.control->hits.Add(base / tile.size(), hits);
      v.call.control->misses.Add(base / tile.size(), misses);
    }
    const uint32_t shared = current && v.shares ? v.in.index.Find(v.shared_key) : kNoRow;
    const bool given = v.number != nullptr;
    if (i == 0 && given && *v.total > v.initial.given_rows) {
      v.call.Refuse(Refusal::kInitial, *v.total, static_cast<uint32_t>(v.initial.given_rows));
    }
    const size_t bytes = v.initial.row_bytes;
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t from = tile.Shuffle(row, lane);
      const bool is_meant = tile.Shuffle(meant, lane);
      const size_t k = base + lane;
      if (k >= n) break;
      std::byte* const target = v.rows + k * bytes;
      if (!current) {
        FillRecord(tile, target, 0xFF, bytes);
      } else if (from != kNoRow) {
        CopyRecord(tile, target, v.in.Value(from), bytes);
      } else if (!is_meant || v.zeros) {
        FillRecord(tile, target, 0, bytes);
      } else if (shared != kNoRow) {
        CopyRecord(tile, target, v.in.Value(shared), bytes);
      } else {
        const size_t place = v.shares ? v.shared_place : k;
        v.initial.Write(tile, v.shares ? v.shared_key : v.keys[k], given ? v.number[v.first[place]] : 0,
                        target);
      }
    }
  });
}

/// See Table::FindMissing; out: zero before; numbers and total as NumberKeys gives them for the keys without
/// a row.
template <class Q>
void WriteMissing(Q& q, const uint64_t* keys, Meant missing, size_t n, const uint32_t* first,
                  const uint32_t* number, const uint32_t* total, uint64_t* out, int32_t* count) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (missing(i) && first[i] == i) out[number[i]] = keys[i];
  });
  q.Once([=] KVJAX_HD() { *count = static_cast<int32_t>(*total); });
}

/// See Table::Inspect.
template <class Q>
void InspectRows(Q& q, CallView call, RowsView in, const uint64_t* keys, size_t n, bool* found,
                 int64_t* frequency, int64_t* row_version) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const uint32_t row = call.Current(i == 0) ? in.index.Find(keys[i]) : kNoRow;
    found[i] = row != kNoRow;
    frequency[i] = found[i] ? static_cast<int64_t>(in.Header(row).frequency) : 0;
    row_version[i] = found[i] ? in.Header(row).version : -1;
  });
}

/// See Table::ReadSlot; the slot is `bytes` at `offset` of the record.
template <class Q>
void ReadSlotOf(Q& q, CallView call, RowsView in, size_t offset, size_t bytes, const uint64_t* keys, size_t n,
                std::byte* out) {
  CheckEmpty(q, call, n);
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const uint32_t row = i < n && call.Current(i == 0) ? in.index.Find(keys[i]) : kNoRow;
    const size_t base = i - tile.rank();
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t from = tile.Shuffle(row, lane);
      if (base + lane >= n) break;
      std::byte* const target = out + (base + lane) * bytes;
      if (from != kNoRow && in.Header(from).has_slots != 0) {
        CopyRecord(tile, target, in.Slots(from) + offset, bytes);
      } else {
        FillRecord(tile, target, 0, bytes);
      }
    }
  });
}

/// See Table::Changed: true of every key unless nothing at all has been written.
template <class Q>
void MarkChanged(Q& q, CallView call, const uint32_t* since, size_t n, bool* changed) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) { changed[i] = !call.Current(i == 0) || *since != *call.version; });
}

}  // namespace kvjax::device
