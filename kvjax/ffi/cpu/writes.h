// The writes of a table except training: each plans what may fail, and then does what cannot.
#pragma once
#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

template <class MakePlan>
std::optional<Planned> Table::PlanRows(const ParallelFor& parallel, Call call, std::string_view op,
                                       InitialRows initial, bool blank, MakePlan make) {
  return Plan(call, [&] {
    Planned planned = make();
    planned.op = op, planned.blank = blank;
    if (call.phase == Phase::kPropose) {
      planned.initial.assign(initial.data, initial.data + initial.n * row_bytes());
      return planned;
    }
    SpaceMaker space(in_.source(spec_), op, planned.change, Alone(planned.change), in_.last_step, true);
    space.Make(parallel, /*due=*/false);
    PrepareWrite(parallel, planned, initial);
    return planned;
  });
}

inline uint32_t Table::Insert(const ParallelFor& parallel, Call call, KeySpan keys, InitialRows initial) {
  const auto lock = Write(call.version, "lookup_or_insert", keys);
  auto planned = PlanRows(parallel, call, "lookup_or_insert", initial, /*blank=*/false,
                          [&] { return Entering(parallel, call, keys); });
  if (!planned) return 0;
  in_.Commit(planned->change);
  const uint32_t next = gate_.Next();
  if (const auto batch = last_batch_.Begin(next, keys.n)) {
    batch->rows = std::move(planned->change).Rows();
    const auto copy = [&](size_t begin, size_t end) {
      std::copy(keys.data + begin, keys.data + end, batch->keys.data() + begin);
    };
    parallel(keys.n, kGrain, std::cref(copy));  // by reference: a copy would need memory
    last_batch_.Keep(batch);
  }
  return next;
}

inline uint32_t Table::Pin(const ParallelFor& parallel, Call call, KeySpan keys, InitialRows initial) {
  const auto lock = Write(call.version, "pin", keys);
  auto planned = PlanRows(parallel, call, "pin", initial, /*blank=*/false,
                          [&] { return Entering(parallel, call, keys); });
  if (!planned) return 0;
  in_.Commit(planned->change);
  in_.Touch(keys);
  for (const uint32_t row : std::move(planned->change).Rows())
    in_.store.ChangeHeader(row, [](RowHeader& header) { header.pinned = 1; });
  return gate_.Next();
}

inline uint32_t Table::Unpin(Call call, KeySpan keys) {
  const auto lock = Write(call.version, "unpin", keys);
  const auto plan = [&] {
    in_.Keep(Serial, in_.Locate(Serial, keys).rows);
    return Planned{call.version, {}};
  };
  if (!Plan(call, plan)) return 0;
  for (size_t i = 0; i < keys.n; ++i) {
    const uint32_t row = in_.store.index().Find(keys.data[i]);
    in_.Touch({keys.data + i, 1}, &row);
    if (row == kNoRow) continue;
    in_.store.ChangeHeader(row, [](RowHeader& header) { header.pinned = 0; });
    in_.shortlists.Add({keys.data[i], row, in_.store.Header(row)});
  }
  return gate_.Next();
}

inline uint32_t Table::Upsert(const ParallelFor& parallel, Call call, KeySpan keys, const std::byte* values) {
  const auto lock = Write(call.version, "upsert", keys, Column::kValues);
  auto planned =
      PlanRows(parallel, call, "upsert", {}, /*blank=*/true, [&] { return Entering(parallel, call, keys); });
  if (!planned) return 0;
  in_.Commit(planned->change);
  in_.Touch(keys);
  WriteValues(parallel, std::move(planned->change).Rows(), values);
  return gate_.Next();
}

inline uint32_t Table::Assign(const ParallelFor& parallel, Call call, KeySpan keys, const std::byte* values) {
  const auto lock = Write(call.version, "assign", keys, Column::kValues);
  const auto planned = Plan(call, [&] {
    Planned writing{call.version, Change{.found = in_.Locate(parallel, keys), .ids = {}}};
    in_.Keep(parallel, writing.change.found.rows);
    return writing;
  });
  if (!planned) return 0;
  in_.Touch(keys, planned->change.found.rows.data());
  WriteValues(parallel, planned->change.found.rows, values);
  return gate_.Next();
}

inline uint32_t Table::Add(const ParallelFor& parallel, Call call, KeySpan keys, const float* deltas,
                           InitialRows initial) {
  const auto lock = Write(call.version, "add", keys, Column::kValues);
  auto planned = PlanRows(parallel, call, "add", initial, /*blank=*/false,
                          [&] { return PlanAdd(parallel, call, keys, deltas); });
  if (!planned) return 0;
  in_.Commit(planned->change);
  in_.Touch(keys);
  const auto dim = static_cast<size_t>(spec_.dim);
  const RowIds rows = std::move(planned->change).Rows();  // no row is there twice
  const auto add = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end)
        in_.store.PrefetchValue(rows[i + kAhead]), in_.store.PrefetchHeader(rows[i + kAhead]);
      AddTo(rows[i], [&](size_t d) { return planned->sums[i * dim + d]; });
    }
  };
  parallel(rows.size(), kRowGrain, std::cref(add));
  return gate_.Next();
}

inline uint32_t Table::Accum(const ParallelFor& parallel, Call call, KeySpan keys, const float* old_values,
                             const float* new_values, const bool* exists) {
  const auto lock = Write(call.version, "accum", keys, Column::kValues);
  const auto dim = static_cast<size_t>(spec_.dim);
  auto planned = PlanRows(parallel, call, "accum", {}, /*blank=*/true,
                          [&] { return PlanAccum(parallel, call, keys, exists); });
  if (!planned) return 0;
  Change& change = planned->change;
  std::vector<bool>& present = planned->present;
  in_.Commit(change);
  in_.Touch(keys, change.found.rows.data());
  for (size_t i = 0, m = 0; i < keys.n; ++i) {
    uint32_t row = change.found.rows[i];
    bool had = row != kNoRow;
    if (!had) {
      const uint32_t number = change.found.numbers[m++];
      row = change.ids[number];
      had = present[number];
      if (!exists[i]) present[number] = true;
    }
    if (had && exists[i]) {
      AddTo(row, [&](size_t d) { return new_values[i * dim + d] - old_values[i * dim + d]; });
    } else if (!had && !exists[i]) {
      for (size_t d = 0; d < dim; ++d) {
        StoreElement(spec_.type, in_.store.Value(row), static_cast<int64_t>(d), new_values[i * dim + d]);
      }
      in_.store.SetVersion(row, in_.last_step);
    }
  }
  return gate_.Next();
}

inline uint32_t Table::Remove(Call call, KeySpan keys) {
  const auto lock = Write(call.version, "remove", keys);
  const auto plan = [&] {
    in_.store.ReserveErase(std::min(keys.n, in_.store.size()));
    return Planned{call.version, {}};
  };
  if (!Plan(call, plan)) return 0;
  for (size_t i = 0; i < keys.n; ++i) {
    if (i + kAhead < keys.n) in_.store.PrefetchKey(keys.data[i + kAhead]);
    const bool counted = in_.admission.Forget(keys.data[i]), had_row = in_.store.Erase(keys.data[i]);
    if (counted || had_row) in_.Touch({keys.data + i, 1});
    in_.counters.removed += had_row;
  }
  in_.admission.Compact();
  in_.Compact();
  return gate_.Next();
}

inline uint32_t Table::Evict(const ParallelFor& parallel, std::string_view op, Call call,
                             const Policy& policy, int64_t step) {
  const auto lock = Write(call.version, op, {});
  const auto planned = Plan(call, [&] { return Evicting(parallel, call, policy, step, /*dry_run=*/false); });
  if (!planned) return 0;
  in_.Commit(planned->change);
  in_.Compact();
  return gate_.Next();
}

inline uint32_t Table::CountVictims(const ParallelFor& parallel, Call call, const Policy& policy,
                                    int64_t step, std::span<uint32_t> counts) {
  const auto lock = Write(call.version, "evict", {});  // it may list rows by their order
  const auto plan = [&] { return Evicting(parallel, call, policy, step, /*dry_run=*/true); };
  // As a read, it ends no step that is under way.
  const auto planned = call.phase == Phase::kWhole ? std::optional(plan()) : Plan(call, plan);
  if (!planned) return 0;
  const auto& leaving = planned->change.leaving;
  CheckParts(spec_.name, leaving.size(), counts.size());
  for (size_t part = 0; part < counts.size(); ++part)
    counts[part] = static_cast<uint32_t>(leaving[part].second.size());
  return call.version;
}

inline void Table::PrepareWrite(const ParallelFor& parallel, Planned& write, InitialRows initial) {
  if (!write.dry_run) in_.Prepare(parallel, spec_, write.op, write.change, initial, write.blank);
}

inline Planned Table::Evicting(const ParallelFor& parallel, const Call& call, const Policy& policy,
                               int64_t step, bool dry_run) {
  Planned evicting{.version = call.version,
                   .change = {},
                   .op = "evict",
                   .policy = policy,
                   .step = step < 0 ? in_.last_step : step,
                   .dry_run = dry_run};
  if (call.phase == Phase::kPropose) return evicting;
  SpaceMaker(in_.source(spec_), "evict", evicting.change, Alone(evicting.change), evicting.step, true)
      .Evict(parallel, policy);
  PrepareWrite(parallel, evicting, {});
  return evicting;
}

inline uint32_t Table::Clear(Call call) {
  const auto lock = Write(call.version, "clear", {});
  if (!Plan(call, [&] { return Planned{call.version, {}}; })) return 0;
  const size_t rows = in_.store.size();
  in_.Replace(in_.store.Empty(), 0);
  in_.counters.removed += rows;
  in_.admission.Clear();
  return gate_.Next();
}

inline uint32_t Table::ClearSlots(Call call) {
  const auto lock = Write(call.version, "clear_slots", {});
  const auto plan = [&] {
    in_.KeepAll();  // of which headers will change
    return Planned{call.version, {}};
  };
  if (!Plan(call, plan)) return 0;
  in_.store.DetachSlots();
  in_.touched.Lose();
  return gate_.Next();
}

inline void Table::WriteValues(const ParallelFor& parallel, const RowIds& rows,
                               const std::byte* values) noexcept {
  constexpr size_t kOwners = 64, kTogether = 64;  // rows, so that new ones, which are neighbours, stay so
  constexpr size_t kBlock = 512;
  const size_t bytes = row_bytes();
  // What comes first in a slab is at the beginning of a page.
  const bool streams = rows.size() * bytes >= kStreamFrom && CanStream(nullptr, bytes);
  const auto write = [&](size_t first, size_t last) {
    std::array<size_t, kBlock> own;
    for (size_t begin = 0; begin < rows.size(); begin += kBlock) {
      size_t m = 0;
      for (size_t i = begin, end = std::min(begin + kBlock, rows.size()); i < end; ++i) {
        own[m] = i;  // without a branch, which nobody could foresee
        m += size_t{rows[i] / kTogether % kOwners - first < last - first} & size_t{rows[i] != kNoRow};
      }
      const auto fetch = [&](size_t j) {
        if (j >= m) return;
        if (!streams) in_.store.PrefetchValue(rows[own[j]]);
        in_.store.PrefetchHeader(rows[own[j]]);
      };
      for (size_t j = 0; j < kAhead; ++j) fetch(j);
      for (size_t j = 0; j < m; ++j) {
        fetch(j + kAhead);
        std::byte* const value = in_.store.Value(rows[own[j]]);
        if (streams) {
          StreamLines(value, values + own[j] * bytes, bytes);
        } else {
          CopyRecord(value, values + own[j] * bytes, bytes);
        }
        in_.store.SetVersion(rows[own[j]], in_.last_step);
      }
    }
    if (streams) EndStreams();
  };
  // By reference: a copy would need memory.
  parallel(kOwners, rows.size() < 2 * kGrain ? kOwners : kOwners / 8, std::cref(write));
}

/// The deltas of equal keys are summed.
inline Planned Table::PlanAdd(const ParallelFor& parallel, Call call, KeySpan keys, const float* deltas) {
  const auto dim = static_cast<size_t>(spec_.dim);
  const std::vector<int32_t> ones(keys.n, 1);
  std::vector<uint64_t> distinct(keys.n);
  std::vector<float> sums(keys.n * dim);
  std::vector<int32_t> counts(keys.n);
  const size_t n = MergeUnpadded(parallel, keys.data, deltas, ones.data(), keys.n, dim, distinct.data(),
                                 sums.data(), counts.data());
  Planned planned = Entering(parallel, call, {distinct.data(), n});
  planned.sums = std::move(sums);
  return planned;
}

inline Planned Table::PlanAccum(const ParallelFor& parallel, Call call, KeySpan keys, const bool* exists) {
  Change change{.found = in_.Locate(parallel, keys), .ids = {}, .by_hand = true};
  change.ids.assign(change.found.fresh.size(), kNoRow);
  for (size_t i = 0, m = 0; i < keys.n; ++i) {
    if (change.found.rows[i] != kNoRow) continue;
    const uint32_t number = change.found.numbers[m++];
    if (!exists[i]) change.ids[number] = 0;
  }
  Planned planned{.version = call.version, .change = std::move(change)};
  planned.present.resize(planned.change.ids.size());
  return planned;
}

inline void Table::KeepBatch(const Call& call, OwnBatch batch) {
  const auto lock = Write(call.version, "write", {});
  if (!planned_ || !planned_->IsOf(call)) throw NotPlanned();
  planned_->batch = std::make_unique<OwnBatch>(std::move(batch));
}

inline OwnBatch Table::TakeBatch(const Call& call) {
  const auto lock = Write(call.version, "write", {});
  if (!planned_ || !planned_->IsOf(call) || !planned_->batch) throw NotPlanned();
  return std::move(*planned_->batch);
}

}  // namespace kvjax
