// The device table as a shard of a sharded table. All shards must be able to do a write before any does, so
// the calls that plan one wait for the device and throw what it would refuse; the write itself then fails no
// more, but for want of scratch memory.
#pragma once
#include "kvjax/ffi/device/apply.h"
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

/// Checks what a device would, and makes space for the keys that may get rows. A step that is planned is not
/// to be done any more.
template <class Q>
void DeviceTable<Q>::Plan(Q& q, const PlanOperands& o) {
  const Entered entered(*this, q, o.op);
  ExpectLive(q, o.op, o.version, o.keys.narrow);
  ForgetPlan(q);
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
uint32_t DeviceTable<Q>::ExpectLive(Q& q, Op op, const uint32_t* version, bool narrow) const {
  const Control control = ExpectNow(q, op, version);
  if (control.wide != 0 && narrow) throw WidthError(spec_.name, Name(op));
  return control.version;
}

template <class Q>
void DeviceTable<Q>::Receive(Q& q, const ReceiveOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const KeySpan keys = o.keys;
  const int32_t* const counts = o.gradients.counts;
  const uint32_t version = ExpectLive(q, Op::kApply, o.version, keys.narrow);
  const auto turn = static_cast<size_t>(Fetch(q, o.round)), turns = static_cast<size_t>(Fetch(q, o.rounds));
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool given = spec_.initializer.kind == Generator::Kind::kGiven;
  ReceiveBuffer<Q>& received = step_.received;
  if (turn == 0) {
    ForgetPlan(q);
    step_.narrow = keys.narrow, step_.version = version;
    received.Open(q, {o.senders, turns, o.senders == 0 ? 0 : keys.n / o.senders}, dim,
                  given ? row_bytes() : 0);
  }
  if (step_.version != version || received.positions().rounds != turns || turn >= turns)
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
  const uint32_t version = ExpectLive(q, Op::kApply, o.version, step_.narrow);
  if (step_.version != version || !step_.received.complete()) throw NotPlannedError(spec_.name);
  step_.layout = o.layout;
  const bool attaches = AttachesSlots(spec_.name, contents_.layout(), o.layout);
  const size_t most = step_.received.positions().size();
  Scratch<Q, uint32_t> total(q, 1);
  CountMerged(q, step_.received.merged().counts, most, total.data());
  const size_t n = step_.n = Fetch(q, total.data());
  MakeSpace(q, Op::kApply, n);
  if (attaches) step_.new_slots.emplace(contents_.MakeSlots(q, o.layout));
  Grow(q, step_.step, 2);
  q.Copy(step_.step.data(), o.step, 2 * sizeof(uint32_t));
  step_.program = o.program;
  const size_t shared = o.program ? static_cast<size_t>(o.program->shared) : 0;
  Grow(q, step_.shared, shared);
  q.Copy(step_.shared.data(), o.shared, shared * sizeof(uint64_t));
  step_.wants_facts = o.facts;
  if (!o.program) {
    Grow(q, step_.values, n * row_bytes());
    Grow(q, step_.fresh, n);
    Grow(q, step_.slots, n * o.layout.stride());
    if (o.facts) Grow(q, step_.facts, n);
  }
  step_.ready = true;
}

template <class Q>
void DeviceTable<Q>::CommitStep(Q& q, const CommitStepOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  if (!step_.ready || Fetch(q, o.version) != step_.version) throw NotPlannedError(spec_.name);
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
  const StepSpan step{.version = o.version,
                      .keys = {in.keys, n, step_.narrow},
                      .gradients = {in.counts, in.rows},
                      .step = reinterpret_cast<const int64_t*>(step_.step.data()),
                      .layout = step_.layout,
                      .initial = {given.data(), generates ? 0 : n}};
  const GradientsView gradients = AsMerged(step, spec_.count_batches, /*merged=*/true);
  if (!step_.program && !std::exchange(step_.open, true)) return Open(q, step, gradients, o);
  step_.ready = step_.open = false;
  NewSlots slots(*this, q);
  if (step_.new_slots) {
    contents_.Attach(q, step_.layout, *step_.new_slots);
    step_.new_slots.reset();
    slots.undo = true;
  }
  q.Fill(o.active, 0, sizeof(int32_t));  // nothing is left to do
  if (step_.program) {
    const Begun<Q> begun(q, n, step_.program->wants_facts());
    const DeviceProgram<Q> program(q, StepsOf(*step_.program, step_.layout), step_.shared.data(),
                                   spec_.initializer.seed, n);
    Begin(q, step, gradients, nullptr, begun, /*planned=*/false, o.next);
    Run(q, program, step, nullptr, begun, o.next);
    q.Copy(o.used_step, begun.used_step.data(), sizeof(int64_t));
  } else {
    WriteWhole(q,
               {.step = step,
                .values = step_.values.data(),
                .slots = step_.template SlotArrays<const std::byte*>(),
                .next = o.next},
               gradients, o.used_step);
  }
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
}

/// Reads the rows of the step, of which chunks are to come back.
template <class Q>
void DeviceTable<Q>::Open(Q& q, const StepSpan& step, const GradientsView& gradients,
                          const CommitStepOperands& o) {
  Read(q,
       {.step = step,
        .size = step_.n,
        .used_step = o.used_step,
        .values = step_.values.data(),
        .fresh = step_.fresh.data(),
        .row_facts = step_.wants_facts ? step_.facts.data() : nullptr,
        .slots = step_.template SlotArrays<std::byte*>()},
       gradients);
  FillWords(q, reinterpret_cast<uint32_t*>(o.active), 1, static_cast<uint32_t>(step_.n));
  q.Copy(o.next, o.version, sizeof(uint32_t));
}

/// The values and slots of a chunk, beside what is staged of them.
template <class Q>
template <class Slot>
std::vector<ChunkPart> DeviceTable<Q>::StagedParts(Slot* values, const std::vector<Slot*>& slots) const {
  const std::vector<kvjax::Slot>& layout = step_.layout.slots();
  if (slots.size() != layout.size()) throw ChunkError(spec_.name);
  const auto outside = [](Slot* some) { return const_cast<std::byte*>(some); };
  std::vector<ChunkPart> parts = {{step_.values.data(), outside(values), row_bytes(), 0}};
  const auto staged = step_.template SlotArrays<std::byte*>();
  for (size_t s = 0; s < slots.size(); ++s)
    parts.push_back({staged[s], outside(slots[s]), layout[s].bytes, 0});
  return parts;
}

template <class Q>
void DeviceTable<Q>::CopyStaged(Q& q, const ChunkSpan& chunk, const std::vector<ChunkPart>& parts, bool in) {
  if (!step_.open || chunk.num_rows != 0) throw NotPlannedError(spec_.name);
  for (size_t begin = 0; begin < parts.size(); begin += ChunkParts::kMost) {
    ChunkParts some = {};
    for (size_t p = begin; p < parts.size() && some.n < ChunkParts::kMost; ++p)
      some.part[some.n++] = parts[p];
    CopyChunk(q, some, chunk.start, chunk.active, step_.n, chunk.size, in);
  }
}

template <class Q>
void DeviceTable<Q>::Gather(Q& q, const GatherOperands& o) {
  const Entered entered(*this, q, Op::kApply, /*raises=*/false);
  const GradientArraysView in = step_.received.merged();
  std::vector<ChunkPart> parts = StagedParts(o.values, o.slots);
  const auto add = [&](auto* all, auto* some, size_t each, uint8_t fill) {
    parts.push_back({reinterpret_cast<std::byte*>(all), reinterpret_cast<std::byte*>(some), each, fill});
  };
  add(step_.fresh.data(), o.fresh, sizeof(bool), 1);
  add(in.keys, o.row_keys, sizeof(uint64_t), 0);
  if (o.grads != nullptr) add(in.rows, o.grads, static_cast<size_t>(spec_.dim) * sizeof(float), 0);
  if (o.row_facts != nullptr && step_.wants_facts) add(step_.facts.data(), o.row_facts, sizeof(RowFacts), 0);
  CopyStaged(q, o.chunk, parts, /*in=*/false);
}

template <class Q>
void DeviceTable<Q>::Scatter(Q& q, const ScatterOperands& o) {
  const Entered entered(*this, q, Op::kApply, /*raises=*/false);
  CopyStaged(q, o.chunk, StagedParts(o.values, o.slots), /*in=*/true);
  q.Copy(o.out, o.version, sizeof(uint32_t));
}

template <class Q>
void DeviceTable<Q>::ForgetPlan(Q& q) {
  if (step_.new_slots) {
    step_.new_slots->Retire(q);
    step_.new_slots.reset();
    if (contents_.layout().empty()) contents_.Detach(q);  // so that values are where they were
  }
  step_.received.Forget();
  step_.ready = step_.open = false;
  coming_ = 0;
}

}  // namespace kvjax::device
