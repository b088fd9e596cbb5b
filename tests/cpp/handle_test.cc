// Calls that a table refuses: through stale handles, and with keys that may have been cut.
#include <vector>

#include "tests/cpp/check.h"
#include "tests/cpp/data.h"

namespace {

using data::Keys;
using data::Live;

constexpr size_t kDim = 3;

TEST(StaleVersionsAreRefusedEverywhere) {
  Live table(data::Spec(kDim), std::make_shared<kvjax::HostSlabs>(), 0xFFFFFFFFu);
  const auto call = [&](uint32_t version) {
    const uint64_t key = 5;
    const float row[kDim] = {};
    float out[kDim];
    bool found;
    int64_t frequency, row_version;
    int32_t count = 1, active;
    uint32_t id = 0;
    const auto* in = reinterpret_cast<const std::byte*>(row);
    auto* bytes = reinterpret_cast<std::byte*>(out);
    CHECK_THROWS(kFailedPrecondition, table.Lookup(kvjax::Serial, version, {&key, 1}, bytes, &found));
    CHECK_THROWS(kFailedPrecondition, table.Inspect(kvjax::Serial, "inspect", version, {&key, 1}, &found,
                                                    &frequency, &row_version));
    CHECK_THROWS(kFailedPrecondition, table.Insert(kvjax::Serial, version, {&key, 1}));
    CHECK_THROWS(kFailedPrecondition, table.Upsert(kvjax::Serial, version, {&key, 1}, in));
    CHECK_THROWS(kFailedPrecondition, table.Remove(version, {&key, 1}));
    CHECK_THROWS(kFailedPrecondition, table.Clear(version));
    CHECK_THROWS(kFailedPrecondition, table.ClearSlots(version));
    CHECK_THROWS(kFailedPrecondition,
                 table.BeginApply(kvjax::Serial, version, {&key, 1}, &count, 1, {}, &id, &active));
    CHECK_THROWS(kFailedPrecondition, table.Gather(kvjax::Serial, version, &id, 1, bytes, &found, {}));
    CHECK_THROWS(kFailedPrecondition, table.Scatter(kvjax::Serial, version, &id, 1, in, {}));
    CHECK_THROWS(kFailedPrecondition, kvjax::Load(table, version, {}));
  };
  table.Add({5});
  CHECK_EQ(table.version(), 0u);  // versions wrap around
  const kvjax::Snapshot before = kvjax::Export(table, table.version(), true);
  call(0xFFFFFFFFu);
  call(1);
  CHECK(data::Same(before, kvjax::Export(table, table.version(), true)));
  CHECK_EQ(table.version(), 0u);
}

TEST(NarrowKeysAreRefusedOnceKeysAreWide) {
  Live table(kDim);
  const Keys small = {0, 7, 0xFFFFFFFFull, static_cast<uint64_t>(INT64_C(-2147483648))};
  table.Insert(kvjax::Serial, table.version(), data::Span(small, true));
  table.Insert(kvjax::Serial, table.version(), data::Span(small, true));
  table.Add({0x100000000ull});
  CHECK_THROWS(kInvalidArgument, table.Insert(kvjax::Serial, table.version(), data::Span(small, true)));
  CHECK_THROWS(kInvalidArgument, table.Remove(table.version(), data::Span(small, true)));
  table.Clear(table.version());
  table.Remove(table.version(), data::Span(small, true));
}

TEST(ForeignRowIdsAreRefused) {
  Live table(kDim);
  table.Add({1, 2});
  for (uint32_t id : {2u, kvjax::kNoRow}) {
    float row[kDim] = {};
    bool fresh;
    CHECK_THROWS(kInvalidArgument, table.Gather(kvjax::Serial, table.version(), &id, 1,
                                                reinterpret_cast<std::byte*>(row), &fresh, {}));
    CHECK_THROWS(kInvalidArgument, table.Scatter(kvjax::Serial, table.version(), &id, 1,
                                                 reinterpret_cast<const std::byte*>(row), {}));
  }
}

}  // namespace
