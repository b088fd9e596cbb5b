// The writes of the device table: space is reserved first, then kernels are queued.
#pragma once
#include "kvjax/ffi/device/table.h"
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
  const Entering e(*this, q, Op::kPin, o.version, o.keys, {.mask = o.mask});
  e.Enter(o.initial, /*blank=*/false, nullptr);
  SetPinned(q, e.call, contents_.view(), e.first.data(), e.rows.data(), o.keys.n, true);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Unpin(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kUnpin);
  const Finding f(*this, q, Op::kUnpin, o.version, o.keys, {.mask = o.mask});
  SetPinned(q, f.call, contents_.view(), f.first.data(), f.rows.data(), o.keys.n, false);
  f.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Remove(Q& q, const WriteKeysOperands& o) {
  const Entered entered(*this, q, Op::kRemove);
  const CallView call = View(Op::kRemove, o.version, o.keys.narrow);
  BeginWrite(q, call);
  EraseKeys(q, call, contents_.view(), o.keys.data, {.mask = o.mask}, o.keys.n);
  if (spec_.admission.counts_keys())
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
  AddValues(q, e.call, contents_.view(), spec_.type, dim, e.rows.data(), sums.data(), n);
  e.End(o.next);
}

template <class Q>
void DeviceTable<Q>::Accum(Q& q, const AccumOperands& o) {
  const Entered entered(*this, q, Op::kAccum);
  const Valid valid{.mask = o.mask};
  const size_t n = o.keys.n;
  const Entering e(*this, q, Op::kAccum, o.version, o.keys, valid);
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
