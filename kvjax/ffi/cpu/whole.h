// Whole tables, from the host: made, copied out, replaced, observed.
#pragma once
#include "kvjax/ffi/core/checks.h"
#include "kvjax/ffi/cpu/storage.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline std::shared_ptr<Table> Table::Make(const TableSpec& spec, const std::string& storage,
                                          uint32_t first_version, size_t capacity) {
  auto table = std::make_shared<Table>(spec, MakeSlabs(storage, spec.name), first_version);
  table->Reserve(first_version, capacity);
  return table;
}

inline Snapshot Table::Export(uint32_t version, bool with_slots, std::string_view op, bool) const {
  const auto lock = Read(version, op, {});
  Snapshot out = CopyAll(in_.store, row_bytes(), with_slots, OnThreads);
  out.last_step = in_.last_step;
  return out;
}

inline std::pair<std::shared_ptr<Frozen>, AdmissionState> Table::Freeze(uint32_t version, bool with_slots,
                                                                        std::string_view op, bool) {
  const auto lock = Write(version, op, {});
  AdmissionState admission = in_.admission.Save();
  auto frozen = std::make_shared<Frozen>(OnThreads, in_.store, row_bytes(), with_slots, in_.last_step);
  // What has been planned before this has kept its rows for others.
  if (planned_) frozen->KeepAll(in_.store);
  if (step_.plan) {
    frozen->Keep(OnThreads, in_.store, step_.plan->change.found.rows);
    for (const RowUpdate& update : step_.plan->updates) frozen->Keep(Serial, in_.store, {&update.row, 1});
  }
  in_.Watch(frozen);
  return {std::move(frozen), std::move(admission)};
}

inline size_t Table::NextOf(Frozen& frozen, const SnapshotSpace& to) const {
  frozen.Sort();  // which needs nothing of the table
  const auto lock = gate_.Read(spec_.name, "save", std::nullopt);
  return frozen.Next(in_.store, to);
}

inline AdmissionState Table::ExportAdmission(uint32_t version, std::string_view op, bool) const {
  const auto lock = Read(version, op, {});
  return in_.admission.Save();
}

inline Table::Loaded Table::BeginLoad(uint32_t version, const LoadHead& head) const {
  CheckLoad(spec_, head);
  auto [next, admission] = [&] {
    const auto reading = Read(version, "load", {});  // another writer may hold the live handle
    return std::pair(in_.store.Empty(), in_.admission.With(head.admission));
  }();
  StoreFill::Begin(next, head);
  return {version, std::move(next), std::move(admission), head.last_step};
}

inline void Table::AddLoaded(Loaded& loaded, const SnapshotView& rows) const {
  CheckRows(spec_, loaded.store.layout(), loaded.last_step, rows);
  if (const size_t twice = loaded.fill.Add(loaded.store, rows, row_bytes(), OnThreads); twice < rows.n) {
    throw TwiceError(spec_.name, rows.keys[twice]);
  }
  for (size_t i = 0; i < rows.n; ++i) loaded.admission.Forget(static_cast<uint64_t>(rows.keys[i]));
}

inline uint32_t Table::CommitLoad(Loaded loaded) {
  const auto lock =
      gate_.Write(spec_.name, "load", loaded.version);  // the engine gets them from the next call
  ForgetPlan();
  in_.Replace(std::move(loaded.store), loaded.last_step);
  in_.admission = std::move(loaded.admission);
  return gate_.Next();
}

inline void Table::Reserve(uint32_t version, size_t n) {
  const auto lock = Write(version, "reserve", {});
  in_.store.ReserveInAll(n);
}

inline void Table::SetEngine(Engine engine) {
  const auto calling_out = [this](auto call) {
    return [this, call = std::move(call)](auto... of) {
      const VersionGate::CallingOut calling(gate_);
      call(std::move(of)...);
    };
  };
  const auto lock = gate_.WriteAny(spec_.name, "get_table");
  in_.store.SetAway(std::make_unique<RowsAway>(
      std::make_shared<const Engine>(Engine{calling_out(std::move(engine.get)),
                                            calling_out(std::move(engine.put)),
                                            calling_out(std::move(engine.remove))}),
      row_bytes(), version()));
}

inline void Table::SetSink(Sink sink) {
  Sink guarded;
  if (sink) {
    guarded = [this, sink = std::move(sink)](Snapshot rows, std::string_view reason) {
      const VersionGate::CallingOut calling(gate_);
      sink(std::move(rows), reason);
    };
  }
  const auto lock = gate_.WriteAny(spec_.name, "on_evict");
  in_.sink.swap(guarded);  // the old one is freed with the lock given back
}

inline void Table::SetScore(ScoreFunction score) {
  const auto lock = gate_.WriteAny(spec_.name, "get_table");
  in_.score = [this, score = std::move(score)](std::string_view name, const Snapshot& rows,
                                               std::vector<double>& out) {
    const VersionGate::CallingOut calling(gate_);
    score(name, rows, out);
  };
}

inline Statistics Table::Stats(bool) const {
  return Observe([](const Contents& c) {
    const RowStore& store = c.store;
    const KeyIndex::Probes probes = store.index().SampleProbes();
    Statistics stats{.size = store.size(),
                     .capacity = store.index().capacity(),
                     .cells = store.index().cells(),
                     .index_bytes = store.index().bytes(),
                     .value_bytes = store.value_bytes(),
                     .header_bytes = store.header_bytes(),
                     .slot_bytes = store.slot_bytes(),
                     .admission_bytes = c.admission.bytes(),
                     .tracked = c.admission.tracked(),
                     .last_step = static_cast<uint64_t>(c.last_step),
                     .hits = c.counters.hits,
                     .misses = c.counters.misses,
                     .inserted = c.counters.inserted,
                     .removed = c.counters.removed,
                     .admitted = c.counters.admitted,
                     .refused = c.counters.refused,
                     .occurrences = c.counters.occurrences,
                     .distinct = c.counters.distinct,
                     .over_capacity = c.counters.over_capacity,
                     .evicted = c.counters.evicted,
                     .probe_mean = probes.mean,
                     .probe_longest = probes.longest};
    stats.SetTraffic(c.counters);
    return stats;
  });
}

inline std::pair<size_t, uint32_t> Table::Rows() const {
  return Observe([this](const Contents& c) { return std::pair(c.store.size(), version()); });
}

inline SlotLayout Table::Layout() const {
  return Observe([](const Contents& c) { return c.store.layout(); });
}

}  // namespace kvjax
