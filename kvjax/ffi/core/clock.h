// The clock of a table: which step a training write is, and what becomes due with it.
#pragma once
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// The step of a write that names one, below 0 for none. The table's last step is the clock: an optimizer
/// that counts anew does not turn it back.
KVJAX_HD inline int64_t StepOf(int64_t named, int64_t last) {
  return named >= last ? named : last + (last < INT64_MAX ? 1 : 0);
}

/// Whether what runs every so many steps, 0 for never, runs between the last one and this.
KVJAX_HD inline bool IsDue(int64_t every, int64_t last, int64_t step) {
  return every > 0 && step / every > last / every;
}

}  // namespace kvjax
