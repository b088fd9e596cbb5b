// Whole tables, from the host: copied out, replaced, observed.
#pragma once
#include "kvjax/ffi/core/table.h"

namespace kvjax {

inline Snapshot Table::Export(uint32_t version, bool with_slots) const {
  const auto lock = Read(version, "export", {});
  std::vector<KeyRow> rows;
  rows.reserve(in_.store.size());
  in_.store.index().ForEach([&](uint64_t key, uint32_t row) { rows.push_back({key, row}); });
  std::vector<int64_t> offsets = SortByBucket(rows);
  Snapshot out = CopyRows(in_.store, rows, row_bytes(), with_slots);
  out.offsets = std::move(offsets);
  out.last_step = in_.last_step;
  return out;
}

inline AdmissionState Table::ExportAdmission(uint32_t version) const {
  const auto lock = Read(version, "export", {});
  return in_.admission.Save();
}

inline Loaded Table::PrepareLoad(uint32_t version, const SnapshotView& rows,
                                 const AdmissionState& admission) const {
  if (spec_.max_capacity > 0 && rows.n > spec_.max_capacity && spec_.on_full != OnFull::kGrow) {
    throw MakeError(ErrorCode::kResourceExhausted, spec_.name, "load",
                    "at most max_capacity=" + std::to_string(spec_.max_capacity) + " rows",
                    std::to_string(rows.n), "give the table more capacity, or prune the rows first");
  }
  if (rows.n >= kNoRow) {
    throw MakeError(ErrorCode::kResourceExhausted, spec_.name, "load", "fewer than 2^32 - 1 rows",
                    std::to_string(rows.n), "spread the table over several shards");
  }
  const bool negative =
      std::any_of(rows.frequencies, rows.frequencies + rows.n, [](int64_t f) { return f < 0; });
  if (negative || rows.last_step < 0) {
    throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "load", "frequencies and a last step from 0 on",
                    "negative ones", "load what kvjax has exported");
  }
  auto reading = Read(version, "load", {});  // another writer may hold the live handle
  RowStore next = in_.store.Empty();
  Admission next_admission = in_.admission.With(admission);
  reading.unlock();
  if (const size_t twice = FillStore(next, rows, row_bytes()); twice < rows.n) {
    throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "load", "distinct keys",
                    "key " + std::to_string(rows.keys[twice]) + " twice", "remove the duplicates first");
  }
  for (size_t i = 0; i < rows.n; ++i) next_admission.Forget(static_cast<uint64_t>(rows.keys[i]));
  return {version, std::move(next), std::move(next_admission), rows.last_step};
}

inline uint32_t Table::CommitLoad(Loaded loaded) {
  const auto lock = Write(loaded.version, "load", {});
  in_.store = std::move(loaded.store);
  in_.admission = std::move(loaded.admission);
  in_.last_step = loaded.last_step;
  return gate_.Next();
}

inline void Table::Reserve(uint32_t version, size_t n) {
  const auto lock = Write(version, "reserve", {});
  in_.store.ReserveInAll(n);
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
  in_.sink.swap(guarded);  // the old one goes with the lock given back
}

inline void Table::SetScore(ScoreFunction score) {
  const auto lock = gate_.WriteAny(spec_.name, "get_table");
  in_.score = [this, score = std::move(score)](std::string_view name, const Snapshot& rows,
                                               std::vector<double>& out) {
    const VersionGate::CallingOut calling(gate_);
    score(name, rows, out);
  };
}

}  // namespace kvjax
