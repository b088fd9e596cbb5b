// Change: the rows that a write is about to make and to evict.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/snapshot.h"

namespace kvjax {

/// The rows of the keys of a batch, kNoRow for those without one.
using RowIds = UnfilledResult<uint32_t>;

/// The rows of a call's keys. `fresh` are the distinct keys without one in order of first occurrence;
/// `places` says where the keys stand whose row is kNoRow, and `numbers` which of `fresh` each of these is.
struct Located {
  RowIds rows;
  std::vector<uint64_t> fresh = {};
  std::vector<uint32_t> places = {}, numbers = {};
};

/// What a write is about to do: ids[f] is the row that fresh key f will have, kNoRow if it gets none.
struct Change {
  Located found;
  std::vector<uint32_t> ids;
  std::vector<std::pair<std::string, std::vector<KeyRow>>> leaving = {};  // by reason
  size_t over_capacity = 0;                                               // rows beyond what was asked for
  bool by_hand = false;  // and not by training, which counts what it gives rows

  /// The row of each key of the call, once the change is committed; kNoRow for those that get none.
  [[nodiscard]] RowIds Rows() && {
    for (size_t m = 0; m < found.places.size(); ++m) found.rows[found.places[m]] = ids[found.numbers[m]];
    return std::move(found.rows);
  }
  [[nodiscard]] size_t entering() const {
    return ids.size() - static_cast<size_t>(std::count(ids.begin(), ids.end(), kNoRow));
  }
};

}  // namespace kvjax
