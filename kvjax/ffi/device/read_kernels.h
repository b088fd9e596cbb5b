// The kernels of reads. A read through a handle that is not the live one gives rows of NaN.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/device/admission_view.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/initial.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// A read is checked by the lane of its first key; one of no keys by this.
template <class Q>
void CheckEmpty(Q& q, CallView call, size_t n) {
  if (n == 0) q.Once([=] KVJAX_HD() { (void)call.Current(true); });
}

/// The rows (n,) of the keys that are valid, kNoRow where there is none or the call is not let in.
template <class Q>
void FindRows(Q& q, CallView call, IndexView index, const uint64_t* keys, Valid valid, size_t n,
              uint32_t* rows) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) {
    rows[i] = call.Current(i == 0) && valid(i) ? index.Find(keys[i]) : kNoRow;
  });
}

/// See Table::Lookup. With rows that come with the call, first and number say which is whose.
struct LookupView {
  CallView call;
  RowsView in;
  InitialView initial;
  const uint64_t* keys;
  const bool* mask;
  AdmissionView admission;
  bool decides;  // whether that says what keys without a row read as: their initial row, or
  bool zeros;    // zeros, or a shared row
  const uint32_t* first;
  const uint32_t* number;
  const uint32_t* total;
  std::byte* rows;
  bool* found;
  bool own_rows = false;    // whether an initial row counts as found
  uint64_t shared_key = 0;  // of the shared row, whose number is behind those of the keys
  size_t shared_place = 0;
};

template <class Q>
void LookupRows(Q& q, LookupView v, size_t n) {
  CheckEmpty(q, v.call, n);
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool current = v.call.Current(i == 0);
    const bool valid = i < n && (v.mask == nullptr || v.mask[i]);
    const uint32_t row = current && valid ? v.in.index.Find(v.keys[i]) : kNoRow;
    const bool absent = current && valid && row == kNoRow;
    const bool own = absent && (!v.decides || v.admission.ReadsInitial(v.keys[i]));
    if (i < n) v.found[i] = row != kNoRow || (v.own_rows && own);
    const int hits = tile.Count(row != kNoRow), misses = tile.Count(absent);
    if (tile.rank() == 0) {
      v.call.control->hits.Add(i / tile.size(), hits);
      v.call.control->misses.Add(i / tile.size(), misses);
    }
    const bool given = v.number != nullptr;
    if (i == 0 && given && *v.total > v.initial.given_rows) {
      v.call.Refuse(Refusal::kInitial, *v.total, static_cast<uint32_t>(v.initial.given_rows));
    }
    const bool shares = absent && !own && !v.zeros;
    const uint32_t shared = shares ? v.in.index.Find(v.shared_key) : kNoRow;
    const bool makes = own || (shares && shared == kNoRow);
    const uint32_t from = shares ? shared : row;
    std::byte* const target = i < n ? v.rows + i * v.initial.row_bytes : nullptr;
    CopyRecords(tile, makes ? nullptr : target, from == kNoRow ? nullptr : v.in.Value(from),
                v.initial.row_bytes, current ? 0 : 0xFF);
    const uint64_t key = shares ? v.shared_key : i < n ? v.keys[i] : 0;
    const uint32_t number = makes && given ? v.number[v.first[shares ? v.shared_place : i]] : 0;
    v.initial.WriteRows(tile, key, number, makes ? target : nullptr);
  });
}

/// See Table::FindMissing; out: zero before; numbers and total as NumberKeys gives them for the keys without
/// a row.
template <class Q>
void WriteMissing(Q& q, const uint64_t* keys, Valid missing, size_t n, const uint32_t* first,
                  const uint32_t* number, const uint32_t* total, uint64_t* out, int32_t* count) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (missing(i) && first[i] == i) out[number[i]] = keys[i];
  });
  q.Once([=] KVJAX_HD() { *count = static_cast<int32_t>(*total); });
}

/// See Table::Inspect.
template <class Q>
void InspectRows(Q& q, CallView call, RowsView in, AdmissionView by, const uint64_t* keys, size_t n,
                 bool* found, int64_t* frequency, int64_t* row_version, bool* pinned) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool current = call.Current(i == 0);
    const uint32_t row = current ? in.index.Find(keys[i]) : kNoRow;
    found[i] = row != kNoRow;
    const int64_t waiting = current && !found[i] ? by.Count(keys[i]) : 0;
    frequency[i] = found[i] ? static_cast<int64_t>(in.Header(row).frequency) : waiting;
    row_version[i] = found[i] ? in.Header(row).version : -1;
    pinned[i] = found[i] && in.Header(row).pinned != 0;
  });
}

/// See Table::ReadSlot; the slot is `bytes` at `offset` of the record, if it is one.
template <class Q>
void ReadSlotOf(Q& q, CallView call, RowsView in, bool slot, size_t offset, size_t bytes,
                const uint64_t* keys, size_t n, std::byte* out) {
  CheckEmpty(q, call, n);
  if (!slot) {
    q.Each(n, [=] KVJAX_HD(size_t i) {
      const uint32_t row = call.Current(i == 0) ? in.index.Find(keys[i]) : kNoRow;
      const bool has = row != kNoRow && in.Header(row).has_slots != 0;
      for (size_t j = 0; j < bytes; ++j) out[i * bytes + j] = static_cast<std::byte>(has);
    });
    return;
  }
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const uint32_t row = i < n && call.Current(i == 0) ? in.index.Find(keys[i]) : kNoRow;
    const bool has = row != kNoRow && in.Header(row).has_slots != 0;
    CopyRecords(tile, i < n ? out + i * bytes : nullptr, has ? in.Slots(row) + offset : nullptr, bytes);
  });
}

/// See Table::Changed: true of every key unless nothing at all has been written.
template <class Q>
void MarkChanged(Q& q, CallView call, const uint32_t* since, size_t n, bool* changed) {
  CheckEmpty(q, call, n);
  q.Each(n, [=] KVJAX_HD(size_t i) { changed[i] = !call.Current(i == 0) || *since != *call.version; });
}

}  // namespace kvjax::device
