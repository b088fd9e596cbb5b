// Delta: what has changed in a table since a cursor, which the table knows by a token.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/snapshot.h"

namespace kvjax {

/// Which cursor: no two of a backend's tables have the same, ever.
using CursorToken = uint64_t;

inline CursorToken NextCursor() {
  static std::atomic<CursorToken> last = 0;
  return ++last;
}

/// Rows, keys that have none, sorted by (bucket, key), and counts of these, or of all keys that wait. With
/// `whole` it is not known what has changed, and nothing is here.
struct Delta {
  Snapshot rows = {};
  std::vector<int64_t> removed = {};
  AdmissionState admission = {};
  bool counts_of_all = false;
  bool whole = false;
};

}  // namespace kvjax
