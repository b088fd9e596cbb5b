// The writes of the device table: space is reserved first, then kernels are queued.
#pragma once
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/tiers.h"
#include "kvjax/ffi/device/write_scopes.h"

namespace kvjax::device {

template <class Q>
void DeviceTable<Q>::Insert(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kLookupOrInsert);
  const Entering e(*this, q, Op::kLookupOrInsert, o.version, o.keys, {.mask = o.mask});
  e.Enter(o.initial, /*blank=*/false, nullptr);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Pin(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kPin);
  const Valid valid{.mask = o.mask};
  const Entering e(*this, q, Op::kPin, o.version, o.keys, valid);
  e.Enter(o.initial, /*blank=*/false, nullptr);
  SetPinned(q, e.call, contents_.view(), valid, e.first.data(), e.rows.data(), o.keys.n, true);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Unpin(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kUnpin);
  const Valid valid{.mask = o.mask};
  const Finding f(*this, q, Op::kUnpin, o.version, o.keys, valid);
  SetPinned(q, f.call, contents_.view(), valid, f.first.data(), f.rows.data(), o.keys.n, false);
  f.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Remove(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kRemove);
  const CallView call = View(Op::kRemove, o.version, o.keys.narrow);
  BeginWrite(q, call);
  EraseKeys(q, call, contents_.view(), o.keys.data, {.mask = o.mask}, o.keys.n);
  if (admission_.counts_keys())
    ForgetKeys(q, call, admission_.view().waiting, o.keys.data, {.mask = o.mask}, o.keys.n);
  End(q, call, 0, o.next);
}

template <class Q>
void DeviceTable<Q>::Upsert(Q& q, const WriteRowsOperands& o) {
  const Entered entered(*this, q, Op::kUpsert);
  const Valid valid{.mask = o.mask};
  const Scratch<Q, uint32_t> last(q, o.keys.n);
  const Entering e(*this, q, Op::kUpsert, o.version, o.keys, valid);
  e.Enter({}, /*blank=*/true, nullptr);
  WriteValues(q, e.call, contents_.view(), valid, e.first.data(), last.data(), e.rows.data(), o.rows,
              row_bytes(), o.keys.n);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Assign(Q& q, const WriteRowsOperands& o) {
  const Entered entered(*this, q, Op::kAssign);
  const Valid valid{.mask = o.mask};
  const Scratch<Q, uint32_t> last(q, o.keys.n);
  const Finding f(*this, q, Op::kAssign, o.version, o.keys, valid);
  WriteValues(q, f.call, contents_.view(), valid, f.first.data(), last.data(), f.rows.data(), o.rows,
              row_bytes(), o.keys.n);
  f.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Add(Q& q, const WriteRowsOperands& o) {
  const Entered entered(*this, q, Op::kAdd);
  const auto dim = static_cast<size_t>(spec_.dim);
  const size_t n = o.keys.n;
  Scratch<Q, uint64_t> distinct(q, n);
  Scratch<Q, float> sums(q, n * dim);
  Scratch<Q, int32_t> ones(q, n), counts(q, n);
  CountValid(q, {.mask = o.mask}, n, ones.data());
  MergeGradients(q, o.keys.data, reinterpret_cast<const float*>(o.rows), ones.data(), n, dim, distinct.data(),
                 sums.data(), counts.data());
  const Valid valid{.counts = counts.data()};
  const Entering e(*this, q, Op::kAdd, o.version, {distinct.data(), n, o.keys.narrow}, valid);
  e.Enter(o.initial, /*blank=*/false, nullptr);
  AddValues(q, e.call, contents_.view(), spec_.type, dim, valid, e.rows.data(), sums.data(), n);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Accum(Q& q, const AccumOperands& o) {
  const Entered entered(*this, q, Op::kAccum);
  const Valid valid{.mask = o.mask};
  const size_t n = o.keys.n;
  const Entering e(*this, q, Op::kAccum, o.version, o.keys, valid, o.exists);
  const Segments<Q> segments(q, o.keys.data, valid, n);
  Scratch<Q, uint8_t> had(q, n), allowed(q, n);
  AllowNew(q, segments.view(), o.exists, n, allowed.data());
  MarkFound(q, contents_.index().view(), o.keys.data, valid, n, had.data());
  e.Enter({}, /*blank=*/true, allowed.data());
  AccumValues<Q>(q, e.call, contents_.view(), spec_.type, static_cast<size_t>(spec_.dim), segments.view(),
                 e.rows.data(), had.data(), o.old_rows, o.new_rows, o.exists, n);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Clear(Q& q, const ClearOperands& o) {
  const Entered entered(*this, q, Op::kClear);
  Control control = ExpectNow(q, Op::kClear, o.version);
  const CallView call = View(Op::kClear, o.version);
  Contents<Q> empty(q, row_bytes(), reserved_, budget_);
  empty.ReserveRows(q, control_.data(), reserved_);
  Admission<Q> nothing(q, spec_.admission);
  std::swap(contents_, empty);
  empty.Retire(q);
  std::swap(admission_, nothing);
  nothing.Retire(q);
  control.removed += control.size;
  control.size = control.next_row = control.free_rows = control.wide = control.window = 0;
  control.cells_used = control.waiting = control.waiting_cells = {};
  control.last_step = 0;
  q.Copy(control_.data(), &control, sizeof(control));
  BeginWrite(q, call);
  End(q, call, 0, o.next);
  q.Wait();  // or the next call would reserve space beside rows that have been removed
}

template <class Q>
void DeviceTable<Q>::ClearSlots(Q& q, const ClearOperands& o) {
  const Entered entered(*this, q, Op::kClearSlots);
  (void)ExpectNow(q, Op::kClearSlots, o.version);
  const CallView call = View(Op::kClearSlots, o.version);
  BeginWrite(q, call);
  ForgetSlots(q, call, contents_.view());
  contents_.Detach(q);
  End(q, call, 0, o.next);
}

template <class Q>
void DeviceTable<Q>::BeginApply(Q& q, const BeginApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const GradientSpan& g = o.gradients;
  Begin(q, o,
        {o.keys.data, g.counts, g.rows, o.keys.n, g.seals, g.num_seals, kSeal,
         reinterpret_cast<const uint32_t*>(o.step), spec_.count_batches});
}

template <class Q>
void DeviceTable<Q>::Begin(Q& q, const BeginApplyOperands& o, const GradientsView& gradients) {
  const SlotLayout& layout = o.layout;
  const KeySpan keys = o.keys;
  NewSlots slots(*this, q);
  if (!(layout == contents_.layout()) && !layout.empty()) (void)ExpectNow(q, Op::kApply, o.version);
  if (AttachesSlots(spec_.name, contents_.layout(), layout)) {
    contents_.Attach(q, layout);
    slots.undo = true;
  }
  const AdmissionSpec& admission = spec_.admission;
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool admits = admission.kind != AdmissionSpec::Kind::kEvery, shares = admission.shares();
  const WithShared<Q> all(q, admission, keys, {.counts = gradients.counts});
  const Decision<Q> decision(q, admits ? all.keys().n : 0);
  const UnadmittedScratch<Q> scratch(q, shares, keys.n, dim);
  const Entering e(*this, q, Op::kApply, o.version, all.keys(), all.valid(), nullptr, &gradients);
  const IndexView index = contents_.index().view();
  if (admits) DecideWindow(q, e.call, admission_.view(), index, gradients, decision.window.data());
  if (admits) DecideKeys(q, e.call, admission_.view(), index, gradients, decision.view());
  if (shares) {
    FindUnadmitted(q, e.call, index, gradients, admission.shared_key, e.first.data(), decision.verdict.data(),
                   scratch.in_sum.data(), scratch.unadmitted.data());
    SumUnadmitted(q, gradients, dim, scratch.hashes.data(), scratch.order.data(), scratch.in_sum.data(),
                  scratch.unadmitted.data(), scratch.blocks.data(), o.shared_gradient);
  } else {
    q.Fill(o.shared_gradient, 0, dim * sizeof(float));
  }
  e.Enter(o.initial, /*blank=*/false, admits ? decision.verdict.data() : nullptr);
  if (admits) admission_.Commit(q, e.call, keys.data, keys.n, decision);
  CountRows(q, e.call, contents_.view(), gradients, e.rows.data(), admits ? decision.totals.data() : nullptr,
            shares ? scratch.unadmitted.data() : nullptr, admission.shared_key, o.targets, o.facts);
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
  touched_ = UserCode::Now();
  in_step_ = !Refused();  // a call that is known to have been refused is no step
  e.End(o.next, EndStep{shares ? scratch.unadmitted.data() : nullptr, o.active,
                        reinterpret_cast<uint32_t*>(o.used_step)});
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
ChunkView DeviceTable<Q>::ChunkOf(const uint32_t* version, const ChunkSpan& chunk) const {
  const bool own = OwnStep(chunk.num_rows);
  return {View(Op::kApply, version),      contents_.view(), own ? step_.targets.data() : chunk.targets,
          own ? step_.n : chunk.num_rows, chunk.start,      chunk.active};
}

template <class Q>
void DeviceTable<Q>::Gather(Q& q, const GatherOperands& o) {
  const Entered entered(*this, q, Op::kApply, /*begins=*/false);
  touched_ = UserCode::Now();
  const ChunkView rows = ChunkOf(o.version, o.chunk);
  GatherView once{o.keys,
                  o.rows,
                  o.shared_gradient,
                  spec_.admission.shared_key,
                  static_cast<size_t>(spec_.dim),
                  o.grads,
                  o.fresh,
                  o.row_keys,
                  o.facts,
                  o.row_facts};
  if (OwnStep(o.chunk.num_rows)) {
    once.facts = step_.wants_facts ? step_.facts.data() : nullptr;
    once.keys = step_.received.merged().keys, once.rows = step_.received.merged().rows;
    once.shared_gradient = step_.shared_gradient.data();
  }
  for (const Parts& parts : PartsOf(o.values, {o.slots.begin(), o.slots.end()})) {
    GatherRows(q, rows, std::exchange(once, {}), parts, o.chunk.size);
  }
}

template <class Q>
void DeviceTable<Q>::Scatter(Q& q, const ScatterOperands& o) {
  const Entered entered(*this, q, Op::kApply, /*begins=*/false);
  touched_ = UserCode::Now();
  const bool own = OwnStep(o.chunk.num_rows);
  const size_t chunk = o.chunk.size;
  const ChunkView rows = ChunkOf(o.version, o.chunk);
  uint32_t* out = o.out;
  for (const Parts& parts : PartsOf(o.values, o.slots)) {
    ScatterRows(q, rows, parts, !o.slots.empty(), chunk, std::exchange(out, nullptr));
  }
  // The host does not know how many rows the step has; with one pass for all of them this was the last. A
  // shard has counted its own.
  bool last = chunk >= (own ? step_.left : o.chunk.num_rows);
  step_.left -= std::min(step_.left, chunk);
  if constexpr (Q::kSynchronous) {
    last = static_cast<int64_t>(*o.chunk.start) + static_cast<int64_t>(chunk) >= *o.chunk.active;
  }
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

// ---- space -----------------------------------------------------------------------------------------------

/// Below which the row ids are that are in use once so many keys more have come.
template <class Q>
size_t DeviceTable<Q>::EndRow(const Bound& bound, size_t to_come) const {
  const size_t end = bound.next_row + (to_come > bound.free_rows ? to_come - bound.free_rows : 0);
  if (!keeps_to_capacity()) return end;
  // New ids are given only when none is free, and then there are as many as rows.
  return std::min(end, std::max<size_t>(bound.next_row, spec_.max_capacity));
}

template <class Q>
bool DeviceTable<Q>::Fits(const Bound& bound, size_t n) const {
  return EndRow(bound, n) <= contents_.rows() && bound.cells_used + n <= contents_.index().capacity() &&
         bound.waiting_cells + n <= admission_.capacity();
}

/// What there is at most, from what the device has reported.
template <class Q>
typename DeviceTable<Q>::Bound DeviceTable<Q>::Upper() {
  constexpr int kPatience = 1 << 16;
  Bound bound;
  uint32_t write;
  int rounds = 0;
  do {
    if (++rounds % kPatience == 0) order_.Wait();  // throws if the device has failed half-way
    write = LoadFromDevice(report_->write);
    bound = {LoadFromDevice(report_->size),
             LoadFromDevice(report_->cells_used),
             LoadFromDevice(report_->waiting),
             LoadFromDevice(report_->waiting_cells),
             LoadFromDevice(report_->next_row),
             LoadFromDevice(report_->free_rows),
             0};
  } while (LoadFromDevice(report_->begun) != write);
  const auto reported = [&](uint32_t number) { return static_cast<int32_t>(number - write) <= 0; };
  std::erase_if(pending_, [&](const auto& sent) { return reported(sent.first); });
  for (const auto& [number, n] : pending_) bound.pending += n;
  // Cells that are erased and still marked are gone since; the report does not know yet.
  if (reindexed_ && reported(*reindexed_ + 1)) reindexed_.reset();
  if (reindexed_) bound.cells_used = bound.size;
  if (admission_reindexed_ && reported(*admission_reindexed_ + 1)) admission_reindexed_.reset();
  if (admission_reindexed_) bound.waiting_cells = bound.waiting;
  return bound;
}

/// As many keys may be under way before the host waits for the device: those of a few large calls, or of as
/// many small ones as JAX has under way.
inline size_t MostUnderWay(size_t n, size_t size) {
  constexpr size_t kLargeCalls = 4, kSmallCalls = 32, kShare = 8;
  return std::max(kLargeCalls * n, std::min(kSmallCalls * n, size / kShare));
}
/// And for so many more there is space afterwards, so that not each call grows.
inline size_t Spare(size_t n, size_t size) { return std::max(n, std::min(8 * n, size / 8)); }

/// Reserves space for n rows more, and for one more write that is under way. The host does not know how many
/// rows the calls under way make. It grows as if all their keys were new, which costs a steady state nothing
/// after its first calls; and waits only if it is further ahead of the device than is of use, or where memory
/// is short.
template <class Q>
void DeviceTable<Q>::MakeSpace(Q& q, Op op, size_t n) {
  if (pending_.size() == pending_.capacity()) pending_.reserve(2 * pending_.size() + 8);
  Bound now;
  const auto fits = [&] {
    now = Upper();
    return Fits(now, now.pending + n);
  };
  if (fits()) return;
  const size_t coming = now.pending + n + Spare(n, now.size);
  if (!short_of_memory_ && now.pending + n <= MostUnderWay(n, now.size) && EndRow(now, coming) < kNoRow) {
    try {
      return Extend(q, now, coming);
    } catch (const std::bad_alloc&) {
      short_of_memory_ = true;
    }
  }
  // Some of the earlier writes may turn out to have needed less; the device continues with the others.
  while (!pending_.empty() && q.Pause()) {
    if (fits()) return;
  }
  if (fits()) return;
  if (now.size + n >= kNoRow) throw RowsError(spec_.name, Name(op), now.size + n);
  Extend(q, now, now.pending + n);
  short_of_memory_ = false;
}

/// Makes space for n keys beside what there is.
template <class Q>
void DeviceTable<Q>::Extend(Q& q, const Bound& now, size_t n) {
  contents_.ReserveRows(q, control_.data(), std::max(EndRow(now, n), reserved_));
  if (now.cells_used + n > contents_.index().capacity()) {
    contents_.Reindex(q, control_.data(), std::max<size_t>(now.size + n, reserved_));
    reindexed_ = writes_;
  }
  if (now.waiting_cells + n > admission_.capacity()) {
    admission_.Reindex(q, control_.data(), now.waiting + n);
    admission_reindexed_ = writes_;
  }
}

}  // namespace kvjax::device
