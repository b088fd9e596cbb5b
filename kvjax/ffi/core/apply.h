// The training write of a table: rows appear, are counted, handed out in chunks and written back.
#pragma once
#include "kvjax/ffi/core/table.h"

namespace kvjax {

inline uint32_t Table::BeginApply(const ParallelFor& parallel, uint32_t version, KeySpan keys,
                                  const int32_t* counts, const float* rows, int64_t step,
                                  const SlotLayout& layout, InitialRows initial, Begun out) {
  const auto lock = Write(version, "apply", keys);
  const size_t n = keys.n = CheckMerged(keys, counts);
  const bool attach = !(layout == in_.store.layout()) && !layout.empty();
  if (attach && !in_.store.layout().empty()) {
    throw MakeError(ErrorCode::kFailedPrecondition, spec_.name, "apply",
                    "the optimizer whose slots the table holds (" + in_.store.layout().ToString() + ")",
                    "one with " + layout.ToString(), "table.clear_slots() forgets the old optimizer's state");
  }
  if (step < 0) step = in_.last_step + (in_.last_step < INT64_MAX ? 1 : 0);

  // Which of the new keys get a row.
  Change change{.found = in_.Locate(parallel, keys), .ids = {}};
  Located& found = change.found;
  std::vector<uint32_t> occurrences(found.fresh.size());
  for (size_t i = 0, m = 0; i < n; ++i) {
    if (found.rows[i] == kNoRow) occurrences[found.numbers[m++]] = Occurrences(counts[i]);
  }
  const Admission::Decision decision = in_.admission.Decide(found.fresh, occurrences, in_.last_step, step);
  const size_t decided = found.fresh.size();
  change.ids.assign(decided, kNoRow);
  bool pools = false;  // whether gradients of unadmitted keys go to the shared row
  for (size_t f = 0; f < decided; ++f) {
    if (decision.admitted[f] != 0) change.ids[f] = 0;
    pools |= decision.admitted[f] == 0 && in_.admission.shares();
  }
  uint32_t shared = pools ? in_.store.index().Find(spec_.admission.shared_key) : kNoRow;
  size_t shared_number = decided;
  if (pools && shared == kNoRow) {
    const auto at = std::find(found.fresh.begin(), found.fresh.end(), spec_.admission.shared_key);
    shared_number = static_cast<size_t>(at - found.fresh.begin());
    if (shared_number == decided) found.fresh.push_back(spec_.admission.shared_key), change.ids.push_back(0);
  }
  std::vector<size_t> pool;  // gradients of the shared row
  pool.reserve(pools ? n : 0);
  in_.MakeRoom(parallel, spec_, "apply", change, step, true);
  if (attach) in_.store.AttachSlots(layout);
  try {
    in_.Prepare(parallel, spec_, "apply", change, initial, false);
  } catch (...) {
    if (attach) in_.store.DetachSlots();
    throw;
  }

  // From here on nothing can fail.
  in_.admission.Commit(found.fresh, decision);
  in_.Commit(change);
  if (pools && shared == kNoRow) shared = change.ids[shared_number];
  if (in_.store.Compact()) {  // rows have moved
    for (size_t f = 0; f < found.fresh.size(); ++f) change.ids[f] = in_.store.index().Find(found.fresh[f]);
    for (size_t i = 0; i < n; ++i)
      found.rows[i] = found.rows[i] == kNoRow ? kNoRow : in_.store.index().Find(keys.data[i]);
    if (pools) shared = in_.store.index().Find(spec_.admission.shared_key);
  }
  const auto dim = static_cast<size_t>(spec_.dim);
  size_t active = 0;
  uint64_t pooled = 0;  // occurrences
  for (size_t i = 0, m = 0; i < n; ++i) {
    if (i + kAhead < n && found.rows[i + kAhead] != kNoRow) in_.store.PrefetchHeader(found.rows[i + kAhead]);
    const bool is_new = found.rows[i] == kNoRow;
    const uint32_t number = is_new ? found.numbers[m++] : 0;
    const uint32_t row = is_new ? change.ids[number] : found.rows[i];
    in_.counters.occurrences += static_cast<uint64_t>(counts[i]);
    if (row == kNoRow) in_.counters.refused += static_cast<uint64_t>(counts[i]);
    if (pools && (row == kNoRow || row == shared)) {
      pool.push_back(i);
      pooled += static_cast<uint64_t>(counts[i]);
    } else if (row != kNoRow) {
      Count(row, is_new ? decision.totals[number] : Occurrences(counts[i]), step);
      out.targets[active++] = {row, static_cast<uint32_t>(i)};
    }
    in_.counters.admitted += is_new && row != kNoRow;
  }
  // In the order of their hashes, so that the sum does not depend on how the batch was made.
  std::sort(pool.begin(), pool.end(),
            [&](size_t i, size_t j) { return Mix(keys.data[i]) < Mix(keys.data[j]); });
  for (size_t d = 0; d < dim; ++d) {
    double sum = 0.0;
    for (const size_t i : pool) sum += rows[i * dim + d];
    out.pooled[d] = static_cast<float>(sum);
  }
  if (pools) {
    Count(shared, spec_.count_batches ? 1 : pooled, step);
    out.targets[active++] = {shared, kPooled};
  }
  in_.admission.Compact();
  in_.counters.distinct += n;
  in_.last_step = std::max(in_.last_step, step);
  *out.active = static_cast<int32_t>(active);
  *out.step = step;
  return gate_.BeginStep();
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
    throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "apply", "distinct keys, then padding",
                    "a merged gradient that was changed or joined to another",
                    "give the gradients to kvjax.merge together");
  }
  return active;
}

inline void Table::CheckChunk(const Target* targets, size_t n, size_t num_slots) const {
  const bool rows =
      std::all_of(targets, targets + n, [&](const Target& t) { return t.row < in_.store.end_row(); });
  if (rows && (num_slots == 0 || num_slots == in_.store.layout().slots().size())) return;
  throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "apply", "rows and slots made by BeginApply",
                  "others", "this is a defect of kvjax: please report it");
}

}  // namespace kvjax
