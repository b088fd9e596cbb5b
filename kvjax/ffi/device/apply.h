// The training write of the device table: rows appear and are counted, and a program updates them where they
// lie; or their rows are read by one call, and by another the step is done, with what XLA has made of them.
// Nothing is held between these two, and there may be an error between them.
#pragma once
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/program.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/tiers.h"
#include "kvjax/ffi/device/write_scopes.h"

namespace kvjax::device {

/// Gradients that no merging has been asked for, as a step takes them. merged: by this call.
inline GradientsView AsMerged(const StepSpan& step, bool count_batches, bool merged = false) {
  const GradientSpan& g = step.gradients;
  return {step.keys.data,
          g.counts,
          g.rows,
          step.keys.n,
          g.canaries,
          g.num_canaries,
          reinterpret_cast<const uint32_t*>(step.step),
          count_batches,
          merged};
}

/// What the rows of a step that begins are known by.
template <class Q>
struct Begun {
  Begun(Q& q, size_t n, bool facts)
      : active(q, 1), used_step(q, 2), targets(q, 2 * n), facts(q, facts ? n : 0) {}
  Scratch<Q, int32_t> active;
  Scratch<Q, uint32_t> used_step, targets;
  Scratch<Q, RowFacts> facts;
};

template <class Q>
void DeviceTable<Q>::Apply(Q& q, const ApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const size_t n = o.step.keys.n, dim = static_cast<size_t>(spec_.dim);
  // All that can fail, before anything changes.
  const Scratch<Q, uint64_t> keys(q, n);
  const Scratch<Q, float> rows(q, n * dim), shared_gradient(q, dim);
  const Scratch<Q, int32_t> counts(q, n);
  const Begun<Q> begun(q, n, o.program.wants_facts());
  const DeviceProgram<Q> program(q, StepsOf(o.program, o.step.layout), o.shared, spec_.initializer.seed, n);
  const GradientSpan& g = o.step.gradients;
  MergeGradients(q, o.step.keys.data, g.rows, g.counts, n, dim, keys.data(), rows.data(), counts.data());
  StepSpan step = o.step;
  step.keys = {keys.data(), n, o.step.keys.narrow};
  step.gradients = {counts.data(), rows.data(), g.canaries, g.num_canaries};
  Begin(q, step, AsMerged(step, spec_.count_batches, /*merged=*/true), shared_gradient.data(), begun,
        o.planned, o.next);
  Run(q, program, step, shared_gradient.data(), begun, o.next);
}

/// Only the keys are merged: what a step is refused for does not depend on its rows; and not even these,
/// where no key can be refused.
template <class Q>
void DeviceTable<Q>::PlanApply(Q& q, const PlanApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const size_t n = o.step.keys.n;
  const size_t most = n + (spec_.admission.shares() ? 1 : 0);  // as the step does
  const bool takes_all = spec_.initializer.kind != Generator::Kind::kGiven && spec_.evict_every == 0;
  if (takes_all && !MayBeFull(most)) {
    (void)BringsSlots(q, o.step);
    GradientsView canaries = AsMerged(o.step, spec_.count_batches);
    canaries.n = 0;
    const CallView call = View(Op::kApply, o.step.version, o.step.keys.narrow);
    BeginWrite(q, call, canaries.step);
    CheckGradients(q, call, canaries, nullptr);
    MakeSpace(q, Op::kApply, most);
    return SayWhetherOpen(q, call, o.status);
  }
  const Scratch<Q, uint64_t> keys(q, n);
  const Scratch<Q, int32_t> counts(q, n);
  StepSpan step = o.step;
  MergeGradients(q, step.keys.data, step.gradients.rows, step.gradients.counts, n, 0, keys.data(), nullptr,
                 counts.data());
  step.keys.data = keys.data(), step.gradients.counts = counts.data(), step.gradients.rows = nullptr;
  (void)BringsSlots(q, step);
  const Deciding decided(*this, q, step, AsMerged(step, spec_.count_batches, /*merged=*/true), nullptr);
  decided.entering.Plan(step.initial, decided.allowed());
  SayWhetherOpen(q, decided.entering.call, o.status);
}

/// The program for rows as they lie here, once its slots are there.
template <class Q>
Steps DeviceTable<Q>::StepsOf(const Program& program, const SlotLayout& layout) const {
  return {program, layout, contents_.value_stride(), contents_.StrideOf(layout), Q::Tile::size()};
}

/// Runs the program on the rows of a step that has begun, which ends it.
template <class Q>
void DeviceTable<Q>::Run(Q& q, const DeviceProgram<Q>& program, const StepSpan& step,
                         const float* shared_gradient, const Begun<Q>& begun, const uint32_t* next) {
  const size_t n = step.keys.n;
  const CallView call = View(Op::kApply, next);
  RunProgram(q, program,
             {.rows = {call, contents_.view(), begun.targets.data(), n, begun.active.data()},
              .keys = step.keys.data,
              .gradients = step.gradients.rows,
              .shared_gradient = shared_gradient,
              .shared_key = spec_.admission.shared_key,
              .facts = begun.facts.data(),
              .step = begun.used_step.data(),
              .slots = !contents_.layout().empty()},
             static_cast<size_t>(spec_.dim), n);
  KeepHotRows(q, call, n);
}

/// Whether slots come with the step; throws where those of another optimizer are there. A planned one with
/// another version is not to be done.
template <class Q>
bool DeviceTable<Q>::BringsSlots(Q& q, const StepSpan& step, bool planned) const {
  if (step.layout == contents_.layout() || step.layout.empty()) return false;
  const Control control = Fetch(q, control_.data());
  const uint32_t version = Fetch(q, step.version);
  if (planned && version != control.version) return false;
  Expect(Name(Op::kApply), version, control);
  return AttachesSlots(spec_.name, contents_.layout(), step.layout);
}

/// Makes the rows of a step and counts its keys. sum: (dim,) for the gradient of the shared row, or nullptr.
template <class Q>
void DeviceTable<Q>::Begin(Q& q, const StepSpan& step, const GradientsView& gradients, float* sum,
                           const Begun<Q>& begun, bool planned, uint32_t* next) {
  NewSlots slots(*this, q);
  if (BringsSlots(q, step, planned)) {
    contents_.Attach(q, step.layout);
    slots.undo = true;
  }
  const Deciding decided(*this, q, step, gradients, sum, planned);
  const Entering& e = decided.entering;
  e.Enter(step.initial, /*blank=*/false, decided.allowed());
  if (decided.admits) admission_.Commit(q, e.call, step.keys.data, step.keys.n, decided.decision);
  CountRows(q, e.call, contents_.view(), decided.rows(), begun.targets.data(), begun.facts.data());
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
  e.End(next, EndStep{decided.unadmitted(), begun.active.data(), begun.used_step.data()});
}

/// The value and the slots, with as many kernels as it takes.
template <class Q>
std::vector<Parts> DeviceTable<Q>::PartsOf(const SlotLayout& layout, const std::byte* values,
                                           const std::vector<const std::byte*>& slots) const {
  if (slots.size() != layout.slots().size()) throw ChunkError(spec_.name);
  std::vector<Parts> all(1 + slots.size() / Parts::kMost);
  for (size_t p = 0; p <= slots.size(); ++p) {
    Parts& some = all[p / Parts::kMost];
    const auto put = [&](const std::byte* outside, size_t bytes, size_t offset) {
      some.part[some.n++] = {const_cast<std::byte*>(outside), bytes, offset, p > 0};
    };
    if (p == 0) {
      put(values, row_bytes(), 0);
    } else {
      const Slot& slot = layout.slots()[p - 1];
      put(slots[p - 1], slot.bytes, slot.offset);
    }
  }
  return all;
}

template <class Q>
void DeviceTable<Q>::ReadStep(Q& q, const ReadStepOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  Read(q, o, AsMerged(o.step, spec_.count_batches));
}

template <class Q>
void DeviceTable<Q>::Read(Q& q, const ReadStepOperands& o, const GradientsView& gradients) {
  const auto dim = static_cast<size_t>(spec_.dim);
  const std::vector<Parts> all = PartsOf(o.step.layout, o.values, {o.slots.begin(), o.slots.end()});
  const bool attached = !BringsSlots(q, o.step);
  const bool sums = spec_.admission.shares() && o.grads != nullptr;
  const Scratch<Q, float> shared_gradient(q, sums ? dim : 0);
  const Deciding decided(*this, q, o.step, gradients, shared_gradient.data());
  const Entering& e = decided.entering;
  e.WithNew(o.step.initial, /*blank=*/false, decided.allowed(), [&](const EnterView& v) {
    NumberNew(q, v, e.keys.n);
    StepResults once{shared_gradient.data(),
                     dim,
                     o.grads,
                     o.fresh,
                     o.row_keys,
                     o.row_facts,
                     reinterpret_cast<uint32_t*>(o.used_step)};
    for (const Parts& parts : all)
      ReadRows(q, v, decided.rows(), attached, std::exchange(once, {}), parts, o.size);
  });
}

template <class Q>
void DeviceTable<Q>::WriteStep(Q& q, const WriteStepOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  WriteWhole(q, o, AsMerged(o.step, spec_.count_batches));
}

template <class Q>
void DeviceTable<Q>::WriteWhole(Q& q, const WriteStepOperands& o, const GradientsView& gradients,
                                int64_t* used_step) {
  const size_t n = o.step.keys.n;
  // All that can fail, before anything changes.
  const std::vector<Parts> all = PartsOf(o.step.layout, o.values, o.slots);
  const Begun<Q> begun(q, n, /*facts=*/false);
  Begin(q, o.step, gradients, nullptr, begun, o.planned, o.next);
  const CallView call = View(Op::kApply, o.next);
  for (const Parts& parts : all) {
    WriteRows(q, {call, contents_.view(), begun.targets.data(), n, begun.active.data()}, parts,
              !o.slots.empty());
  }
  if (used_step != nullptr) q.Copy(used_step, begun.used_step.data(), sizeof(int64_t));
  KeepHotRows(q, call, n);
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

}  // namespace kvjax::device
