// The training write on one shard of several: gradients arrive in rounds, the shards exchange summaries, then
// rows change.
#pragma once
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline void Table::Receive(const ParallelFor& parallel, uint32_t version, KeySpan keys, const int32_t* counts,
                           const float* rows, size_t senders, int32_t round, int32_t rounds,
                           InitialRows initial) {
  const auto lock = Write(version, "apply", keys, Column::kBoth);
  ReceiveBuffer& received = step_.received;
  if (round == 0) {
    ForgetPlan();
    step_.way = Step::Way::kShard, step_.version = version;
    received.Open(senders);
  } else if (step_.way != Step::Way::kShard || step_.version != version || step_.plan ||
             received.merged().keys != nullptr || received.senders() != senders) {
    throw NotPlanned();
  }
  if (initial.n > 0) {
    const auto mask = std::make_unique<bool[]>(keys.n);
    for (size_t i = 0; i < keys.n; ++i) mask[i] = counts[i] > 0;
    KeyNumbering missing = MissingKeys(parallel, version, keys, mask.get());
    if (in_.admission.shares() && in_.store.index().Find(spec_.admission.shared_key) == kNoRow) {
      missing.Add(spec_.admission.shared_key);
    }
    if (missing.keys().size() > initial.n) throw InitialError(spec_.name, "apply", initial.n);
    received.Give(missing.keys(), initial.data, row_bytes());
  }
  received.Add(parallel, keys.data, counts, rows, senders == 0 ? 0 : keys.n / senders,
               static_cast<size_t>(spec_.dim), rounds == 1);
}

inline void Table::PlanStep(const ParallelFor& parallel, const PlanStepOperands& o, ShardSummary& summary) {
  const auto lock = Write(*o.version, "apply", {});
  if (step_.way != Step::Way::kShard || step_.version != *o.version || step_.open) throw NotPlanned();
  space_.reset();
  const ReceiveBuffer::Merged in = step_.received.Close(parallel, static_cast<size_t>(spec_.dim));
  const StepGradients gradients{.keys = in.keys, .rows = in.rows, .counts = in.counts};
  step_.plan = PlanApply(in_.Locate(parallel, {in.keys, in.n}, true), {in.keys, in.n}, gradients,
                         Load64(o.step), o.layout);
  const ApplyPlan& plan = *step_.plan;
  step_.wants_facts = o.facts;
  step_.pass = nullptr;
  if (o.program) {
    step_.pass = std::make_unique<RowPass>(spec_, *o.program, plan.layout, o.shared, plan.step);
  }
  summary = {.size = in_.store.size(), .entering = plan.change.entering(), .occurrences = plan.occurrences};
  if (!in_.admission.shares()) return;
  summary.shared_gradient = plan.shared_gradient;
  summary.lacks_shared = spec_.owns_shared && LacksShared(plan);
}

inline void Table::Summarize(uint32_t version, ShardSummary& summary) {
  const auto lock = Write(version, "write", {});
  if (!planned_ || planned_->version != version) throw NotPlanned();
  summary = {.size = in_.store.size(), .entering = planned_->change.entering()};
}

/// The gradients of all unadmitted keys go to the shard that owns the shared row, in the order of shards.
inline void Table::AddUnadmitted(ApplyPlan& plan, const std::vector<ShardSummary>& summaries,
                                 size_t shard) const {
  plan.shares = false;
  if (!spec_.owns_shared) return;
  for (size_t s = 0; s < summaries.size(); ++s) {
    plan.shares |= summaries[s].occurrences > 0;
    if (s == shard) continue;
    plan.occurrences += summaries[s].occurrences;
    for (size_t d = 0; d < plan.shared_gradient.size(); ++d)
      plan.shared_gradient[d] += summaries[s].shared_gradient[d];
  }
}

inline std::optional<Tally> Table::Prepare(const ParallelFor& parallel, std::string_view op, uint32_t version,
                                           const std::vector<ShardSummary>& summaries, size_t shard) {
  const auto lock = Write(version, op, {});
  Totals all;
  bool shares = false, lacks_shared = false;
  for (size_t s = 0; s < summaries.size(); ++s) {
    all.size += summaries[s].size;
    all.entering += summaries[s].entering;
    if (s < shard) all.before += summaries[s].entering;
    shares |= summaries[s].occurrences > 0;
    lacks_shared |= summaries[s].lacks_shared != 0;
  }
  all.entering += shares && lacks_shared;
  const bool alone = summaries.size() == 1;
  if (space_) throw NotPlanned();  // which the shards have been asked about
  if (step_.way == Step::Way::kShard && step_.plan && step_.version == version) {
    if (step_.plan->ready || step_.open) throw NotPlanned();
    ApplyPlan& plan = *step_.plan;
    for (const ShardSummary& summary : summaries) {
      if (summary.shared_gradient.size() != plan.shared_gradient.size())
        throw OperandError(spec_.name, op, "summaries of as many words as this shard's", "others");
    }
    if (in_.admission.shares()) AddUnadmitted(plan, summaries, shard);
    EnterShared(plan);
    space_.emplace(in_.source(spec_), "apply", plan.change, all, plan.step, alone);
    return AskOrPrepare(parallel, space_->Make(parallel, in_.Due(spec_, plan.step)));
  }
  if (!planned_ || planned_->version != version || planned_->ready) throw NotPlanned();
  Planned& write = *planned_;
  space_.emplace(in_.source(spec_), write.op, write.change, all, write.policy ? write.step : in_.last_step,
                 alone);
  return AskOrPrepare(parallel,
                      write.policy ? space_->Evict(parallel, *write.policy) : space_->Make(parallel, false));
}

inline std::optional<Tally> Table::Continue(const ParallelFor& parallel, std::string_view op,
                                            uint32_t version, const Tally& sum) {
  const auto lock = Write(version, op, {});
  if (!space_) throw NotPlanned();
  return AskOrPrepare(parallel, space_->Continue(parallel, sum));
}

/// Asks the other shards, or once the victims are known, does all that can fail.
inline std::optional<Tally> Table::AskOrPrepare(const ParallelFor& parallel, bool known) {
  if (!known) return space_->Count();
  space_.reset();
  if (!step_.plan) {
    const InitialRows initial{planned_->initial.data(), planned_->initial.size() / row_bytes()};
    PrepareWrite(parallel, *planned_, initial);
    planned_->ready = true;
    return std::nullopt;
  }
  ApplyPlan& plan = *step_.plan;
  const ReceiveBuffer::Merged& in = step_.received.merged();
  if (!step_.pass) {
    step_.targets.resize(in.n + 1);
    step_.shared_gradient.resize(static_cast<size_t>(spec_.dim));
    step_.facts.resize(step_.wants_facts ? in.n + 1 : 0);
    Stage(plan, {in.keys, in.n}, in.counts);
  }
  const std::vector<std::byte> given = step_.received.Given(WithShared(plan), row_bytes());
  PrepareApply(parallel, {in.keys, in.n}, in.counts, plan, {given.data(), given.size() / row_bytes()});
  plan.ready = true;
  return std::nullopt;
}

/// The new keys of a step, and that of the shared row, which may become one.
inline std::vector<uint64_t> Table::WithShared(const ApplyPlan& plan) const {
  std::vector<uint64_t> keys = plan.change.found.fresh;
  if (in_.admission.shares()) keys.push_back(spec_.admission.shared_key);
  return keys;
}

inline uint32_t Table::CommitStep(const ParallelFor& parallel, uint32_t version, int32_t* active,
                                  int64_t* step) {
  const auto lock = Write(version, "apply", {});
  if (step_.way != Step::Way::kShard || !step_.plan || step_.version != version || !step_.plan->ready) {
    throw NotPlanned();
  }
  const ReceiveBuffer::Merged& in = step_.received.merged();
  if (step_.open) {  // its chunks have come back
    *active = 0, *step = step_.plan->step;
    return EndStep(parallel);
  }
  if (!step_.pass) {
    step_.plan->ready = false;  // until they have
    RowFacts* const facts = step_.wants_facts ? step_.facts.data() : nullptr;
    return HandOut({step_.targets.data(), active, step, step_.shared_gradient.data(), facts}, {in.keys, in.n},
                   in.counts);
  }
  *active = 0, *step = step_.plan->step;  // nothing is left to do
  return RunProgram(parallel, {.keys = in.keys, .rows = in.rows, .counts = in.counts}, in.n);
}

inline void Table::ForgetPlan() noexcept {
  space_.reset();
  planned_.reset();
  step_.way = Step::Way::kNone, step_.open = false;
  step_.pass.reset();
  step_.groups.reset();
  step_.plan.reset();
}

}  // namespace kvjax
