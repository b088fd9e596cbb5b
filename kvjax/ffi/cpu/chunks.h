// The training write in chunks that are handed out, for an update that is not a row program.
//
// Chunks go through XLA, and there may be an error between two of them. So what comes back is staged, and the
// last one commits the step: until then nobody sees any of it.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>

#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline uint32_t Table::BeginApply(const ParallelFor& parallel, uint32_t version, KeySpan keys,
                                  const int32_t* counts, const float* rows, int64_t step,
                                  const SlotLayout& layout, InitialRows initial, Begun out) {
  const auto lock = Write(version, "apply", keys, Column::kBoth);
  keys.n = CheckMerged(keys, counts);
  ForgetPlan();
  const StepGradients gradients{.keys = keys.data, .rows = rows, .counts = counts};
  ApplyPlan plan = PlanApply(in_.Locate(parallel, keys, true), keys, gradients, step, layout);
  MakeSpace(parallel, plan);
  Stage(plan, keys, counts);
  PrepareApply(parallel, keys, counts, plan, initial);
  step_.way = Step::Way::kChunks, step_.version = version;
  step_.plan = std::move(plan);
  return HandOut(out, keys, counts);
}

/// Takes the memory that the end of a step in chunks will want.
inline void Table::Stage(const ApplyPlan& plan, KeySpan keys, const int32_t* counts) {
  step_.keys.assign(keys.data, keys.data + keys.n);
  step_.counts.assign(counts, counts + keys.n);
  step_.staged.Reserve(keys.n + 1, row_bytes() + plan.layout.stride());
}

/// Hands out the rows of a step that is prepared. Returns the word by which the calls that follow know it.
inline uint32_t Table::HandOut(Begun out, KeySpan keys, const int32_t* counts) {
  const ApplyPlan& plan = *step_.plan;
  const StepGradients gradients{.counts = counts, .shared_count = plan.shared_count};
  for (size_t i = 0; i < plan.updates.size(); ++i) {
    const RowUpdate& u = plan.updates[i];
    out.targets[i] = {u.row, u.gradient};
    if (out.facts == nullptr) continue;
    const uint64_t key = u.gradient == kSharedGradient ? spec_.admission.shared_key : keys.data[u.gradient];
    out.facts[i] =
        FactsOf(in_.store.Header(u.row), gradients.Occurrences(u.gradient), u.occurrences, plan.step, key);
  }
  std::copy(plan.shared_sum.begin(), plan.shared_sum.end(), out.shared_gradient);
  *out.active = static_cast<int32_t>(plan.updates.size());
  *out.step = plan.step;
  step_.open = true;
  return ++step_.token;
}

/// All of it under the lock: another step that begins meanwhile frees what this one has been given.
inline void Table::Gather(const ParallelFor& parallel, const GatherOperands& o) const {
  const auto lock = gate_.ReadAny(spec_.name, "apply");
  const Visit visit(*this, "apply", false);
  const Chunk c = ChunkOf(*o.version, o.chunk);
  const uint64_t* keys = o.keys;
  const float *rows = o.rows, *shared_gradient = o.shared_gradient;
  size_t num_rows = o.chunk.num_rows;
  if (c.own) {
    const ReceiveBuffer::Merged& in = step_.received.merged();
    num_rows = in.n, keys = in.keys, rows = in.rows, shared_gradient = step_.shared_gradient.data();
  }
  const auto dim = static_cast<size_t>(spec_.dim), start = static_cast<size_t>(*o.chunk.start);
  if (o.row_facts != nullptr && c.own && step_.facts.size() < start + c.n) throw ChunkError(spec_.name);
  CopyOut(parallel, c.targets, c.n, o.values, o.fresh, o.slots);
  for (size_t i = 0, run; i < c.n; i += run) {  // gradients mostly stand one behind the other
    const uint32_t g = c.targets[i].gradient;
    const bool in_rows = g < num_rows;
    for (run = 1; in_rows && i + run < c.n && g + run < num_rows && c.targets[i + run].gradient == g + run;)
      ++run;
    if (o.grads != nullptr)
      std::memcpy(o.grads + i * dim, in_rows ? rows + g * dim : shared_gradient, run * dim * sizeof(float));
    std::memcpy(o.row_keys + i, in_rows ? keys + g : &spec_.admission.shared_key, run * sizeof(uint64_t));
  }
  std::memset(o.row_keys + c.n, 0, (o.chunk.size - c.n) * sizeof(uint64_t));
  if (o.row_facts == nullptr) return;
  std::copy_n((c.own ? step_.facts.data() : o.facts) + start, c.n, o.row_facts);
  std::fill_n(o.row_facts + c.n, o.chunk.size - c.n, RowFacts());
}

inline uint32_t Table::Scatter(const ParallelFor& parallel, const ScatterOperands& o) {
  const auto lock = gate_.WriteAny(spec_.name, "apply");
  const Visit visit(*this, "apply", true);
  const Chunk c = ChunkOf(*o.version, o.chunk);
  const bool last =
      static_cast<size_t>(*o.chunk.start) + o.chunk.size >= static_cast<size_t>(*o.chunk.active);
  return TakeBack(parallel, c.targets, c.n, o.values, o.slots, last, o.holds);
}

inline void Table::Gather(const ParallelFor& parallel, uint32_t token, const Target* targets, size_t n,
                          std::byte* values, bool* fresh, const std::vector<std::byte*>& slots) const {
  const auto lock = gate_.ReadAny(spec_.name, "apply");
  const Visit visit(*this, "apply", false);
  CheckChunk(token, targets, n, slots.size());
  CopyOut(parallel, targets, n, values, fresh, slots);
}

inline uint32_t Table::Scatter(const ParallelFor& parallel, uint32_t token, const Target* targets, size_t n,
                               const std::byte* values, const std::vector<const std::byte*>& slots, bool last,
                               bool holds) {
  const auto lock = gate_.WriteAny(spec_.name, "apply");
  const Visit visit(*this, "apply", true);
  CheckChunk(token, targets, n, slots.size());
  return TakeBack(parallel, targets, n, values, slots, last, holds);
}

inline void Table::CopyOut(const ParallelFor& parallel, const Target* targets, size_t n, std::byte* values,
                           bool* fresh, const std::vector<std::byte*>& slots) const {
  const std::vector<Slot>& layout = step_.plan->layout.slots();
  const bool attached = !in_.store.layout().empty();
  const auto gather = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) in_.store.Prefetch(targets[i + kAhead].row);
      const uint32_t row = targets[i].row;
      std::memcpy(values + i * row_bytes(), in_.store.Value(row), row_bytes());
      fresh[i] = in_.store.Header(row).has_slots == 0;
      for (size_t s = 0; s < slots.size(); ++s) {
        std::byte* const to = slots[s] + i * layout[s].bytes;
        if (attached) {
          std::memcpy(to, in_.store.Slots(row) + layout[s].offset, layout[s].bytes);
        } else {  // they come with this step
          std::memset(to, 0, layout[s].bytes);
        }
      }
    }
  };
  parallel(n, kRowGrain, std::cref(gather));  // by reference: a copy would need memory
}

inline uint32_t Table::TakeBack(const ParallelFor& parallel, const Target* targets, size_t n,
                                const std::byte* values, const std::vector<const std::byte*>& slots,
                                bool last, bool holds) {
  StagedRows& staged = step_.staged;
  const std::vector<Slot>& layout = step_.plan->layout.slots();
  const size_t before = staged.rows.size(), bytes = row_bytes() + step_.plan->layout.stride();
  if (n > staged.most - before) throw ChunkError(spec_.name);
  const auto stage = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      std::byte* const record = staged.records.data() + (before + i) * bytes;
      std::memcpy(record, values + i * row_bytes(), row_bytes());
      for (size_t s = 0; s < slots.size(); ++s) {
        std::memcpy(record + row_bytes() + layout[s].offset, slots[s] + i * layout[s].bytes, layout[s].bytes);
      }
    }
  };
  parallel(n, kRowGrain, std::cref(stage));
  for (size_t i = 0; i < n; ++i) staged.rows.push_back(targets[i].row);
  if (last && !holds) return EndStep(parallel);
  step_.plan->ready = last;
  return step_.token;
}

/// Commits the step with what has been staged for its rows.
inline uint32_t Table::EndStep(const ParallelFor& parallel) {
  ApplyPlan& plan = *step_.plan;
  const uint32_t next = CommitApply(plan, {step_.keys.data(), step_.keys.size()}, step_.counts.data());
  for (size_t i = 0; i < plan.updates.size(); ++i) {
    if (i + kAhead < plan.updates.size()) in_.store.PrefetchHeader(plan.updates[i + kAhead].row);
    in_.store.Count(plan.updates[i].row, plan.updates[i].occurrences, plan.step);
  }
  const StagedRows& staged = step_.staged;
  const size_t stride = plan.layout.stride();
  const bool with_slots = !plan.layout.empty();  // an optimizer without slots leaves them unwritten
  const auto write = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) in_.store.Prefetch(staged.rows[i + kAhead]);
      const uint32_t row = staged.rows[i];
      const std::byte* const record = staged.records.data() + i * (row_bytes() + stride);
      std::memcpy(in_.store.Value(row), record, row_bytes());
      if (!with_slots) continue;
      in_.store.MarkSlots(row);
      std::memcpy(in_.store.Slots(row), record + row_bytes(), stride);
    }
  };
  parallel(staged.rows.size(), kRowGrain, std::cref(write));
  in_.Compact();
  ForgetPlan();
  return next;
}

inline Table::Chunk Table::ChunkOf(uint32_t token, const ChunkSpan& chunk) const {
  const bool own = step_.way == Step::Way::kShard;
  if ((!own && step_.way != Step::Way::kChunks) || (own && chunk.num_rows > 0)) throw NotPlanned();
  const int32_t start = *chunk.start, active = *chunk.active;
  const size_t all = own ? step_.targets.size() : chunk.num_rows;
  const auto rows = static_cast<int64_t>(std::min<size_t>(all, INT32_MAX));
  if (start < 0 || active < 0 || active > rows || start > rows) throw RangeError(spec_.name, start, active);
  const auto* const targets =
      (own ? step_.targets.data() : reinterpret_cast<const Target*>(chunk.targets)) + start;
  const size_t n = std::min(chunk.size, static_cast<size_t>(std::max(active - start, 0)));
  CheckChunk(token, targets, n, chunk.layout.slots().size());
  if (chunk.layout != step_.plan->layout) throw ChunkError(spec_.name);
  return {own, targets, n};
}

/// Whether a chunk is one of the step that is open, and nothing has been written since that began.
inline void Table::CheckChunk(uint32_t token, const Target* targets, size_t n, size_t num_slots) const {
  if (!step_.open || step_.token != token || step_.version != gate_.version()) throw NotPlanned();
  const size_t end = in_.store.EndWith(step_.plan->change.entering());
  const bool rows = std::all_of(targets, targets + n, [&](const Target& t) { return t.row < end; });
  if (rows && num_slots == step_.plan->layout.slots().size()) return;
  throw ChunkError(spec_.name);
}

}  // namespace kvjax
