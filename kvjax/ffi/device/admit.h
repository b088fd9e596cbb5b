// Admission on the device: the rules of core/admit.h, for all keys of a call at once.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/device/admission_view.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/index.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/training_kernels.h"

namespace kvjax::device {

/// What is decided about n keys.
template <class Q>
struct Decision {
  enum Verdict : uint8_t { kRefused, kAdmitted, kHasRow };
  struct View {
    uint8_t* verdict;
    uint32_t* totals;            // what a key's row counts: its occurrences, of a new one those before too
    IndexView::Entry** waiting;  // where a key without a row has been counted, nullptr for nowhere
    uint32_t* window;            // after the call
  };

  Decision(Q& q, size_t n) : verdict(q, n), totals(q, n), waiting(q, n), window(q, 1) {}
  [[nodiscard]] View view() const { return {verdict.data(), totals.data(), waiting.data(), window.data()}; }

  Scratch<Q, uint8_t> verdict;
  Scratch<Q, uint32_t> totals;
  Scratch<Q, IndexView::Entry*> waiting;
  Scratch<Q, uint32_t> window;
};

/// Decides which window the call belongs to.
template <class Q>
void DecideWindow(Q& q, CallView call, AdmissionView by, IndexView rows, GradientsView g, uint32_t* window) {
  q.Fill(window, 0, sizeof(uint32_t));
  if (!by.spec.forgets()) return;
  q.Each(g.n, [=] KVJAX_HD(size_t i) {
    if (i < call.control->active && rows.Find(g.keys[i]) == kNoRow) Add(*window, 1u);
  });
  q.Once([=] KVJAX_HD() {
    const Control& control = *call.control;
    const uint64_t waiting = control.waiting.Sum() + *window;
    *window = by.spec.WindowAfter(control.window, control.last_step, control.step, waiting);
  });
}

/// Decides from the counts before the call, and changes none.
template <class Q>
void DecideKeys(Q& q, CallView call, AdmissionView by, IndexView rows, GradientsView g,
                typename Decision<Q>::View out) {
  q.Each(g.n, [=] KVJAX_HD(size_t i) {
    const Control& control = *call.control;
    const uint64_t key = g.keys[i];
    const bool valid = i < control.active;
    const uint32_t occurrences = !valid ? 0 : g.count_batches ? 1 : static_cast<uint32_t>(g.counts[i]);
    out.verdict[i] = Decision<Q>::kHasRow;
    out.totals[i] = occurrences;
    out.waiting[i] = nullptr;
    if (!valid || rows.Find(key) != kNoRow) return;
    if (by.spec.counts_keys()) out.waiting[i] = by.waiting.Locate(key);
    const uint32_t seen = by.Count(key);
    const int halvings = by.spec.sketches() ? by.spec.Halvings(control.last_step, control.step) : 0;
    const bool stays = out.waiting[i] == nullptr || by.spec.Stays(out.waiting[i]->row, *out.window);
    out.totals[i] = AdmissionSpec::Total(stays ? seen >> halvings : 0, occurrences);
    const bool enters = by.spec.Enters(key, seen, out.totals[i]);
    out.verdict[i] = enters ? Decision<Q>::kAdmitted : Decision<Q>::kRefused;
  });
}

/// The key waits no more; equal keys may come. `i` spreads what is counted.
KVJAX_HD inline void StopWaiting(CallView call, IndexView waiting, uint64_t key, size_t i) {
  bool gave_empty = false;
  if (waiting.Erase(key, gave_empty) == kNoRow) return;
  call.control->waiting.Add(i, ~uint64_t{0});
  if (gave_empty) call.control->waiting_cells.Add(i, ~uint64_t{0});
}

/// Forgets the waiting keys that no window from the one before on has seen.
template <class Q>
void ForgetOld(Q& q, CallView call, AdmissionView by, const uint32_t* window) {
  q.Each(by.waiting.cells(), [=] KVJAX_HD(size_t cell) {
    if (!call.open() || *window == call.control->window) return;
    const IndexView::Entry* const entry = by.waiting.At(cell);
    if (entry == nullptr || by.spec.Stays(entry->row, *window)) return;
    StopWaiting(call, by.waiting, entry->key, cell);
  });
  q.Once([=] KVJAX_HD() {
    if (call.open()) call.control->window = *window;
  });
}

/// Counts the call that was decided, if it is let in.
template <class Q>
void CommitWaiting(Q& q, CallView call, AdmissionView by, const uint64_t* keys, size_t n,
                   typename Decision<Q>::View decided) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!call.open() || decided.waiting[i] == nullptr || decided.verdict[i] == Decision<Q>::kRefused) return;
    StopWaiting(call, by.waiting, keys[i], i);
  });
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool waits = i < n && call.open() && decided.verdict[i] == Decision<Q>::kRefused;
    const bool enters = waits && decided.waiting[i] == nullptr;
    bool took_empty = false;
    if (enters) {
      by.waiting.Insert(keys[i], by.spec.Word(decided.totals[i], *decided.window), took_empty);
    } else if (waits) {
      decided.waiting[i]->row = by.spec.Word(decided.totals[i], *decided.window);
    }
    const int entered = tile.Count(enters), used = tile.Count(took_empty);
    if (tile.rank() != 0) return;
    call.control->waiting.Add(i / tile.size(), entered);
    call.control->waiting_cells.Add(i / tile.size(), used);
  });
  if (by.spec.forgets()) ForgetOld(q, call, by, decided.window);
}
template <class Q>
void CommitSketch(Q& q, CallView call, AdmissionView by, const uint64_t* keys, size_t n,
                  typename Decision<Q>::View decided) {
  if (by.spec.halve_every > 0) {
    q.Each(size_t{kNumBuckets} * by.spec.cells / 2, [=] KVJAX_HD(size_t w) {
      const int halvings = by.spec.Halvings(call.control->last_step, call.control->step);
      if (!call.open() || halvings == 0) return;
      const uint32_t word = by.sketch[w];
      by.sketch[w] = (word >> 16 >> halvings) << 16 | (word & 0xFFFFu) >> halvings;
    });
  }
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!call.open() || decided.verdict[i] == Decision<Q>::kHasRow) return;
    // Beyond the threshold nothing is decided.
    by.RaiseCells(keys[i], decided.totals[i] < by.spec.threshold ? decided.totals[i] : by.spec.threshold);
  });
}

/// The keys that have rows (n,), which no training step gave them, wait no more; equal keys may come.
template <class Q>
void ForgetWaiting(Q& q, CallView call, IndexView waiting, const uint64_t* keys, const uint32_t* rows,
                   size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (call.open() && rows[i] != kNoRow) StopWaiting(call, waiting, keys[i], i);
  });
}

/// The keys that are valid are not counted any more; equal keys may come.
template <class Q>
void ForgetKeys(Q& q, CallView call, IndexView waiting, const uint64_t* keys, Valid valid, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (call.open() && valid(i)) StopWaiting(call, waiting, keys[i], i);
  });
}

/// Enters distinct keys with the words of their counts.
template <class Q>
void EnterWaiting(Q& q, IndexView waiting, Control* control, const int64_t* keys, const uint32_t* words,
                  size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    bool took_empty = false;
    waiting.Insert(static_cast<uint64_t>(keys[i]), words[i], took_empty);
    control->waiting.Add(i, 1);
    control->waiting_cells.Add(i, took_empty ? 1 : 0);
  });
}

/// The memory of it.
template <class Q>
class Admission {
 public:
  Admission() = default;
  /// Throws std::bad_alloc.
  Admission(Q& q, const AdmissionSpec& spec) : spec_(spec) {
    if (spec_.counts_keys()) waiting_ = Index<Q>(q, 0);
    if (!spec_.sketches()) return;
    sketch_ = Array<Q, uint32_t>(q, size_t{kNumBuckets} * spec_.cells / 2);
    q.Fill(sketch_.data(), 0, sketch_.bytes());
  }

  [[nodiscard]] AdmissionView view() const {
    return {spec_, spec_.counts_keys() ? waiting_.view() : IndexView(), sketch_.data()};
  }
  /// Slots of such keys that may be in use.
  [[nodiscard]] size_t capacity() const { return spec_.counts_keys() ? waiting_.capacity() : SIZE_MAX; }
  [[nodiscard]] size_t bytes() const {
    return (spec_.counts_keys() ? waiting_.bytes() : 0) + sketch_.bytes();
  }

  /// Makes the index of waiting keys anew, for `keys` keys; as Contents::Reindex.
  void Reindex(Q& q, Control* control, size_t keys) {
    Index<Q> next(q, keys);
    MoveKeys(q, waiting_.view(), next.view());
    SetCells(q, control);
    std::swap(waiting_, next);
    next.Retire(q);
  }

  /// Counts the call that was decided.
  void Commit(Q& q, CallView call, const uint64_t* keys, size_t n, const Decision<Q>& decided) const {
    if (spec_.counts_keys()) CommitWaiting(q, call, view(), keys, n, decided.view());
    if (spec_.sketches()) CommitSketch(q, call, view(), keys, n, decided.view());
  }

  /// What a checkpoint keeps; waits.
  [[nodiscard]] AdmissionState Save(Q& q, const Control& control) const {
    AdmissionState state;
    state.cells.resize(2 * sketch_.size());
    q.Copy(state.cells.data(), sketch_.data(), sketch_.bytes());  // the machine is little-endian: hash.h
    std::vector<KeyRow> counts(spec_.counts_keys() ? control.waiting.Sum() : 0);
    if (!counts.empty()) {
      Scratch<Q, KeyRow> there(q, counts.size());
      Scratch<Q, uint32_t> n(q, 1);
      q.Fill(n.data(), 0, sizeof(uint32_t));
      ListKeys(q, waiting_.view(), there.data(), n.data());
      q.Copy(counts.data(), there.data(), counts.size() * sizeof(KeyRow));
      q.Wait();
      SortRows(counts);
    }
    q.Wait();
    for (const KeyRow& c : counts) {
      state.keys.push_back(static_cast<int64_t>(c.key));
      state.counts.push_back(spec_.Saved(c.row, control.window));
    }
    return state;
  }

  /// One with the counts of `state`, which this kind keeps; adds to the counts in `control`, and waits.
  static Admission Of(Q& q, const AdmissionSpec& spec, const AdmissionState& state, Control* control) {
    Admission next(q, spec);
    q.Copy(next.sketch_.data(), state.cells.data(), next.sketch_.bytes());
    const size_t n = state.keys.size();
    if (n > 0) {
      if (n > next.capacity()) next.waiting_ = Index<Q>(q, n);
      std::vector<uint32_t> loaded(n);
      for (size_t i = 0; i < n; ++i) loaded[i] = spec.Loaded(state.counts[i]);
      Scratch<Q, int64_t> keys(q, n);
      Scratch<Q, uint32_t> words(q, n);
      q.Copy(keys.data(), state.keys.data(), n * sizeof(int64_t));
      q.Copy(words.data(), loaded.data(), n * sizeof(uint32_t));
      EnterWaiting(q, next.waiting_.view(), control, keys.data(), words.data(), n);
    }
    q.Wait();
    return next;
  }
  void Retire(Q& q) noexcept {
    waiting_.Retire(q);
    sketch_.Retire(q);
  }

  static void SetCells(Q& q, Control* control) {
    q.Once([=] KVJAX_HD() { control->waiting_cells.Set(control->waiting.Sum()); });
  }

 private:
  AdmissionSpec spec_;
  Index<Q> waiting_;
  Array<Q, uint32_t> sketch_;
};

}  // namespace kvjax::device
