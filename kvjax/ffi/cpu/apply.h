// The training write of a table: rows appear, are counted and updated, by a program where they lie or in
// chunks that are handed out.
#pragma once
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/cpu/row_pass.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline uint32_t Table::BeginApply(const ParallelFor& parallel, uint32_t version, KeySpan keys,
                                  const int32_t* counts, const float* rows, int64_t step,
                                  const SlotLayout& layout, InitialRows initial, Begun out) {
  const auto lock = Write(version, "apply", keys);
  keys.n = CheckMerged(keys, counts);
  const StepGradients gradients{.keys = keys.data, .rows = rows};
  ApplyPlan plan = PlanApply(parallel, keys, counts, gradients, step, layout);
  MakeSpace(parallel, plan);
  PrepareApply(parallel, keys, plan, initial);
  const uint32_t next = CommitApply(plan, keys, counts);
  HandOut(plan, out);
  return next;
}

inline uint32_t Table::Apply(const ParallelFor& parallel, const ApplyOperands& o) {
  const auto lock = Write(*o.version, "apply", o.keys);
  const KeyGroups groups(o.keys.data, o.gradients.counts, o.keys.n);
  const KeySpan keys{groups.keys().data(), groups.size(), o.keys.narrow};
  StepGradients gradients{.keys = keys.data, .rows = o.gradients.rows, .groups = &groups};
  ApplyPlan plan = PlanApply(parallel, keys, groups.counts().data(), gradients, Load64(o.step), o.layout);
  MakeSpace(parallel, plan);
  RowPass pass(spec_, o.program, o.layout, o.shared, plan.step);
  PrepareApply(parallel, keys, plan, o.initial);
  const uint32_t next = CommitApply(plan, keys, groups.counts().data());
  gradients.shared = plan.shared_sum.data();
  pass.Run(parallel, in_.store, plan.updates, gradients);
  gate_.EndStep();
  return next;
}

/// What the gradients of distinct keys, each with its occurrences, will do: which keys get a row. Changes
/// nothing.
inline ApplyPlan Table::PlanApply(const ParallelFor& parallel, KeySpan keys, const int32_t* counts,
                                  const StepGradients& gradients, int64_t step, const SlotLayout& layout) {
  ApplyPlan plan{.layout = layout, .step = step};
  plan.attach = AttachesSlots(spec_.name, in_.store.layout(), layout);
  // The table's last step is the clock: an optimizer that counts anew does not turn it back.
  if (step < in_.last_step) plan.step = in_.last_step + (in_.last_step < INT64_MAX ? 1 : 0);
  plan.change.found = in_.Locate(parallel, keys);
  const Located& found = plan.change.found;
  std::vector<uint32_t> occurrences(found.fresh.size());
  for (size_t i = 0, m = 0; i < keys.n; ++i) {
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
        const float* const row = gradients.Of(unadmitted, dim, memory.data(), SumInOrder());
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
inline void Table::PrepareApply(const ParallelFor& parallel, KeySpan keys, ApplyPlan& plan,
                                InitialRows initial) {
  plan.updates.reserve(keys.n + 1);
  plan.shared_sum.resize(static_cast<size_t>(spec_.dim));
  plan.recent = Recent::Of(keys, plan.change, in_.admission.changes_others());
  if (plan.attach) in_.store.AttachSlots(plan.layout);
  try {
    in_.Prepare(parallel, spec_, "apply", plan.change, initial, false);
  } catch (...) {
    if (plan.attach) in_.store.DetachSlots();
    throw;
  }
}

/// Makes the rows of the step, which cannot fail, and says in the plan how they are to be updated; the step
/// ends when they are.
inline uint32_t Table::CommitApply(ApplyPlan& plan, KeySpan keys, const int32_t* counts) {
  const size_t n = keys.n;
  Change& change = plan.change;
  Located& found = change.found;
  in_.admission.Commit(found.fresh, plan.decision);
  in_.Commit(change);
  if (in_.store.Compact()) {  // rows have moved
    for (size_t f = 0; f < found.fresh.size(); ++f) change.ids[f] = in_.store.index().Find(found.fresh[f]);
    for (size_t i = 0; i < n; ++i)
      found.rows[i] = found.rows[i] == kNoRow ? kNoRow : in_.store.index().Find(keys.data[i]);
  }
  const uint32_t shared = plan.shares ? in_.store.index().Find(spec_.admission.shared_key) : kNoRow;
  uint64_t own = 0;  // occurrences of the shared row's own key
  for (size_t i = 0, m = 0; i < n; ++i) {
    const bool is_new = found.rows[i] == kNoRow;
    const uint32_t number = is_new ? found.numbers[m++] : 0;
    const uint32_t row = is_new ? change.ids[number] : found.rows[i];
    in_.counters.occurrences += static_cast<uint64_t>(counts[i]);
    if (row == kNoRow) {
      in_.counters.refused += static_cast<uint64_t>(counts[i]);
    } else if (plan.shares && row == shared) {
      own += static_cast<uint64_t>(counts[i]);
    } else {
      const uint64_t occurrences = is_new ? plan.decision.totals[number] : Occurrences(counts[i]);
      plan.updates.push_back({row, static_cast<uint32_t>(i), occurrences});
    }
    in_.counters.admitted += is_new && row != kNoRow;
  }
  for (size_t d = 0; plan.shares && d < static_cast<size_t>(spec_.dim); ++d)
    plan.shared_sum[d] = static_cast<float>(plan.shared_gradient[d]);
  if (shared != kNoRow) {
    const uint64_t occurrences = spec_.count_batches ? 1 : plan.occurrences + own;
    plan.updates.push_back({shared, kSharedGradient, occurrences});
  }
  in_.admission.Compact();
  in_.counters.distinct += n;
  in_.last_step = std::max(in_.last_step, plan.step);
  recent_ = std::move(plan.recent);
  const uint32_t before = gate_.version(), next = gate_.BeginStep();
  recent_.Happened(before, next);
  return next;
}

/// Counts the rows of a step and hands them out, for an update that no program does.
inline void Table::HandOut(const ApplyPlan& plan, Begun out) {
  for (size_t i = 0; i < plan.updates.size(); ++i) {
    if (i + kAhead < plan.updates.size()) in_.store.PrefetchHeader(plan.updates[i + kAhead].row);
    const RowUpdate& u = plan.updates[i];
    CountUpdate(in_.store.Header(u.row), u.occurrences, plan.step);
    out.targets[i] = {u.row, u.gradient};
  }
  std::copy(plan.shared_sum.begin(), plan.shared_sum.end(), out.shared_gradient);
  *out.active = static_cast<int32_t>(plan.updates.size());
  *out.step = plan.step;
}

inline void Table::Gather(const ParallelFor& parallel, uint32_t version, const Target* targets, size_t n,
                          std::byte* values, bool* fresh, const std::vector<std::byte*>& slots) const {
  const auto lock = Read(version, "apply", {});
  gate_.Touch();
  CheckChunk(targets, n, slots.size());
  const std::vector<Slot>& layout = in_.store.layout().slots();
  parallel(n, kRowGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) in_.store.Prefetch(targets[i + kAhead].row);
      const uint32_t row = targets[i].row;
      std::memcpy(values + i * row_bytes(), in_.store.Value(row), row_bytes());
      fresh[i] = in_.store.Header(row).has_slots == 0;
      for (size_t s = 0; s < slots.size(); ++s) {
        std::memcpy(slots[s] + i * layout[s].bytes, in_.store.Slots(row) + layout[s].offset, layout[s].bytes);
      }
    }
  });
}

inline void Table::Scatter(const ParallelFor& parallel, uint32_t version, const Target* targets, size_t n,
                           const std::byte* values, const std::vector<const std::byte*>& slots, bool last) {
  const auto lock = Write(version, "apply", {});
  gate_.Touch();
  CheckChunk(targets, n, slots.size());
  const std::vector<Slot>& layout = in_.store.layout().slots();
  parallel(n, kRowGrain, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) in_.store.Prefetch(targets[i + kAhead].row);
      const uint32_t row = targets[i].row;
      std::memcpy(in_.store.Value(row), values + i * row_bytes(), row_bytes());
      // An optimizer without slots leaves them unwritten.
      if (!slots.empty()) in_.store.Header(row).has_slots = 1;
      for (size_t s = 0; s < slots.size(); ++s) {
        std::memcpy(in_.store.Slots(row) + layout[s].offset, slots[s] + i * layout[s].bytes, layout[s].bytes);
      }
    }
  });
  if (last) gate_.EndStep();
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

inline void Table::CheckChunk(const Target* targets, size_t n, size_t num_slots) const {
  const bool rows =
      std::all_of(targets, targets + n, [&](const Target& t) { return t.row < in_.store.end_row(); });
  if (rows && (num_slots == 0 || num_slots == in_.store.layout().slots().size())) return;
  throw ChunkError(spec_.name);
}

}  // namespace kvjax
