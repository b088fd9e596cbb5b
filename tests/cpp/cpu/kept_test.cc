// Kept rows against a map: places and records grow, and a forgotten record is used again.
#include "kvjax/ffi/cpu/kept.h"

#include <cstring>
#include <iterator>
#include <map>

#include "kvjax/ffi/core/hash.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_kept {

TEST(EachRowHasItsRecordUntilItIsForgotten) {
  constexpr size_t kRecord = 12;
  kvjax::KeptRows kept(kRecord);
  std::map<uint32_t, uint64_t> marks;
  data::Stream stream(2);
  for (uint32_t n = 0; n < 5000; ++n) {
    const auto row = static_cast<uint32_t>(kvjax::Mix(n));  // rows that follow each other have places apart
    const uint64_t mark = marks[row] = stream.Next();
    std::memcpy(kept.Add(row) + kRecord - 8, &mark, 8);
    if (stream.Below(2) == 0) {
      const auto gone = std::next(marks.begin(), static_cast<ptrdiff_t>(stream.Below(marks.size())));
      kept.Forget(gone->first);
      marks.erase(gone);
    }
    if (n % 500 != 0) continue;
    for (const auto& [at, is] : marks) CHECK_EQ(std::memcmp(kept.Find(at) + kRecord - 8, &is, 8), 0);
  }
}

}  // namespace cpu_kept
