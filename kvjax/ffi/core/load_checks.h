// What is asked of rows that are to become a table's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"

namespace kvjax {

/// Refuses what no table can take over.
inline void CheckLoad(const TableSpec& spec, const SnapshotView& rows) {
  if (spec.max_capacity > 0 && rows.n > spec.max_capacity && spec.on_full != OnFull::kGrow) {
    throw MakeError(ErrorCode::kResourceExhausted, spec.name, "load",
                    "at most max_capacity=" + std::to_string(spec.max_capacity) + " rows",
                    std::to_string(rows.n), "give the table more capacity, or prune the rows first");
  }
  if (rows.n >= kNoRow) {
    throw RowsError(spec.name, "load", rows.n);
  }
  const bool negative =
      std::any_of(rows.frequencies, rows.frequencies + rows.n, [](int64_t f) { return f < 0; });
  if (negative || rows.last_step < 0) {
    throw MakeError(ErrorCode::kInvalidArgument, spec.name, "load", "frequencies and a last step from 0 on",
                    "negative ones", "load what kvjax has exported");
  }
}

}  // namespace kvjax
