// The operands of a call that every table takes: keys, initial rows, phases, targets, and the user's
// functions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/snapshot.h"

namespace kvjax {

/// n keys as a call brings them. `narrow` says that JAX held them in 32 bits while 64-bit integers were
/// switched off, so that ids of 64 bits would have been cut.
struct KeySpan {
  const uint64_t* data;
  size_t n;
  bool narrow = false;
};

/// What a key without a row reads as: what the table says, or its initial row whatever the table says.
enum class Missing { kTable, kInitial };

/// Rows (n, dim) for the distinct keys of a call that have no row, in the order in which they first occur; no
/// rows (nullptr) where the table makes them itself.
struct InitialRows {
  const std::byte* data = nullptr;
  size_t n = 0;
};

/// One row of a step: the row and which gradient it gets; kSharedGradient is the sum of the unadmitted keys'.
struct ApplyTarget {
  static constexpr uint32_t kSharedGradient = 0xFFFFFFFFu;
  uint32_t row;
  uint32_t gradient;
};

/// Written into every gradient that kvjax makes. Any arithmetic on the whole gradient tree changes it, and
/// with it the keys; so a gradient whose canary is not this number is refused.
inline constexpr uint32_t kCanary = 0x6B766A78u;  // "kvjx"

/// Is given evicted rows, sorted by (bucket, key), before they are erased. What it throws stops the eviction.
using Sink = std::function<void(Snapshot rows, std::string_view reason)>;

/// Scores rows by the user's function of that name: one number per row, finite.
using ScoreFunction =
    std::function<void(std::string_view name, const Snapshot& rows, std::vector<double>& out)>;

}  // namespace kvjax
