// The writes of the device table: room first, then kernels.
#pragma once
#include "kvjax/ffi/cuda/table.h"

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
  const Entering e(*this, q, "upsert", version, keys, meant);
  e.Enter({}, /*blank=*/true, nullptr);
  WriteValues(q, e.call, contents_.view(), meant, e.first.data(), e.last.data(), e.rows.data(), values,
              row_bytes(), keys.n);
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Assign(Q& q, const uint32_t* version, KeySpan keys, const bool* mask,
                            const std::byte* values, uint32_t* next) {
  const Entered entered(*this, "assign");
  const Meant meant{.mask = mask};
  const Finding f(*this, q, "assign", version, keys, meant);
  WriteValues(q, f.call, contents_.view(), meant, f.first.data(), f.last.data(), f.rows.data(), values,
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
void DeviceTable<Q>::Evict(Q& q, std::string_view op, const uint32_t* version, const Policy& policy,
                           const uint32_t* step, uint32_t* next) {
  const Entered entered(*this, op);
  const Control control = ExpectNow(q, op, version);
  int64_t now = 0;
  q.Copy(&now, step, sizeof(now));
  q.Wait();
  const auto twin = Twin(q, control);
  Change change;
  const Totals totals{control.size, 0, 0};
  Room(twin->source(spec_), "evict", change, totals, now < 0 ? control.last_step : now, true)
      .Evict(Serial, policy);
  const CallView call = View(op, version, false);
  BeginWrite(q, call);
  Leave(q, call, "evict", *twin, change);
  End(q, call, 0, next);
}

template <class Q>
void DeviceTable<Q>::Clear(Q& q, const uint32_t* version, uint32_t* next) {
  const Entered entered(*this, "clear");
  Control control = ExpectNow(q, "clear", version);
  const CallView call = View("clear", version, false);
  Contents<Q> empty(q, row_bytes(), reserved_);
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
  NewSlots slots(*this, q);
  if (!(layout == contents_.layout()) && !layout.empty()) {
    (void)ExpectNow(q, "apply", version);
    if (!contents_.layout().empty()) {
      throw MakeError(ErrorCode::kFailedPrecondition, spec_.name, "apply",
                      "the optimizer whose slots the table holds (" + contents_.layout().ToString() + ")",
                      "one with " + layout.ToString(),
                      "table.clear_slots() forgets the old optimizer's state");
    }
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
            pooling.pool.data(), pooling.runs.data(), pooled);
  } else {
    q.Fill(pooled, 0, dim * sizeof(float));
  }
  e.Enter(initial, /*blank=*/false, admits ? decision.verdict.data() : nullptr);
  if (admits) admission_.Commit(q, e.call, keys.data, keys.n, decision);
  CountRows(q, e.call, contents_.view(), gradients, e.rows.data(), admits ? decision.totals.data() : nullptr,
            shares ? pooling.pool.data() : nullptr, targets, active, used_step);
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
  touched_ = UserCode::Now();
  in_step_ = !Refused();  // a call that is known to have been refused is no step
  e.End(next);
}

template <class Q>
void DeviceTable<Q>::Gather(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                            const int32_t* start, const int32_t* active, size_t chunk, const GatherView& out,
                            const std::vector<std::byte*>& slots) {
  const Entered entered(*this, "apply", /*begins=*/false);
  touched_ = UserCode::Now();
  const ChunkView rows{View("apply", version, false), contents_.view(), targets, num_rows, start, active};
  CheckSlots(slots.size());
  GatherRows(q, rows, out, chunk);
  const auto& layout = contents_.layout().slots();
  for (size_t s = 0; s < slots.size(); ++s) {
    CopySlot(q, rows, layout[s].offset, layout[s].bytes, slots[s], chunk, /*back=*/false);
  }
}

template <class Q>
void DeviceTable<Q>::Scatter(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                             const int32_t* start, const int32_t* active, size_t chunk,
                             const std::byte* values, const std::vector<const std::byte*>& slots) {
  const Entered entered(*this, "apply", /*begins=*/false);
  touched_ = UserCode::Now();
  const ChunkView rows{View("apply", version, false), contents_.view(), targets, num_rows, start, active};
  CheckSlots(slots.size());
  ScatterRows(q, rows, values, row_bytes(), !slots.empty(), chunk);
  const auto& layout = contents_.layout().slots();
  for (size_t s = 0; s < slots.size(); ++s) {
    CopySlot(q, rows, layout[s].offset, layout[s].bytes, const_cast<std::byte*>(slots[s]), chunk,
             /*back=*/true);
  }
  // The host does not know how many rows the step has; with one pass for all of them this was the last.
  bool last = chunk >= num_rows;
  if constexpr (Q::kSynchronous) last = static_cast<int64_t>(*start) + static_cast<int64_t>(chunk) >= *active;
  if (last) in_step_ = false;
}

template <class Q>
void DeviceTable<Q>::CheckSlots(size_t n) const {
  if (n == 0 || n == contents_.layout().slots().size()) return;
  throw ChunkError(spec_.name);
}

// ---- room ------------------------------------------------------------------------------------------------

template <class Q>
bool DeviceTable<Q>::HasRoom(size_t n) {
  const Bound bound = Upper();
  const size_t to_come = bound.pending + n;
  const size_t fresh = to_come > bound.free_rows ? to_come - bound.free_rows : 0;
  return bound.next_row + fresh <= contents_.rows() &&
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
  q.WaitUntil([&] { return HasRoom(n); });
  if (HasRoom(n)) return;
  const Bound now = Upper();
  if (now.size + n >= kNoRow) {
    throw RowsError(spec_.name, op, now.size + n);
  }
  const size_t coming =
      now.pending + 2 * n;  // twice what this call may need, so that the next ones need not wait
  const size_t fresh = coming > now.free_rows ? coming - now.free_rows : 0;
  contents_.ReserveRows(q, control_.data(), std::max<size_t>(now.next_row + fresh, reserved_));
  if (now.slots_used + now.pending + n > contents_.index().room()) {
    contents_.Reindex(q, control_.data(), std::max<size_t>(now.size + coming, reserved_));
  }
  if (now.waiting_slots + now.pending + n > admission_.room()) {
    admission_.Reindex(q, control_.data(), now.waiting + coming);
  }
}

}  // namespace kvjax::device
