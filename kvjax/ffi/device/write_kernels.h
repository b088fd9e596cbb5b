// The kernels of writes: they admit or refuse the call, make and erase rows, and make the next version.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/clock.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/initial.h"
#include "kvjax/ffi/device/read_kernels.h"

namespace kvjax::device {

/// step: the words of the one that a training write names, or nullptr.
template <class Q>
void BeginWrite(Q& q, CallView call, const uint32_t* step = nullptr) {
  q.Once([=] KVJAX_HD() {
    Control& control = *call.control;
    control.open = call.Current(true) ? 1 : 0;
    control.entering = control.leaving = control.active = 0;
    if (step == nullptr) return;
    control.step = StepOf(static_cast<int64_t>(GetWords(step)), control.last_step);
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

/// Reports what there is after the write of that number. The lanes of a tile add up the counts together, and
/// the first one writes. Two fences are enough: nothing is there before `begun` is, and all before `write`
/// is.
template <class Tile>
KVJAX_HD void WriteReport(const Tile& tile, const Control& control, Report& report, uint32_t number) {
  const uint64_t cells_used = control.cells_used.Sum(tile), waiting = control.waiting.Sum(tile);
  const uint64_t waiting_cells = control.waiting_cells.Sum(tile);
  if (tile.rank() != 0) return;
  StoreForHost(report.begun, number);
  FenceForHost();
  StoreForHost(report.size, control.size);
  StoreForHost(report.cells_used, cells_used);
  StoreForHost(report.waiting, waiting);
  StoreForHost(report.waiting_cells, waiting_cells);
  StoreForHost(report.next_row, control.next_row);
  StoreForHost(report.free_rows, control.free_rows);
  StoreForHost(report.version, control.version);
  FenceForHost();
  StoreForHost(report.write, number);
}
template <class Q>
void ReportToHost(Q& q, const Control* control, Report* report, uint32_t number) {
  q.Tiles(1, [=] KVJAX_HD(typename Q::Tile tile, size_t) { WriteReport(tile, *control, *report, number); });
}

/// In the middle of a call: the rows that it has taken away may be given again.
template <class Q>
void SettleNow(Q& q, CallView call) {
  q.Once([=] KVJAX_HD() {
    if (call.open()) Settle(*call.control, 0);
  });
}

/// What else a write does at its end: nothing.
struct NoMore {
  KVJAX_HD void operator()(CallView) const {}
};
/// Makes the next version, unless the call was not let in: then `next` is as stale as its handle. `more`
/// comes before.
template <class Q, class More = NoMore>
void EndWrite(Q& q, CallView call, uint32_t number, uint64_t max_capacity, uint32_t* next, More more = {}) {
  q.Tiles(1, [=] KVJAX_HD(typename Q::Tile tile, size_t) {
    Control& control = *call.control;
    if (tile.rank() == 0) {
      more(call);
      if (call.open()) {
        Settle(control, max_capacity);
        ++control.version;
      }
      *next = call.open() ? control.version : *call.version;
    }
    WriteReport(tile, control, *call.report, number);
  });
}

/// The keys of a call, where they are to have rows.
struct EnterView {
  CallView call;
  RowsView in;
  InitialView initial;
  bool blank;     // the caller writes the values of new rows
  bool given;     // or they come with the call
  bool distinct;  // no key that is valid comes twice
  bool by_hand;   // and not by training, which counts what it gives rows
  AdmissionView admission;
  size_t most;  // keys there is space for
  const uint64_t* keys;
  Valid valid;
  const uint32_t* first;      // of equal keys, as GroupKeys gives it
  const uint8_t* allowed;     // (n,) at the first of equal keys, whether it may get a row; nullptr: all may
  uint32_t* rows;             // (n,) those of all keys that are valid, kNoRow for none
  uint32_t *flag, *number;    // (n,) which keys get a row, and how many do so before them
  uint32_t *is_new, *before;  // (n,) the same of the keys that have none
};

/// Memory for that; `apart`: whether not all new keys get a row.
template <class Q>
struct NewKeys {
  NewKeys(Q& q, size_t n, bool apart)
      : flags(q, n), numbers(q, n), news(q, apart ? n : 0), befores(q, apart ? n : 0) {}
  Scratch<Q, uint32_t> flags, numbers, news, befores;
};

/// Finds the rows of the keys of a call, and which of them are to get one.
template <class Q>
void CountNew(Q& q, EnterView v, size_t n) {
  if (n == 0) return;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool looks = v.call.open() && v.valid(i) && v.first[i] == i;
    v.rows[i] = looks ? v.in.index.Find(v.keys[i]) : kNoRow;
    const bool fresh = looks && v.rows[i] == kNoRow;
    v.is_new[i] = fresh ? 1 : 0;
    v.flag[i] = fresh && (v.allowed == nullptr || v.allowed[i] != 0) ? 1 : 0;
  });
  q.ExclusiveSum(v.flag, v.number, n);
  if (v.is_new != v.flag) q.ExclusiveSum(v.is_new, v.before, n);
  if (!v.given && n <= v.most) return;
  q.Once([=] KVJAX_HD() {
    const uint32_t wanted = v.before[n - 1] + v.is_new[n - 1];
    const uint32_t enters = v.number[n - 1] + v.flag[n - 1];
    if (enters > v.most) v.call.Close(Refusal::kUnplanned, 0, 0);
    if (v.given && enters > 0 && wanted > v.initial.given_rows) {
      v.call.Close(Refusal::kInitial, wanted, static_cast<uint32_t>(v.initial.given_rows));
    }
  });
}

/// Equal keys have one row.
template <class Q>
void ShareRows(Q& q, EnterView v, size_t n) {
  if (v.distinct) return;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (v.valid(i) && v.first[i] != i) v.rows[i] = v.rows[v.first[i]];
  });
}

/// Gives them their rows, and writes headers and values.
template <class Q>
void EnterNew(Q& q, EnterView v, size_t n) {
  if (n == 0) return;
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    Control& control = *v.call.control;
    if (i == 0 && v.call.open()) control.entering = v.number[n - 1] + v.flag[n - 1];
    const bool enters = i < n && v.call.open() && v.flag[i] != 0;
    const uint64_t key = i < n ? v.keys[i] : 0;
    uint32_t row = kNoRow;
    bool took_empty = false;
    if (enters) {
      row = v.in.FreeRow(control, v.number[i]);
      v.in.index.Insert(key, row, took_empty);
      v.in.Header(row) = {.frequency = v.by_hand ? v.admission.Count(key) : 0,
                          .pinned = 0,
                          .has_slots = 0,
                          .version = control.last_step};
      v.rows[i] = row;
    }
    const int used = tile.Count(took_empty);
    const int wides = tile.Count(enters && IsWide(key));
    if (tile.rank() == 0) {
      control.cells_used.Add(i / tile.size(), used);
      if (wides > 0 && Load(control.wide) == 0) Store(control.wide, 1u);
    }
    if (v.blank) return;
    v.initial.WriteRows(tile, key, enters ? v.before[i] : 0, enters ? v.in.Value(row) : nullptr);
  });
  ShareRows(q, v, n);
}

/// Gives the rows of new keys the ids that they would get, if no row left.
template <class Q>
void NumberNew(Q& q, EnterView v, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (v.call.open() && v.flag[i] != 0) v.rows[i] = v.in.FreeRow(*v.call.control, v.number[i]);
  });
  ShareRows(q, v, n);
}

/// Sets or takes the pin of rows (n,); of equal keys the first one does.
template <class Q>
void SetPinned(Q& q, CallView call, RowsView in, const uint32_t* first, const uint32_t* rows, size_t n,
               bool pinned) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (call.open() && first[i] == i && rows[i] != kNoRow) in.Header(rows[i]).pinned = pinned ? 1 : 0;
  });
}

/// Writes values (n, bytes) to rows (n,): of equal keys those of the last one that is valid. last: (n,), to
/// work with.
template <class Q>
void WriteValues(Q& q, CallView call, RowsView in, Valid valid, const uint32_t* first, uint32_t* last,
                 const uint32_t* rows, const std::byte* values, size_t bytes, size_t n) {
  q.Fill(last, 0, n * sizeof(uint32_t));
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (valid(i)) Raise(last[first[i]], static_cast<uint32_t>(i));
  });
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool writes = i < n && call.open() && first[i] == i && rows[i] != kNoRow;
    if (writes) in.Header(rows[i]).version = call.control->last_step;
    CopyRecords(tile, writes ? in.Value(rows[i]) : nullptr, writes ? values + last[i] * bytes : nullptr,
                bytes);
  });
}

/// Adds deltas (n, dim) to rows (n,) of distinct keys.
template <class Q>
void AddValues(Q& q, CallView call, RowsView in, RowType type, size_t dim, const uint32_t* rows,
               const float* deltas, size_t n) {
  q.Each(n * dim, [=] KVJAX_HD(size_t j) {
    const size_t i = j / dim, d = j % dim;
    if (!call.open() || rows[i] == kNoRow) return;
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
    const uint32_t leader = of.positions[of.begin[u]];
    const uint32_t row = rows[leader];
    if (row == kNoRow) return;
    bool has = had[leader] != 0, changes = false;
    std::byte* const value = in.Value(row);
    for (uint32_t p = of.begin[u]; p < of.end[u]; ++p) {
      const size_t i = of.positions[p];
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

/// Takes the rows of keys that are valid away; equal keys may come.
template <class Q>
void EraseKeys(Q& q, CallView call, RowsView in, const uint64_t* keys, Valid valid, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!call.open() || !valid(i)) return;
    bool gave_empty = false;
    const uint32_t row = in.index.Erase(keys[i], gave_empty);
    if (row == kNoRow) return;
    Control& control = *call.control;
    in.free[control.free_rows + device::Add(control.leaving, 1u)] = row;
    if (gave_empty) control.cells_used.Add(i, ~uint64_t{0});
  });
}

/// ones: (n,) 1 for the keys that are valid, 0 for the others.
template <class Q>
void CountValid(Q& q, Valid valid, size_t n, int32_t* ones) {
  q.Each(n, [=] KVJAX_HD(size_t i) { ones[i] = valid(i) ? 1 : 0; });
}

/// For accum, at the first of equal keys: whether any of them may make a row; and whether there is one.
template <class Q>
void AllowNew(Q& q, typename Segments<Q>::View of, const bool* exists, size_t n, uint8_t* allowed) {
  q.Each(n, [=] KVJAX_HD(size_t u) {
    if (u >= *of.distinct) return;
    bool any = false;
    for (uint32_t p = of.begin[u]; p < of.end[u]; ++p) any = any || !exists[of.positions[p]];
    allowed[of.positions[of.begin[u]]] = any ? 1 : 0;
  });
}
template <class Q>
void MarkFound(Q& q, IndexView index, const uint64_t* keys, Valid valid, size_t n, uint8_t* found) {
  q.Each(n, [=] KVJAX_HD(size_t i) { found[i] = valid(i) && index.Find(keys[i]) != kNoRow ? 1 : 0; });
}

/// Forgets the optimizer's slots of every row.
template <class Q>
void ForgetSlots(Q& q, CallView call, RowsView in) {
  q.Each(in.index.cells(), [=] KVJAX_HD(size_t slot) {
    const IndexView::Entry* const entry = in.index.At(slot);
    if (entry != nullptr && call.open()) in.Header(entry->row).has_slots = 0;
  });
}

}  // namespace kvjax::device
