// Deltas: what has changed in a table since a cursor, copied out.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline CursorToken Table::OpenCursor(uint32_t version) {
  const auto lock = Write(version, "save", {});
  return in_.touched.Open();
}

inline void Table::CloseCursor(CursorToken token) {
  const auto lock = gate_.WriteAny(spec_.name, "save");
  in_.touched.Close(token);
}

inline Delta Table::ExportSince(uint32_t version, CursorToken token, bool with_slots) const {
  const auto lock = Read(version, "save", {});
  const std::optional<Touched::Since> since = in_.touched.At(token);
  if (!since) return {.whole = true};
  std::vector<KeyRow> rows, removed;
  const std::vector<uint64_t>& keys = since->keys;
  in_.store.index().FindEach(
      keys.data(), keys.size(), [](size_t, uint32_t row) { return row; },
      [&](size_t i, uint32_t row) { (row == kNoRow ? removed : rows).push_back({keys[i], row}); });
  SortRows(removed);
  Delta delta{.counts_of_all = since->counts_of_all};
  std::vector<int64_t> offsets = SortByBucket(rows);
  delta.rows = CopyRows(in_.store, rows, row_bytes(), with_slots, OnThreads);
  delta.rows.offsets = std::move(offsets);
  delta.rows.last_step = in_.last_step;
  for (const KeyRow& r : removed) delta.removed.push_back(static_cast<int64_t>(r.key));
  delta.admission = since->counts_of_all ? in_.admission.Save() : in_.admission.Save(delta.removed);
  return delta;
}

}  // namespace kvjax
