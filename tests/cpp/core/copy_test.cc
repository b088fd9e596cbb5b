// Copies of records of every size: all of a record, and nothing beside it.
#include "kvjax/ffi/core/copy.h"

#include <algorithm>
#include <vector>

#include "tests/cpp/support/check.h"

namespace core_copy {

using Bytes = std::vector<std::byte>;

constexpr size_t kMost = 700;

TEST(ARecordIsCopiedAndNothingBesideIt) {
  Bytes from(kMost);
  for (size_t i = 0; i < kMost; ++i) from[i] = static_cast<std::byte>(1 + i % 251);
  for (size_t bytes = 0; bytes <= kMost; bytes += 2) {
    for (const bool append : {false, true}) {
      Bytes to(kMost + 2);
      kvjax::WithSize(bytes, [&](auto size) {
        CHECK_EQ(size_t{size}, bytes);
        append ? kvjax::AppendRecord(to.data() + 1, from.data(), size)
               : kvjax::CopyRecord(to.data() + 1, from.data(), size);
      });
      CHECK(std::equal(from.begin(), from.begin() + static_cast<long>(bytes), to.begin() + 1));
      CHECK(to[0] == std::byte{0});
      CHECK(std::all_of(to.begin() + 1 + static_cast<long>(bytes), to.end(),
                        [](std::byte b) { return b == std::byte{0}; }));
    }
  }
}

TEST(LinesAreStreamedAndNothingBesideThem) {
  constexpr size_t kLine = 64, kAll = 16 * kLine;
  alignas(kLine) std::byte to[kAll];
  Bytes from(kAll + 1);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(1 + i % 251);
  CHECK(!kvjax::CanStream(to, 0) && !kvjax::CanStream(to, kLine + 4) && !kvjax::CanStream(to + 4, kLine));
  for (size_t bytes = kLine; bytes < kAll - kLine; bytes += kLine) {
    std::fill(std::begin(to), std::end(to), std::byte{0});
    kvjax::StreamLines(to + kLine, from.data() + 1, bytes);
    kvjax::EndStreams();
    CHECK(std::equal(to + kLine, to + kLine + bytes, from.begin() + 1));
    CHECK(to[kLine - 1] == std::byte{0} && to[kLine + bytes] == std::byte{0});
  }
}

}  // namespace core_copy
