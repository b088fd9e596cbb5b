// The writes of the device table: room first, then kernels.
#pragma once
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/tiers.h"
#include "kvjax/ffi/device/write_scopes.h"

namespace kvjax::device {

template <class Q>
void DeviceTable<Q>::Insert(Q& q, const uint32_t* version, KeySpan keys, const bool* mask,
                            InitialRows initial, uint32_t* next) {
  const Entered entered(*this, "lookup_or_insert");
  const Entering e(*this, q, "lookup_or_insert", version, keys, {.mask = mask});
  e.Enter(initial, /*blank=*/false, nullptr);
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Pin(Q& q, std::string_view op, const uint32_t* version, KeySpan keys, const bool* mask,
                         InitialRows initial, uint32_t* next) {
  const Entered entered(*this, op);
  const bool pins = op == "pin";
  const Meant meant{.mask = mask};
  if (pins) {
    const Entering e(*this, q, op, version, keys, meant);
    e.Enter(initial, /*blank=*/false, nullptr);
    SetPinned(q, e.call, contents_.view(), meant, e.first.data(), e.rows.data(), keys.n, true);
    return e.End(next);
  }
  const Finding f(*this, q, op, version, keys, meant);
  SetPinned(q, f.call, contents_.view(), meant, f.first.data(), f.rows.data(), keys.n, false);
  f.End(next);
}

template <class Q>
void DeviceTable<Q>::Remove(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, uint32_t* next) {
  const Entered entered(*this, "remove");
  const CallView call = View("remove", version, keys.narrow);
  BeginWrite(q, call);
  EraseKeys(q, call, contents_.view(), keys.data, {.mask = mask}, keys.n);
  End(q, call, 0, next);
}

template <class Q>
void DeviceTable<Q>::Upsert(Q& q, const uint32_t* version, KeySpan keys, const bool* mask,
                            const std::byte* values, uint32_t* next) {
  const Entered entered(*this, "upsert");
  const Meant meant{.mask = mask};
  const Scratch<Q, uint32_t> last(q, keys.n);
  const Entering e(*this, q, "upsert", version, keys, meant);
  e.Enter({}, /*blank=*/true, nullptr);
  WriteValues(q, e.call, contents_.view(), meant, e.first.data(), last.data(), e.rows.data(), values,
              row_bytes(), keys.n);
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Assign(Q& q, const uint32_t* version, KeySpan keys, const bool* mask,
                            const std::byte* values, uint32_t* next) {
  const Entered entered(*this, "assign");
  const Meant meant{.mask = mask};
  const Scratch<Q, uint32_t> last(q, keys.n);
  const Finding f(*this, q, "assign", version, keys, meant);
  WriteValues(q, f.call, contents_.view(), meant, f.first.data(), last.data(), f.rows.data(), values,
              row_bytes(), keys.n);
  f.End(next);
}

template <class Q>
void DeviceTable<Q>::Add(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, const float* deltas,
                         InitialRows initial, uint32_t* next) {
  const Entered entered(*this, "add");
  const auto dim = static_cast<size_t>(spec_.dim);
  Scratch<Q, uint64_t> distinct(q, keys.n);
  Scratch<Q, float> sums(q, keys.n * dim);
  Scratch<Q, int32_t> ones(q, keys.n), counts(q, keys.n);
  CountMeant(q, {.mask = mask}, keys.n, ones.data());
  MergeGradients(q, keys.data, deltas, ones.data(), keys.n, dim, distinct.data(), sums.data(), counts.data());
  const Meant meant{.counts = counts.data()};
  const Entering e(*this, q, "add", version, {distinct.data(), keys.n, keys.narrow}, meant);
  e.Enter(initial, /*blank=*/false, nullptr);
  AddValues(q, e.call, contents_.view(), spec_.type, dim, meant, e.rows.data(), sums.data(), keys.n);
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Accum(Q& q, const uint32_t* version, KeySpan keys, const bool* mask,
                           const float* old_values, const float* new_values, const bool* exists,
                           uint32_t* next) {
  const Entered entered(*this, "accum");
  const Meant meant{.mask = mask};
  const Entering e(*this, q, "accum", version, keys, meant, exists);
  const Segments<Q> segments(q, keys.data, meant, keys.n);
  Scratch<Q, uint8_t> had(q, keys.n), allowed(q, keys.n);
  AllowNew(q, segments.view(), exists, keys.n, allowed.data());
  MarkFound(q, contents_.index().view(), keys.data, meant, keys.n, had.data());
  e.Enter({}, /*blank=*/true, allowed.data());
  AccumValues<Q>(q, e.call, contents_.view(), spec_.type, static_cast<size_t>(spec_.dim), segments.view(),
                 e.rows.data(), had.data(), old_values, new_values, exists, keys.n);
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Clear(Q& q, const uint32_t* version, uint32_t* next) {
  const Entered entered(*this, "clear");
  Control control = ExpectNow(q, "clear", version);
  const CallView call = View("clear", version, false);
  Contents<Q> empty(q, row_bytes(), reserved_, budget_);
  empty.ReserveRows(q, control_.data(), reserved_);
  Admission<Q> nothing(q, spec_.admission);
  std::swap(contents_, empty);
  empty.Retire(q);
  std::swap(admission_, nothing);
  nothing.Retire(q);
  control.removed += control.size;
  control.size = control.next_row = control.free_rows = control.wide = 0;
  control.slots_used = control.waiting = control.waiting_slots = {};
  control.last_step = 0;
  q.Copy(control_.data(), &control, sizeof(control));
  BeginWrite(q, call);
  End(q, call, 0, next);
  q.Wait();  // or the next call would make room beside rows that are gone
}

template <class Q>
void DeviceTable<Q>::ClearSlots(Q& q, const uint32_t* version, uint32_t* next) {
  const Entered entered(*this, "clear_slots");
  (void)ExpectNow(q, "clear_slots", version);
  const CallView call = View("clear_slots", version, false);
  BeginWrite(q, call);
  ForgetSlots(q, call, contents_.view());
  contents_.Detach(q);
  End(q, call, 0, next);
}

template <class Q>
void DeviceTable<Q>::BeginApply(Q& q, const uint32_t* version, KeySpan keys, GradientsView gradients,
                                const SlotLayout& layout, InitialRows initial, uint32_t* next,
                                uint32_t* targets, int32_t* active, uint32_t* used_step, float* pooled) {
  const Entered entered(*this, "apply");
  Begin(q, version, keys, gradients, layout, initial, next, targets, active, used_step, pooled);
}

/// Whether a step brings the rows slots, where there are none.
template <class Q>
bool DeviceTable<Q>::Attaches(const SlotLayout& layout) const {
  if (layout == contents_.layout() || layout.empty()) return false;
  if (contents_.layout().empty()) return true;
  throw MakeError(ErrorCode::kFailedPrecondition, spec_.name, "apply",
                  "the optimizer whose slots the table holds (" + contents_.layout().ToString() + ")",
                  "one with " + layout.ToString(), "table.clear_slots() forgets the old optimizer's state");
}

template <class Q>
void DeviceTable<Q>::Begin(Q& q, const uint32_t* version, KeySpan keys, GradientsView gradients,
                           const SlotLayout& layout, InitialRows initial, uint32_t* next, uint32_t* targets,
                           int32_t* active, uint32_t* used_step, float* pooled) {
  NewSlots slots(*this, q);
  if (!(layout == contents_.layout()) && !layout.empty()) (void)ExpectNow(q, "apply", version);
  if (Attaches(layout)) {
    contents_.Attach(q, layout);
    slots.undo = true;
  }
  const AdmissionSpec& admission = spec_.admission;
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool admits = admission.kind != AdmissionSpec::Kind::kEvery, shares = admission.shares();
  const WithShared<Q> all(q, admission, keys, {.counts = gradients.counts});
  const Decision<Q> decision(q, admits ? all.keys().n : 0);
  const Pooling<Q> pooling(q, shares, keys.n, dim);
  const Entering e(*this, q, "apply", version, all.keys(), all.meant(), nullptr, &gradients);
  const IndexView index = contents_.index().view();
  if (admits) DecideKeys(q, e.call, admission_.view(), index, gradients, decision.view());
  if (shares) {
    FindPool(q, e.call, index, gradients, admission.shared_key, e.first.data(), decision.verdict.data(),
             pooling.in_pool.data(), pooling.pool.data());
    SumPool(q, gradients, dim, pooling.hashes.data(), pooling.order.data(), pooling.in_pool.data(),
            pooling.pool.data(), pooling.blocks.data(), pooled);
  } else {
    q.Fill(pooled, 0, dim * sizeof(float));
  }
  e.Enter(initial, /*blank=*/false, admits ? decision.verdict.data() : nullptr);
  if (admits) admission_.Commit(q, e.call, keys.data, keys.n, decision);
  CountRows(q, e.call, contents_.view(), gradients, e.rows.data(), admits ? decision.totals.data() : nullptr,
            shares ? pooling.pool.data() : nullptr, targets);
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
  touched_ = UserCode::Now();
  in_step_ = !Refused();  // a call that is known to have been refused is no step
  e.End(next, EndStep{shares ? pooling.pool.data() : nullptr, active, used_step});
}

/// The value and the slots, with as many kernels as it takes.
template <class Q>
std::vector<Parts> DeviceTable<Q>::PartsOf(const std::byte* values,
                                           const std::vector<const std::byte*>& slots) const {
  if (!slots.empty() && slots.size() != contents_.layout().slots().size()) throw ChunkError(spec_.name);
  std::vector<Parts> all(1 + slots.size() / Parts::kMost);
  for (size_t p = 0; p <= slots.size(); ++p) {
    Parts& some = all[p / Parts::kMost];
    const auto put = [&](const std::byte* outside, size_t bytes, size_t offset) {
      some.part[some.n++] = {const_cast<std::byte*>(outside), bytes, offset, p > 0};
    };
    if (p == 0) {
      put(values, row_bytes(), 0);
    } else {
      const Slot& slot = contents_.layout().slots()[p - 1];
      put(slots[p - 1], slot.bytes, slot.offset);
    }
  }
  return all;
}

template <class Q>
ChunkView DeviceTable<Q>::ChunkOf(const uint32_t* version, const uint32_t* targets, size_t num_rows,
                                  const int32_t* start, const int32_t* active) const {
  const bool own = OwnStep(num_rows);
  return {View("apply", version, false),
          contents_.view(),
          own ? step_.targets.data() : targets,
          own ? step_.n : num_rows,
          start,
          active};
}

template <class Q>
void DeviceTable<Q>::Gather(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                            const int32_t* start, const int32_t* active, size_t chunk, const GatherView& out,
                            std::byte* values, const std::vector<std::byte*>& slots) {
  const Entered entered(*this, "apply", /*begins=*/false);
  touched_ = UserCode::Now();
  const bool own = OwnStep(num_rows);
  const ChunkView rows = ChunkOf(version, targets, num_rows, start, active);
  GatherView once = out;
  if (own) once.keys = step_.inbox.merged().keys, once.rows = step_.inbox.merged().rows;
  if (own) once.pooled = step_.pooled.data();
  for (const Parts& parts : PartsOf(values, {slots.begin(), slots.end()})) {
    GatherRows(q, rows, std::exchange(once, {}), parts, chunk);
  }
}

template <class Q>
void DeviceTable<Q>::Scatter(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                             const int32_t* start, const int32_t* active, size_t chunk,
                             const std::byte* values, const std::vector<const std::byte*>& slots,
                             uint32_t* out) {
  const Entered entered(*this, "apply", /*begins=*/false);
  touched_ = UserCode::Now();
  const bool own = OwnStep(num_rows);
  const ChunkView rows = ChunkOf(version, targets, num_rows, start, active);
  for (const Parts& parts : PartsOf(values, slots)) {
    ScatterRows(q, rows, parts, !slots.empty(), chunk, std::exchange(out, nullptr));
  }
  // The host does not know how many rows the step has; with one pass for all of them this was the last. A
  // shard has counted its own.
  bool last = chunk >= (own ? step_.left : num_rows);
  step_.left -= std::min(step_.left, chunk);
  if constexpr (Q::kSynchronous) last = static_cast<int64_t>(*start) + static_cast<int64_t>(chunk) >= *active;
  if (last) {
    in_step_ = false;
    KeepHotRows(q, rows.call, rows.num_rows);
  }
}

/// Once training has brought as many keys as there are rows, so that it costs little beside the training. The
/// row ids of a step are not used after it; those of any step before it are those of a stale handle.
template <class Q>
void DeviceTable<Q>::KeepHotRows(Q& q, CallView call, size_t n) {
  trained_ += n;
  if (trained_ < LoadFromDevice(report_->size)) return;
  trained_ = 0;
  try {
    KeepHot(q, call, contents_);
  } catch (const std::bad_alloc&) {  // then rows stay where they are, which is as good but for speed
  }
}

// ---- room ------------------------------------------------------------------------------------------------

/// Below which the row ids are that are in use once so many keys more have come.
template <class Q>
size_t DeviceTable<Q>::EndRow(const Bound& bound, size_t to_come) const {
  const size_t end = bound.next_row + (to_come > bound.free_rows ? to_come - bound.free_rows : 0);
  if (!keeps_to_capacity()) return end;
  // New ids are given only when none is free, and then there are as many as rows.
  return std::min(end, std::max<size_t>(bound.next_row, spec_.max_capacity));
}

template <class Q>
bool DeviceTable<Q>::HasRoom(size_t n) {
  const Bound bound = Upper();
  const size_t to_come = bound.pending + n;
  return EndRow(bound, to_come) <= contents_.rows() &&
         bound.slots_used + to_come <= contents_.index().room() &&
         bound.waiting_slots + to_come <= admission_.room();
}

/// What there is at most, from what the device has reported.
template <class Q>
typename DeviceTable<Q>::Bound DeviceTable<Q>::Upper() {
  Bound bound;
  uint32_t write;
  do {
    write = LoadFromDevice(report_->write);
    bound = {LoadFromDevice(report_->size),
             LoadFromDevice(report_->slots_used),
             LoadFromDevice(report_->waiting),
             LoadFromDevice(report_->waiting_slots),
             LoadFromDevice(report_->next_row),
             LoadFromDevice(report_->free_rows),
             0};
  } while (LoadFromDevice(report_->begun) != write);
  std::erase_if(pending_, [&](const auto& sent) { return static_cast<int32_t>(sent.first - write) <= 0; });
  for (const auto& [number, n] : pending_) bound.pending += n;
  return bound;
}

/// Room for n rows more, and for one more pending write.
template <class Q>
void DeviceTable<Q>::MakeRoom(Q& q, std::string_view op, size_t n) {
  if (pending_.size() == pending_.capacity()) pending_.reserve(2 * pending_.size() + 8);
  // Some of the earlier writes may turn out to have needed less; the device goes on with the others.
  do {
    if (HasRoom(n)) return;
  } while (!pending_.empty() && q.Pause());
  if (HasRoom(n)) return;
  const Bound now = Upper();
  if (now.size + n >= kNoRow) {
    throw RowsError(spec_.name, op, now.size + n);
  }
  // More than this call may need, so that the next ones need not wait: most of all where there are many rows.
  const size_t coming = now.pending + std::max<size_t>(2 * n, std::min<size_t>(8 * n, now.size / 8));
  contents_.ReserveRows(q, control_.data(), std::max(EndRow(now, coming), reserved_));
  if (now.slots_used + now.pending + n > contents_.index().room()) {
    contents_.Reindex(q, control_.data(), std::max<size_t>(now.size + coming, reserved_));
  }
  if (now.waiting_slots + now.pending + n > admission_.room()) {
    admission_.Reindex(q, control_.data(), now.waiting + coming);
  }
}

}  // namespace kvjax::device
