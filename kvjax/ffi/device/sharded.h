// The device table as a shard of a sharded table. All shards must be able to do a write before any does, so
// the calls that plan one wait for the device and throw what it would refuse; the write itself then fails no
// more, but for want of scratch memory.
#pragma once
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// How many of n flags are true.
template <class Q>
void CountFlags(Q& q, const bool* flags, size_t n, uint32_t* total) {
  q.Fill(total, 0, sizeof(uint32_t));
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const int here = tile.Count(i < n && flags[i]);
    if (tile.rank() == 0 && here > 0) Add(*total, static_cast<uint32_t>(here));
  });
}

/// Checks what a device would, and makes space for the keys that may get rows.
template <class Q>
void DeviceTable<Q>::Plan(Q& q, const PlanOperands& o) {
  const Entered entered(*this, q, o.op);
  ExpectLive(q, o.op, o.version, o.keys.narrow);
  const bool makes_rows = About(o.op).makes_rows;
  coming_ = makes_rows ? o.keys.n : 0;
  if (makes_rows && o.mask != nullptr) {
    Scratch<Q, uint32_t> valid(q, 1);
    CountFlags(q, o.mask, o.keys.n, valid.data());
    coming_ = Fetch(q, valid.data());
  }
  if (makes_rows) MakeSpace(q, o.op, coming_);
}

template <class Q>
void DeviceTable<Q>::ExpectLive(Q& q, Op op, const uint32_t* version, bool narrow) const {
  if (ExpectNow(q, op, version).wide != 0 && narrow) throw WidthError(spec_.name, Name(op));
}

template <class Q>
void DeviceTable<Q>::Receive(Q& q, const ReceiveOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const KeySpan keys = o.keys;
  const int32_t* const counts = o.gradients.counts;
  ExpectLive(q, Op::kApply, o.version, keys.narrow);
  const auto turn = static_cast<size_t>(Fetch(q, o.round)), turns = static_cast<size_t>(Fetch(q, o.rounds));
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool given = spec_.initializer.kind == Generator::Kind::kGiven;
  ReceiveBuffer<Q>& received = step_.received;
  if (turn == 0) {
    Abandoned(q);
    step_.narrow = keys.narrow;
    received.Open(q, {o.senders, turns, o.senders == 0 ? 0 : keys.n / o.senders}, dim,
                  given ? row_bytes() : 0);
  }
  if (received.positions().rounds != turns || turn >= turns)
    return;  // the first round has failed and has reported it
  if (given) {
    Scratch<Q, uint32_t> found(q, keys.n), first(q, keys.n), number(q, keys.n + 1);
    const CallView call = View(Op::kApply, o.version, keys.narrow);
    FindRows(q, call, contents_.index().view(), keys.data, {.counts = counts}, keys.n, found.data());
    const Valid missing{.counts = counts, .rows = found.data()};
    NumberKeys(q, keys.data, missing, keys.n, first.data(), number.data());
    PutGiven(q, received.positions(), turn, missing, first.data(), number.data(), o.initial.data, o.initial.n,
             row_bytes(), received.given());
  }
  received.Add(q, turn, keys.data, counts, o.gradients.rows, dim, given);
}

template <class Q>
void DeviceTable<Q>::PlanStep(Q& q, const PlanStepOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  ExpectLive(q, Op::kApply, o.version, step_.narrow);
  if (!step_.received.complete()) throw NotPlannedError(spec_.name);
  step_.layout = o.layout;
  if (AttachesSlots(spec_.name, contents_.layout(), o.layout)) {
    contents_.Attach(q, o.layout);
    step_.attached = true;
  }
  const size_t most = step_.received.positions().size();
  Scratch<Q, uint32_t> total(q, 1);
  CountMerged(q, step_.received.merged().counts, most, total.data());
  step_.n = Fetch(q, total.data());
  MakeSpace(q, Op::kApply, step_.n);
  Grow(q, step_.targets, 2 * step_.n);
  step_.wants_facts = o.facts || (o.program && o.program->wants_facts());
  if (step_.wants_facts) Grow(q, step_.facts, step_.n);
  Grow(q, step_.shared_gradient, static_cast<size_t>(spec_.dim));
  Grow(q, step_.step, 2);
  q.Copy(step_.step.data(), o.step, 2 * sizeof(uint32_t));
  step_.program = o.program;
  const size_t shared = o.program ? static_cast<size_t>(o.program->shared) : 0;
  Grow(q, step_.shared, shared);
  q.Copy(step_.shared.data(), o.shared, shared * sizeof(uint64_t));
  step_.ready = true;
}

template <class Q>
void DeviceTable<Q>::CommitStep(Q& q, const CommitStepOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  if (!std::exchange(step_.ready, false)) throw NotPlannedError(spec_.name);
  step_.attached = false;
  step_.left = step_.n;
  const GradientArraysView in = step_.received.merged();
  const size_t n = step_.n, bytes = row_bytes();
  const bool generates = spec_.initializer.kind != Generator::Kind::kGiven;
  Scratch<Q, std::byte> given(q, generates ? 0 : n * bytes);
  if (!generates) {
    Scratch<Q, uint32_t> found(q, n), first(q, n), number(q, n + 1);
    const CallView call = View(Op::kApply, o.version, step_.narrow);
    FindRows(q, call, contents_.index().view(), in.keys, {}, n, found.data());
    const Valid missing{.rows = found.data()};
    NumberKeys(q, in.keys, missing, n, first.data(), number.data());
    TakeGiven(q, missing, number.data(), step_.received.origins(), step_.received.given(), bytes, n,
              given.data());
  }
  const BeginApplyOperands step{.version = o.version,
                                .keys = {in.keys, n, step_.narrow},
                                .layout = step_.layout,
                                .initial = {given.data(), generates ? 0 : n},
                                .next = o.next,
                                .targets = step_.targets.data(),
                                .active = o.active,
                                .used_step = o.used_step,
                                .shared_gradient = step_.shared_gradient.data(),
                                .facts = step_.wants_facts ? step_.facts.data() : nullptr};
  const GradientsView gradients{in.keys,           in.counts,          in.rows, n, nullptr, 0, 0,
                                step_.step.data(), spec_.count_batches};
  if (!step_.program) return Begin(q, step, gradients);
  const RegisterScratch<Q> registers(q, *step_.program, n);
  const DeviceProgram<Q> program(q, *step_.program, step_.layout, step_.shared.data(),
                                 spec_.initializer.seed);
  Begin(q, step, gradients);
  Run(q, program, registers, step, in.rows);
}

/// Forgets what has been planned: another shard cannot do its part.
template <class Q>
void DeviceTable<Q>::Abandon() {
  Q q = Q::Alone(spec_.device);
  const std::lock_guard lock(mutex_);
  const typename Order<Q>::Turn turn(order_, q);
  Abandoned(q);
}

template <class Q>
void DeviceTable<Q>::Abandoned(Q& q) {
  if (std::exchange(step_.attached, false) && contents_.layout() == step_.layout) contents_.Detach(q);
  step_.ready = false;
  coming_ = 0;
}

}  // namespace kvjax::device
