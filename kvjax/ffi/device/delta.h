// Deltas of a device table: the rows whose marks differ from those at a cursor, copied out.
//
// No kernel that writes has a part in it, so a cursor costs a step nothing. It costs the host 16 bytes a row
// id, and a delta reads every row once, on the device; only what has changed is copied.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/whole.h"

namespace kvjax::device {

/// Those of a cursor of this version, if there is one: rows change, and change their row ids, with versions
/// alone. A save opens its new cursor before it asks what has changed since the old one.
template <class Q>
std::shared_ptr<const Marks> DeviceTable<Q>::MarksNow(Q& q, const Control& control) const {
  for (const auto& [token, marks] : cursors_) {
    if (marks->version == control.version) return marks;
  }
  return std::make_shared<const Marks>(MarksOf(q, contents_, row_bytes(), control));
}

template <class Q>
CursorToken DeviceTable<Q>::OpenCursor(uint32_t version) {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "save");
  const Control control = Fetch(q, control_.data());
  Expect("save", version, control);
  const CursorToken token = NextCursor();
  cursors_.emplace(token, MarksNow(q, control));
  return token;
}

template <class Q>
void DeviceTable<Q>::CloseCursor(CursorToken token) {
  const Entered entered(*this, "save", /*raises=*/false);
  cursors_.erase(token);
}

template <class Q>
Delta DeviceTable<Q>::ExportSince(uint32_t version, CursorToken token, bool with_slots) const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "save");
  const Control control = Fetch(q, control_.data());
  Expect("save", version, control);
  const auto cursor = cursors_.find(token);
  if (cursor == cursors_.end()) return {.whole = true};
  const Marks& before = *cursor->second;
  if (!before.layout.empty() && before.layout != contents_.layout()) return {.whole = true};
  auto [rows, removed] = DifferenceOf(before.rows, MarksNow(q, control)->rows);
  Delta delta{.counts_of_all = true};
  std::vector<int64_t> offsets = SortByBucket(rows);
  delta.rows = CopyRows(q, rows, with_slots);
  delta.rows.offsets = std::move(offsets);
  delta.rows.last_step = control.last_step;
  SortRows(removed);
  for (const KeyRow& r : removed) delta.removed.push_back(static_cast<int64_t>(r.key));
  delta.admission = admission_.Save(q, control);
  return delta;
}

}  // namespace kvjax::device
