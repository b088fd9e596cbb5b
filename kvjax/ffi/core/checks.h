// The checks that every table makes: of slots, and of rows to be loaded.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/load.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"

namespace kvjax {

/// The slot of that name and width. Throws if there is none.
inline const Slot& FindSlot(std::string_view table, const SlotLayout& layout, std::string_view name,
                            size_t bytes) {
  const auto& slots = layout.slots();
  const auto slot = std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.name == name; });
  if (slot == slots.end() || slot->bytes != bytes) throw SlotError(table, name, bytes, layout.ToString());
  return *slot;
}

/// Whether a step attaches its slots to rows that have none. Throws if they have others.
inline bool AttachesSlots(std::string_view table, const SlotLayout& held, const SlotLayout& wanted) {
  if (wanted == held || wanted.empty()) return false;
  if (!held.empty()) throw OptimizerError(table, held.ToString(), wanted.ToString());
  return true;
}

/// Where in the slots of a row the one of that name and width begins; all of them do at 0, if the name is the
/// text of a whole layout, and an empty one is about none of them. Throws if the table has others.
inline size_t SlotOffset(std::string_view table, const SlotLayout& layout, std::string_view name,
                         size_t bytes) {
  if (name.empty()) return 0;
  if (name.find('|') == std::string_view::npos) return FindSlot(table, layout, name, bytes).offset;
  const SlotLayout whole = SlotLayout::Parse(name);
  AttachesSlots(table, layout, whole);
  if (bytes != whole.stride()) throw SlotError(table, name, bytes, layout.ToString());
  return 0;
}

/// Whether a dry run is asked for a count of each part of its policy.
inline void CheckParts(std::string_view table, size_t parts, size_t asked) {
  if (parts == asked) return;
  throw OperandError(table, "evict", "counts of " + std::to_string(parts) + " parts", std::to_string(asked));
}

/// Refuses rows that no table can take over.
inline void CheckLoad(const TableSpec& spec, const LoadHead& head) {
  if (spec.max_capacity > 0 && head.rows > spec.max_capacity && spec.on_full != OnFull::kGrow) {
    throw LoadCapacityError(spec.name, spec.max_capacity, head.rows);
  }
  if (head.rows >= kNoRow) throw RowsError(spec.name, "load", head.rows);
  if (head.last_step < 0) throw NegativeError(spec.name);
}

/// Of some of these rows, whose slots are those of the layout, or none. last_step: of the table.
inline void CheckRows(const TableSpec& spec, const SlotLayout& layout, int64_t last_step,
                      const SnapshotView& rows) {
  if (!rows.slots.empty() && rows.layout != layout)
    throw OptimizerError(spec.name, layout.ToString(), rows.layout.ToString());
  if (std::any_of(rows.frequencies, rows.frequencies + rows.n, [](int64_t f) { return f < 0; })) {
    throw NegativeError(spec.name);
  }
  const auto outside = [&](int64_t version) { return version < 0 || version > last_step; };
  const int64_t* const end = rows.versions + rows.n;
  const int64_t* const found = std::find_if(rows.versions, end, outside);
  if (found != end) throw RowVersionError(spec.name, last_step, *found);
}

}  // namespace kvjax
