// The training write of the device table: rows appear and are counted, and a program updates them where they
// lie, or chunks of them are handed out.
#pragma once
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/program.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/tiers.h"
#include "kvjax/ffi/device/write_scopes.h"

namespace kvjax::device {

template <class Q>
void DeviceTable<Q>::Apply(Q& q, const ApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const size_t n = o.keys.n, dim = static_cast<size_t>(spec_.dim);
  // All that can fail, before anything changes.
  const Scratch<Q, uint64_t> keys(q, n);
  const Scratch<Q, float> rows(q, n * dim), shared_gradient(q, dim);
  const Scratch<Q, int32_t> counts(q, n), active(q, 1);
  const Scratch<Q, int64_t> used_step(q, 1);
  const Scratch<Q, uint32_t> targets(q, 2 * n);
  const Scratch<Q, RowFacts> facts(q, o.program.wants_facts() ? n : 0);
  const RegisterScratch<Q> registers(q, o.program, n);
  const DeviceProgram<Q> program(q, o.program, o.layout, o.shared, spec_.initializer.seed);
  const GradientSpan& g = o.gradients;
  MergeGradients(q, o.keys.data, g.rows, g.counts, n, dim, keys.data(), rows.data(), counts.data());
  const BeginApplyOperands begin{.version = o.version,
                                 .keys = {keys.data(), n, o.keys.narrow},
                                 .layout = o.layout,
                                 .initial = o.initial,
                                 .next = o.next,
                                 .targets = targets.data(),
                                 .active = active.data(),
                                 .used_step = used_step.data(),
                                 .shared_gradient = shared_gradient.data(),
                                 .facts = facts.data(),
                                 .planned = o.planned};
  const auto* const step = reinterpret_cast<const uint32_t*>(o.step);
  Begin(q, begin,
        {keys.data(), counts.data(), rows.data(), n, g.seals, g.num_seals, kSeal, step, spec_.count_batches});
  Run(q, program, registers, begin, rows.data());
}

/// Only the keys are merged: what a step is refused for does not depend on its rows.
template <class Q>
void DeviceTable<Q>::PlanApply(Q& q, const PlanApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const size_t n = o.keys.n;
  const Scratch<Q, uint64_t> keys(q, n);
  const Scratch<Q, int32_t> counts(q, n);
  const GradientSpan& g = o.gradients;
  MergeGradients(q, o.keys.data, g.rows, g.counts, n, 0, keys.data(), nullptr, counts.data());
  const BeginApplyOperands begin{.version = o.version,
                                 .keys = {keys.data(), n, o.keys.narrow},
                                 .layout = o.layout,
                                 .initial = o.initial};
  Begin(q, begin,
        {keys.data(), counts.data(), nullptr, n, g.seals, g.num_seals, kSeal,
         reinterpret_cast<const uint32_t*>(o.step), spec_.count_batches},
        o.status);
}

/// Runs the program on the rows of a step that has begun, which ends it.
template <class Q>
void DeviceTable<Q>::Run(Q& q, const DeviceProgram<Q>& program, const RegisterScratch<Q>& registers,
                         const BeginApplyOperands& begun, const float* gradients) {
  const size_t n = begun.keys.n;
  const CallView call = View(Op::kApply, begun.next);
  RunProgram(q, program.view(),
             {.rows = {call, contents_.view(), begun.targets, n, nullptr, begun.active},
              .keys = begun.keys.data,
              .gradients = gradients,
              .shared_gradient = begun.shared_gradient,
              .shared_key = spec_.admission.shared_key,
              .facts = begun.facts,
              .step = reinterpret_cast<const uint32_t*>(begun.used_step),
              .slots = !contents_.layout().empty()},
             registers, n);
  in_step_ = false;
  KeepHotRows(q, call, n);
}

template <class Q>
void DeviceTable<Q>::BeginApply(Q& q, const BeginApplyOperands& o) {
  const Entered entered(*this, q, Op::kApply);
  const GradientSpan& g = o.gradients;
  Begin(q, o,
        {o.keys.data, g.counts, g.rows, o.keys.n, g.seals, g.num_seals, kSeal,
         reinterpret_cast<const uint32_t*>(o.step), spec_.count_batches});
}

/// With a `status`, plans the step as far as it may be refused, and gives that.
template <class Q>
void DeviceTable<Q>::Begin(Q& q, const BeginApplyOperands& o, const GradientsView& gradients,
                           uint32_t* status) {
  const bool plans = status != nullptr;
  const SlotLayout& layout = o.layout;
  const KeySpan keys = o.keys;
  NewSlots slots(*this, q);
  if (!(layout == contents_.layout()) && !layout.empty()) (void)ExpectNow(q, Op::kApply, o.version);
  if (AttachesSlots(spec_.name, contents_.layout(), layout) && !plans) {
    contents_.Attach(q, layout);
    slots.undo = true;
  }
  const AdmissionSpec& admission = spec_.admission;
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool admits = admission.kind != AdmissionSpec::Kind::kEvery, shares = admission.shares();
  const WithShared<Q> all(q, admission, keys, {.counts = gradients.counts});
  const Decision<Q> decision(q, admits ? all.keys().n : 0);
  const UnadmittedScratch<Q> scratch(q, shares, keys.n, dim);
  const Entering e(*this, q, Op::kApply, o.version, all.keys(), all.valid(), nullptr, &gradients, o.planned);
  const IndexView index = contents_.index().view();
  if (admits) DecideWindow(q, e.call, admission_.view(), index, gradients, decision.window.data());
  if (admits) DecideKeys(q, e.call, admission_.view(), index, gradients, decision.view());
  if (shares) {
    FindUnadmitted(q, e.call, index, gradients, admission.shared_key, e.first.data(), decision.verdict.data(),
                   scratch.in_sum.data(), scratch.unadmitted.data());
  }
  if (shares && !plans) {
    SumUnadmitted(q, gradients, dim, scratch.hashes.data(), scratch.order.data(), scratch.in_sum.data(),
                  scratch.unadmitted.data(), scratch.blocks.data(), o.shared_gradient);
  } else if (!plans) {
    q.Fill(o.shared_gradient, 0, dim * sizeof(float));
  }
  e.Enter(o.initial, /*blank=*/false, admits ? decision.verdict.data() : nullptr, plans);
  if (plans) {
    SayWhetherOpen(q, e.call, status);
    return;
  }
  if (admits) admission_.Commit(q, e.call, keys.data, keys.n, decision);
  CountRows(q, e.call, contents_.view(), gradients, e.rows.data(), admits ? decision.totals.data() : nullptr,
            shares ? scratch.unadmitted.data() : nullptr, admission.shared_key, o.targets, o.facts);
  if (slots.undo) slots.undo = Fetch(q, control_.data()).open == 0;
  Touch();
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

/// Calls f(), which goes on with a step in chunks; where it cannot, the step has stopped half-way.
template <class Q>
template <class F>
void DeviceTable<Q>::GoOn(F f) {
  try {
    Touch();
    f();
  } catch (...) {
    touched_ = kStopped;
    throw;
  }
}

template <class Q>
void DeviceTable<Q>::Gather(Q& q, const GatherOperands& o) {
  const Entered entered(*this, q, Op::kApply, /*begins=*/false);
  GoOn([&] { CopyOutChunk(q, o); });
}

template <class Q>
void DeviceTable<Q>::CopyOutChunk(Q& q, const GatherOperands& o) {
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
  GoOn([&] { TakeChunk(q, o); });
}

template <class Q>
void DeviceTable<Q>::TakeChunk(Q& q, const ScatterOperands& o) {
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

}  // namespace kvjax::device
