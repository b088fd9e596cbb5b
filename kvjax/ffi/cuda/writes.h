// What writes do on the device: a call is let in or not, rows come and go, and the next version is made.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cuda/contents.h"
#include "kvjax/ffi/cuda/control.h"
#include "kvjax/ffi/cuda/groups.h"
#include "kvjax/ffi/cuda/initial.h"
#include "kvjax/ffi/cuda/reads.h"

namespace kvjax::device {

template <class Q>
void BeginWrite(Q& q, CallView call) {
  q.Once([=] KVJAX_HD() {
    Control& control = *call.control;
    control.open = call.Current(true) ? 1 : 0;
    control.entering = control.leaving = control.active = 0;
  });
}

/// The rows that the call has made and taken away become part of what there is.
KVJAX_HD inline void Settle(Control& control, uint64_t max_capacity) {
  const uint32_t reused = control.entering < control.free_rows ? control.entering : control.free_rows;
  control.free_rows = control.free_rows - reused + control.leaving;
  control.next_row += control.entering - reused;
  control.size += control.entering;
  control.size -= control.leaving;
  const uint64_t over = max_capacity > 0 && control.size > max_capacity ? control.size - max_capacity : 0;
  control.over_capacity += over < control.entering ? over : control.entering;
  control.inserted += control.entering;
  control.removed += control.leaving;
  control.entering = control.leaving = 0;
}

/// Reports what there is after the write of that number.
KVJAX_HD inline void Tell(const Control& control, Report& report, uint32_t number) {
  StoreForHost(report.begun, number);
  StoreForHost(report.size, control.size);
  StoreForHost(report.slots_used, control.slots_used.Sum());
  StoreForHost(report.waiting, control.waiting.Sum());
  StoreForHost(report.waiting_slots, control.waiting_slots.Sum());
  StoreForHost(report.next_row, control.next_row);
  StoreForHost(report.free_rows, control.free_rows);
  StoreForHost(report.version, control.version);
  StoreForHost(report.write, number);
}
template <class Q>
void TellHost(Q& q, const Control* control, Report* report, uint32_t number) {
  q.Once([=] KVJAX_HD() { Tell(*control, *report, number); });
}

/// In the middle of a call: the rows that it has taken away may be given again.
template <class Q>
void SettleNow(Q& q, CallView call) {
  q.Once([=] KVJAX_HD() {
    if (call.open()) Settle(*call.control, 0);
  });
}

/// Makes the next version, unless the call was not let in: then `next` is as stale as its handle.
template <class Q>
void EndWrite(Q& q, CallView call, uint32_t number, uint64_t max_capacity, uint32_t* next) {
  q.Once([=] KVJAX_HD() {
    Control& control = *call.control;
    if (call.open()) {
      Settle(control, max_capacity);
      ++control.version;
    }
    *next = call.open() ? control.version : *call.version;
    Tell(control, *call.report, number);
  });
}

/// The keys of a call, where they are to have rows.
struct EnterView {
  CallView call;
  RowsView in;
  InitialView initial;
  bool blank;  // the caller writes the values of new rows
  bool given;  // or they come with the call
  const uint64_t* keys;
  Meant meant;
  const uint32_t* first;     // of equal keys, as GroupKeys gives it
  const uint8_t* allowed;    // (n,) at the first of equal keys, whether it may get a row; nullptr: all may
  uint32_t* rows;            // (n,) those of all keys that are meant, kNoRow for none
  uint32_t *flag, *number;   // (n,) which keys get a row, and how many do so before them
  uint32_t *is_new, *place;  // (n,) the same of the keys that have none
};

/// Memory for that; `apart`: whether not all new keys get a row.
template <class Q>
struct NewKeys {
  NewKeys(Q& q, size_t n, bool apart)
      : flags(q, n), numbers(q, n), news(q, apart ? n : 0), places(q, apart ? n : 0) {}
  Scratch<Q, uint32_t> flags, numbers, news, places;
};

/// Finds the rows of the keys of a call, and which of them are to get one.
template <class Q>
void CountNew(Q& q, EnterView v, size_t n) {
  if (n == 0) return;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool looks = v.call.open() && v.meant(i) && v.first[i] == i;
    v.rows[i] = looks ? v.in.index.Find(v.keys[i]) : kNoRow;
    const bool fresh = looks && v.rows[i] == kNoRow;
    v.is_new[i] = fresh ? 1 : 0;
    v.flag[i] = fresh && (v.allowed == nullptr || v.allowed[i] != 0) ? 1 : 0;
  });
  q.ExclusiveSum(v.flag, v.number, n);
  if (v.is_new != v.flag) q.ExclusiveSum(v.is_new, v.place, n);
  q.Once([=] KVJAX_HD() {
    const uint32_t wanted = v.place[n - 1] + v.is_new[n - 1];
    const bool enters = v.number[n - 1] + v.flag[n - 1] > 0;
    if (v.given && enters && wanted > v.initial.given_rows) {
      v.call.Close(Refusal::kInitial, wanted, static_cast<uint32_t>(v.initial.given_rows));
    }
  });
}

/// Gives them their rows, and writes headers and values.
template <class Q>
void EnterNew(Q& q, EnterView v, size_t n) {
  if (n == 0) return;
  q.Once([=] KVJAX_HD() {
    if (v.call.open()) v.call.control->entering = v.number[n - 1] + v.flag[n - 1];
  });
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    Control& control = *v.call.control;
    const bool enters = i < n && v.call.open() && v.flag[i] != 0;
    uint32_t row = kNoRow;
    bool took_empty = false;
    if (enters) {
      const uint64_t key = v.keys[i];
      row = v.in.FreeRow(control, v.number[i]);
      v.in.index.Insert(key, row, took_empty);
      v.in.Header(row) = {.frequency = 0, .pinned = 0, .has_slots = 0, .version = control.last_step};
      v.rows[i] = row;
      const auto wide = static_cast<int64_t>(key);
      if (wide < INT32_MIN || wide > static_cast<int64_t>(UINT32_MAX)) Store(control.wide, 1u);
    }
    const int used = tile.Count(took_empty);
    const size_t base = i - tile.rank();
    if (tile.rank() == 0) control.slots_used.Add(base / tile.size(), used);
    if (v.blank) return;
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t to = tile.Shuffle(row, lane);
      if (to != kNoRow) v.initial.Write(tile, v.keys[base + lane], v.place[base + lane], v.in.Value(to));
    }
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (v.meant(i) && v.first[i] != i) v.rows[i] = v.rows[v.first[i]];
  });
}

/// Sets or takes the pin of rows (n,); of equal keys the first one does.
template <class Q>
void SetPinned(Q& q, CallView call, RowsView in, Meant meant, const uint32_t* first, const uint32_t* rows,
               size_t n, bool pinned) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (call.open() && meant(i) && first[i] == i && rows[i] != kNoRow)
      in.Header(rows[i]).pinned = pinned ? 1 : 0;
  });
}

/// Writes values (n, bytes) to rows (n,): of equal keys those of the last one.
template <class Q>
void WriteValues(Q& q, CallView call, RowsView in, Meant meant, const uint32_t* first, const uint32_t* last,
                 const uint32_t* rows, const std::byte* values, size_t bytes, size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool writes = i < n && call.open() && meant(i) && first[i] == i && rows[i] != kNoRow;
    const uint32_t row = writes ? rows[i] : kNoRow;
    const size_t base = i - tile.rank();
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t to = tile.Shuffle(row, lane);
      if (to == kNoRow) continue;
      CopyRecord(tile, in.Value(to), values + last[base + lane] * bytes, bytes);
      if (tile.rank() == 0) in.Header(to).version = call.control->last_step;
    }
  });
}

/// Adds deltas (n, dim) to rows (n,) of distinct keys.
template <class Q>
void AddValues(Q& q, CallView call, RowsView in, RowType type, size_t dim, Meant meant, const uint32_t* rows,
               const float* deltas, size_t n) {
  q.Each(n * dim, [=] KVJAX_HD(size_t j) {
    const size_t i = j / dim, d = j % dim;
    if (!call.open() || !meant(i) || rows[i] == kNoRow) return;
    std::byte* const value = in.Value(rows[i]);
    StoreElement(type, value, d, LoadElement(type, value, d) + deltas[j]);
    if (d == 0) in.Header(rows[i]).version = call.control->last_step;
  });
}

/// TFRA's rule, one occurrence of a key after the other; see Table::Accum. `rows` are those of the first of
/// equal keys, and `had` says which of these had one before the call.
template <class Q>
void AccumValues(Q& q, CallView call, RowsView in, RowType type, size_t dim, typename Segments<Q>::View of,
                 const uint32_t* rows, const uint8_t* had, const float* old_values, const float* new_values,
                 const bool* exists, size_t n) {
  q.Each(n * dim, [=] KVJAX_HD(size_t j) {
    const size_t u = j / dim, d = j % dim;
    if (!call.open() || u >= *of.distinct) return;
    const uint32_t leader = of.places[of.begin[u]];
    const uint32_t row = rows[leader];
    if (row == kNoRow) return;
    bool has = had[leader] != 0, changes = false;
    std::byte* const value = in.Value(row);
    for (uint32_t p = of.begin[u]; p < of.end[u]; ++p) {
      const size_t i = of.places[p];
      if (has == exists[i]) {
        const float now =
            has ? LoadElement(type, value, d) + (new_values[i * dim + d] - old_values[i * dim + d])
                : new_values[i * dim + d];
        StoreElement(type, value, d, now);
        has = changes = true;
      }
    }
    if (d == 0 && changes) in.Header(row).version = call.control->last_step;
  });
}

/// Takes the rows of keys that are meant away; equal keys may come.
template <class Q>
void EraseKeys(Q& q, CallView call, RowsView in, const uint64_t* keys, Meant meant, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!call.open() || !meant(i)) return;
    bool gave_empty = false;
    const uint32_t row = in.index.Erase(keys[i], gave_empty);
    if (row == kNoRow) return;
    Control& control = *call.control;
    in.free[control.free_rows + device::Add(control.leaving, 1u)] = row;
    if (gave_empty) control.slots_used.Add(i, ~uint64_t{0});
  });
}

/// ones: (n,) 1 for the keys that are meant, 0 for the others.
template <class Q>
void CountMeant(Q& q, Meant meant, size_t n, int32_t* ones) {
  q.Each(n, [=] KVJAX_HD(size_t i) { ones[i] = meant(i) ? 1 : 0; });
}

/// For accum, at the first of equal keys: whether any of them may make a row; and whether there is one.
template <class Q>
void AllowNew(Q& q, typename Segments<Q>::View of, const bool* exists, size_t n, uint8_t* allowed) {
  q.Each(n, [=] KVJAX_HD(size_t u) {
    if (u >= *of.distinct) return;
    bool any = false;
    for (uint32_t p = of.begin[u]; p < of.end[u]; ++p) any = any || !exists[of.places[p]];
    allowed[of.places[of.begin[u]]] = any ? 1 : 0;
  });
}
template <class Q>
void MarkFound(Q& q, IndexView index, const uint64_t* keys, Meant meant, size_t n, uint8_t* found) {
  q.Each(n, [=] KVJAX_HD(size_t i) { found[i] = meant(i) && index.Find(keys[i]) != kNoRow ? 1 : 0; });
}

/// Forgets the optimizer's slots of every row.
template <class Q>
void ForgetSlots(Q& q, CallView call, RowsView in) {
  q.Each(in.index.slots(), [=] KVJAX_HD(size_t slot) {
    const IndexView::Entry* const entry = in.index.At(slot);
    if (entry != nullptr && call.open()) in.Header(entry->row).has_slots = 0;
  });
}

}  // namespace kvjax::device
