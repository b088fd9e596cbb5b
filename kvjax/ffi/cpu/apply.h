// The training write of a table: rows appear, are counted, and updated by a program where they lie; what
// chunks.h hands out begins and ends in the same way.
#pragma once
#include <functional>
#include <numeric>

#include "kvjax/ffi/core/clock.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/cpu/row_pass.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline uint32_t Table::Apply(const ParallelFor& parallel, const ApplyOperands& o) {
  const auto lock = Write(*o.step.version, "apply", o.step.keys, Column::kBoth);
  ForgetPlan();
  try {
    PlanProgram(parallel, o);
  } catch (...) {
    ForgetPlan();
    throw;
  }
  return o.holds ? ++step_.token : EndProgram(parallel, o.step.gradients.rows);
}

/// Does all of a step that can fail.
inline void Table::PlanProgram(const ParallelFor& parallel, const ApplyOperands& o) {
  const StepSpan& step = o.step;
  step_.way = Step::Way::kProgram, step_.version = *step.version;
  step_.num_rows = step.keys.n;
  const auto known = last_batch_.Find(version(), step.keys);
  step_.groups = Grouped(parallel, step, known.get());
  const KeyGroups& groups = *step_.groups;
  const KeySpan keys{groups.keys().data(), groups.size(), step.keys.narrow};
  const StepGradients gradients = StepGradients::Of(groups, step.gradients.rows);
  ApplyPlan& plan = step_.plan.emplace(PlanApply(LocateGroups(parallel, known.get(), groups, keys), keys,
                                                 gradients, Load64(step.step), step.layout));
  MakeSpace(parallel, plan);
  step_.pass = std::make_unique<RowPass>(spec_, o.program, plan.layout, o.shared, plan.step);
  PrepareApply(parallel, keys, gradients.counts, plan, step.initial);
  plan.ready = true;
}

/// rows: the gradients of its batch.
inline uint32_t Table::EndProgram(const ParallelFor& parallel, const float* rows) {
  const uint32_t next = RunProgram(parallel, StepGradients::Of(*step_.groups, rows), step_.groups->size());
  last_batch_.Trained(next);
  return next;
}

/// Commits the step with the program that updates its rows. of: the gradients of its n keys.
inline uint32_t Table::RunProgram(const ParallelFor& parallel, StepGradients of, size_t n) {
  ApplyPlan& plan = *step_.plan;
  of.shared = plan.shared_sum.data(), of.shared_count = plan.shared_count;
  const uint32_t next = CommitApply(plan, {of.keys, n}, of.counts);
  step_.pass->Run(parallel, in_.store, plan.updates, of);
  in_.Compact();
  ForgetPlan();
  return next;
}

inline uint32_t Table::EndApply(const ParallelFor& parallel, const EndApplyOperands& o) {
  const auto lock = gate_.WriteAny(spec_.name, "apply");
  const Visit visit(*this, "apply", true);
  const bool planned =
      step_.plan && step_.plan->ready && step_.token == *o.token && step_.way != Step::Way::kShard;
  const bool same = !step_.pass || step_.num_rows == o.num_rows;
  if (!planned || !same || step_.version != gate_.version()) throw NotPlanned();
  return step_.pass ? EndProgram(parallel, o.rows) : EndStep(parallel);
}

/// The distinct keys of a step's batch, which has mostly been looked up: `known` is that, or nullptr.
inline std::unique_ptr<KeyGroups> Table::Grouped(const ParallelFor& parallel, const StepSpan& step,
                                                 const LastBatch::Batch* known) const {
  const uint64_t* const keys = step.keys.data;
  const int32_t* const counts = step.gradients.counts;
  const size_t n = step.keys.n, end_row = in_.store.end_row();
  if (known != nullptr && KeyGroups::PrefersIds(n, end_row)) {
    const uint32_t* const ids = known->rows.data();
    size_t missing = 0;  // of padding it does not matter
    for (size_t i = 0; i < n; ++i) missing += (counts[i] > 0) & (ids[i] == kNoRow);
    if (missing == 0) return std::make_unique<KeyGroups>(keys, counts, n, ids, end_row);
  }
  return std::make_unique<KeyGroups>(parallel, keys, counts, n);
}

/// The rows of the distinct keys.
inline Located Table::LocateGroups(const ParallelFor& parallel, const LastBatch::Batch* known,
                                   const KeyGroups& groups, KeySpan keys) const {
  if (known == nullptr) return in_.Locate(parallel, keys, true);
  RowIds rows(keys.n);
  parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
    for (size_t g = begin; g < end; ++g) rows[g] = known->rows[groups.first(g)];
  });
  return Contents::Numbered(keys, std::move(rows), true);
}

/// What the gradients of distinct keys, each with its occurrences, will do: which keys get a row. Changes
/// nothing.
inline ApplyPlan Table::PlanApply(Located located, KeySpan keys, const StepGradients& gradients, int64_t step,
                                  const SlotLayout& layout) {
  const int32_t* const counts = gradients.counts;
  ApplyPlan plan{.layout = layout, .step = StepOf(step, in_.last_step)};
  plan.attach = AttachesSlots(spec_.name, in_.store.layout(), layout);
  plan.change.found = std::move(located);
  const Located& found = plan.change.found;
  std::vector<uint32_t> occurrences(found.fresh.size());
  for (size_t i = 0, m = 0; !found.fresh.empty() && i < keys.n; ++i) {
    if (found.rows[i] == kNoRow) occurrences[found.numbers[m++]] = Occurrences(counts[i]);
  }
  plan.decision = in_.admission.Decide(found.fresh, occurrences, in_.last_step, plan.step);
  const size_t decided = found.fresh.size();
  plan.change.ids.assign(decided, kNoRow);
  for (size_t f = 0; f < decided; ++f) {
    if (plan.decision.admitted[f] != 0) plan.change.ids[f] = 0;
  }
  if (in_.admission.shares()) {
    plan.shared_gradient.resize(static_cast<size_t>(spec_.dim));
    for (size_t i = 0, m = 0; i < keys.n; ++i) {
      const bool refused = found.rows[i] == kNoRow && plan.decision.admitted[found.numbers[m++]] == 0;
      if (!refused && keys.data[i] != spec_.admission.shared_key) continue;
      plan.unadmitted.push_back(i);
      if (refused) plan.shares = true, plan.occurrences += static_cast<uint64_t>(counts[i]);
    }
    // In the order of their hashes, so that the sum does not depend on how the batch was made.
    std::sort(plan.unadmitted.begin(), plan.unadmitted.end(),
              [&](size_t i, size_t j) { return Mix(keys.data[i]) < Mix(keys.data[j]); });
    const size_t n = plan.unadmitted.size(), dim = plan.shared_gradient.size();
    std::vector<float> memory(2 * dim);
    for (size_t begin = 0; begin < n; begin += kSumBlock) {
      std::vector<double> block(dim);
      for (size_t j = begin; j < std::min<size_t>(n, begin + kSumBlock); ++j) {
        const auto unadmitted = static_cast<uint32_t>(plan.unadmitted[j]);
        const float* const row = gradients.SumOf(unadmitted, dim, memory.data(), SumInOrder());
        for (size_t d = 0; d < dim; ++d) block[d] += row[d];
      }
      for (size_t d = 0; d < dim; ++d) plan.shared_gradient[d] += block[d];
    }
  }
  return plan;
}

/// Whether the row that unadmitted keys share is neither there nor among those to come.
inline bool Table::LacksShared(const ApplyPlan& plan) const {
  const std::vector<uint64_t>& fresh = plan.change.found.fresh;
  return in_.store.index().Find(spec_.admission.shared_key) == kNoRow &&
         std::find(fresh.begin(), fresh.end(), spec_.admission.shared_key) == fresh.end();
}

/// Adds that row to those to come, if the step needs it.
inline void Table::EnterShared(ApplyPlan& plan) const {
  if (!plan.shares || !LacksShared(plan)) return;
  plan.change.found.fresh.push_back(spec_.admission.shared_key), plan.change.ids.push_back(0);
}

/// Plans which rows leave, so that there is space for those to come.
inline void Table::MakeSpace(const ParallelFor& parallel, ApplyPlan& plan) const {
  EnterShared(plan);
  SpaceMaker space(in_.source(spec_), "apply", plan.change, Alone(plan.change), plan.step, true);
  space.Make(parallel, in_.Due(spec_, plan.step));
}

/// Does all of the plan that can fail, once there is space for it.
inline void Table::PrepareApply(const ParallelFor& parallel, KeySpan keys, const int32_t* counts,
                                ApplyPlan& plan, InitialRows initial) {
  plan.updates.reserve(keys.n + 1);
  plan.shared_sum.resize(static_cast<size_t>(spec_.dim));
  plan.recent = Recent::Of(keys, plan.change, in_.admission.changes_others(),
                           in_.admission.shares() ? &spec_.admission.shared_key : nullptr);
  if (plan.attach && !plan.layout.empty()) {
    plan.new_slots = in_.store.MakeSlots(plan.layout, plan.change.entering());
  }
  in_.Prepare(parallel, spec_, "apply", plan.change, initial, false);
  ListUpdates(parallel, plan, keys, counts);
  uint64_t occurrences = plan.shared_count;  // at least the most that a row gets, and less than twice that
  for (size_t i = 0; i < keys.n; ++i) occurrences |= static_cast<uint32_t>(counts[i]);
  for (size_t f = 0; f < plan.decision.totals.size(); ++f)
    occurrences |= plan.decision.admitted[f] != 0 ? plan.decision.totals[f] : 0;
  in_.store.Widen(occurrences, plan.step);
  if (!plan.shares) return;
  const uint32_t shared = SharedRowOf(plan);
  in_.Keep(Serial, {&shared, 1});
}

/// Says which rows there will be to update, and how.
inline void Table::ListUpdates(const ParallelFor& parallel, ApplyPlan& plan, KeySpan keys,
                               const int32_t* counts) const {
  const Located& found = plan.change.found;
  if (found.fresh.empty() && !plan.shares) {  // every key has a row of its own
    plan.updates.resize(keys.n);
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i)
        plan.updates[i] = {found.rows[i], static_cast<uint32_t>(i), Occurrences(counts[i])};
    });
    return;
  }
  const uint32_t shared = plan.shares ? SharedRowOf(plan) : kNoRow;
  uint64_t own = 0;  // occurrences of the shared row's own key
  for (size_t i = 0, m = 0; i < keys.n; ++i) {
    const bool is_new = found.rows[i] == kNoRow;
    const uint32_t number = is_new ? found.numbers[m++] : 0;
    const uint32_t row = is_new ? plan.change.ids[number] : found.rows[i];
    if (row == kNoRow) continue;
    if (plan.shares && row == shared) {
      own += static_cast<uint64_t>(counts[i]);
    } else {
      const uint64_t occurrences = is_new ? plan.decision.totals[number] : Occurrences(counts[i]);
      plan.updates.push_back({row, static_cast<uint32_t>(i), occurrences});
    }
  }
  for (size_t d = 0; plan.shares && d < static_cast<size_t>(spec_.dim); ++d)
    plan.shared_sum[d] = static_cast<float>(plan.shared_gradient[d]);
  if (shared != kNoRow) {
    plan.shared_count = plan.occurrences + own;
    const uint64_t occurrences = spec_.count_batches ? 1 : plan.shared_count;
    plan.updates.push_back({shared, kSharedGradient, occurrences});
  }
}

/// The row that unadmitted keys share, once the plan is carried out.
inline uint32_t Table::SharedRowOf(const ApplyPlan& plan) const {
  const uint64_t key = spec_.admission.shared_key;
  const std::vector<uint64_t>& fresh = plan.change.found.fresh;
  const auto at = std::find(fresh.begin(), fresh.end(), key);
  return at == fresh.end() ? in_.store.index().Find(key)
                           : plan.change.ids[static_cast<size_t>(at - fresh.begin())];
}

/// Makes the rows of the step and counts the batch, which cannot fail. The rows are then to be updated, and
/// only after that they may move.
inline uint32_t Table::CommitApply(ApplyPlan& plan, KeySpan keys, const int32_t* counts) {
  const size_t n = keys.n;
  const Located& found = plan.change.found;
  if (plan.new_slots) in_.store.AttachSlots(*std::move(plan.new_slots));
  Touch(plan, keys);
  in_.admission.Commit(found.fresh, plan.decision);
  in_.Commit(plan.change);
  in_.counters.occurrences += std::accumulate(counts, counts + n, uint64_t{0});
  for (size_t i = 0, m = 0; !found.fresh.empty() && i < n; ++i) {
    if (found.rows[i] != kNoRow) continue;
    const auto occurrences = static_cast<uint64_t>(counts[i]);
    const bool admitted = plan.change.ids[found.numbers[m++]] != kNoRow;
    in_.counters.admitted += admitted;
    in_.counters.refused += admitted ? 0 : occurrences;
  }
  in_.admission.Compact();
  in_.counters.distinct += n;
  in_.last_step = std::max(in_.last_step, plan.step);
  recent_ = std::move(plan.recent);
  const uint32_t before = gate_.version(), next = gate_.Next();
  recent_.Happened(before, next);
  return next;
}

/// Remembers for deltas which rows and counts the step is about to change.
inline void Table::Touch(const ApplyPlan& plan, KeySpan keys) noexcept {
  const bool counts = spec_.admission.counts_keys();
  in_.Touch(keys, counts ? nullptr : plan.change.found.rows.data());
  in_.Touch({plan.decision.forgotten.data(), plan.decision.forgotten.size()});
  if (plan.shares) in_.Touch({&spec_.admission.shared_key, 1});
  if (in_.admission.EndsWindow(plan.decision)) in_.touched.LoseCounts();
}

/// Number of keys before the padding. Refuses what merging cannot have made: with a key twice, or with
/// padding in between, an update would be lost.
inline size_t Table::CheckMerged(KeySpan keys, const int32_t* counts) const {
  const int32_t* const end = counts + keys.n;
  const int32_t* const padding = std::find_if(counts, end, [](int32_t count) { return count <= 0; });
  const auto active = static_cast<size_t>(padding - counts);
  KeyNumbering distinct(active);
  for (size_t i = 0; i < active; ++i) distinct.Add(keys.data[i]);
  if (distinct.keys().size() < active ||
      std::any_of(padding, end, [](int32_t count) { return count != 0; })) {
    throw MergedError(spec_.name);
  }
  return active;
}

}  // namespace kvjax
