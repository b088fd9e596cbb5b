// TableSpec: what a table is, options resolved.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

/// Far beyond any use; it keeps sizes in bytes away from the ends of the integers.
inline constexpr int64_t kMaxDim = int64_t{1} << 20;

/// What happens when a key would be the one too many.
enum class OnFull { kGrow, kEvict, kError };

inline OnFull ParseOnFull(const std::string& text) {
  if (text == "grow") return OnFull::kGrow;
  if (text == "evict") return OnFull::kEvict;
  if (text == "error") return OnFull::kError;
  throw OptionError("on_full grow, evict or error", text);
}

struct TableSpec {
  std::string name;
  int64_t dim = 0;
  RowType type = RowType::kFloat32;
  Initializer initializer = {};
  AdmissionSpec admission = {};
  size_t max_capacity = 0;  // rows, 0 for no limit
  OnFull on_full = OnFull::kGrow;
  Policy policy = {};          // which rows are evicted when it is full, or every so many steps
  int64_t evict_every = 0;     // steps, 0 for never
  bool count_batches = false;  // a key counts once a step, however often it occurs in it
  bool sharded = false;        // over several devices
  int64_t placement = 0;       // a number of where shards are and of who owns which key; 0 in one place
  uint32_t shard = 0;          // which of several this is
  int32_t device = -1;         // on which one, by DeviceOrdinal; below 0 of a table in one place
  bool owns_shared = true;     // whether the row that unadmitted keys share is on this shard

  [[nodiscard]] size_t row_bytes() const { return static_cast<size_t>(dim) * ItemSize(type); }
};

}  // namespace kvjax
