// Frozen rows: what a save copies part by part is what was there, in its order.
#include "kvjax/ffi/cpu/frozen.h"

#include <cstring>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_frozen {

using data::Floats;
using data::Keys;
using data::Live;

Keys Range(size_t n) {
  Keys keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = kvjax::Mix(i);
  return keys;
}

/// The pages of its list that have been copied are given back meanwhile, which a small table has none of.
TEST(ALargeTableIsCopiedOnce) {
  constexpr size_t kRows = 300'000;
  const Keys keys = Range(kRows);
  Floats values(kRows);
  for (size_t i = 0; i < kRows; ++i) values[i] = static_cast<float>(i);
  Live table(1);
  table.Put(keys, values);
  const kvjax::Snapshot want = table.Copy();
  const auto frozen = table.Freeze(table.version(), true).first;
  kvjax::Snapshot part;
  part.layout = frozen->layout();
  part.Resize(40'000, sizeof(float));
  size_t copied = 0, turn = 0;
  for (size_t n; (n = table.NextOf(*frozen, data::SpaceOf(part))) > 0; copied += n, ++turn) {
    CHECK(copied + n <= kRows && std::memcmp(part.keys.data(), want.keys.data() + copied, n * 8) == 0);
    CHECK_EQ(std::memcmp(part.values.data(), want.values.data() + copied * 4, n * 4), 0);
    if (turn % 3 != 0) continue;  // rows of all parts are written
    Keys some;
    for (size_t i = turn; i < kRows; i += 997) some.push_back(keys[i]);
    table.Put(some, Floats(some.size(), -1));
  }
  CHECK(copied == kRows && turn > 10);
  CHECK(frozen->offsets() == std::vector<int64_t>(want.offsets.begin(), want.offsets.end()));
}

TEST(WhetherARowIsPinned) {
  const Keys keys = Range(40'000);
  Live table(1);
  table.Put(keys, Floats(keys.size()));
  const auto pinned = [&] { return table.Freeze(table.version(), false).first->pinned(); };
  CHECK(!pinned());
  table.Pin({keys.back()});
  CHECK(pinned());
  table.Pin(keys);
  CHECK(pinned());
}

}  // namespace cpu_frozen
