// Sets of row ids against a list of flags: ends within a word, all rows, and free row ids.
#include "kvjax/ffi/cpu/row_set.h"

#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_row_set {

void HasWhatItWasGiven(size_t end, size_t share) {
  data::Stream stream(end + share);
  std::vector<bool> flags(end);
  kvjax::UnfilledResult<kvjax::ListedRow> rows;
  for (size_t row = 0; row < end; ++row) {
    flags[row] = stream.Below(100) < share;
    if (flags[row]) rows.push_back({stream.Next(), static_cast<uint32_t>(row)});
  }
  kvjax::RowSet set(kvjax::OnThreads, end, rows);
  CHECK_EQ(set.size(), end);
  for (const bool removes : {true, false}) {
    for (size_t row = 0; row < end + 70; ++row) CHECK_EQ(set[row], row < end && flags[row]);
    for (size_t row = 0; removes && row < end; row += 3) set.Remove(row), flags[row] = false;
  }
}

TEST(HasTheRowsOfItsListAndNoOthers) {
  for (const size_t end : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{100'001}}) {
    for (const size_t share : {0, 50, 100}) HasWhatItWasGiven(end, share);
  }
}

}  // namespace cpu_row_set
