// Calls that a table refuses: through stale handles, and with keys that may have been cut.
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_handle {

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
    int64_t step;
    int32_t count = 1, active;
    kvjax::Table::Target target{};
    const bool yes = true;
    const auto* in = reinterpret_cast<const std::byte*>(row);
    auto* bytes = reinterpret_cast<std::byte*>(out);
    const kvjax::KeySpan keys{&key, 1};
    uint64_t missing[2];
    CHECK_THROWS(kFailedPrecondition,
                 table.Lookup(kvjax::Serial, version, keys, &yes, {}, kvjax::Missing::kTable, bytes, &found));
    CHECK_THROWS(kFailedPrecondition, table.FindMissing(kvjax::Serial, version, keys, &yes, missing));
    CHECK_THROWS(kFailedPrecondition, table.ReadSlot(kvjax::Serial, version, "m", 4, keys, bytes));
    CHECK_THROWS(kFailedPrecondition, table.Inspect(kvjax::Serial, "inspect", version, {&key, 1}, &found,
                                                    &frequency, &row_version, &found));
    CHECK_THROWS(kFailedPrecondition, table.Insert(kvjax::Serial, version, keys, {}));
    CHECK_THROWS(kFailedPrecondition, table.Table::Pin(kvjax::Serial, version, keys, {}));
    CHECK_THROWS(kFailedPrecondition, table.Unpin(version, keys));
    CHECK_THROWS(kFailedPrecondition, table.Upsert(kvjax::Serial, version, keys, in));
    CHECK_THROWS(kFailedPrecondition, table.Assign(kvjax::Serial, version, keys, in));
    CHECK_THROWS(kFailedPrecondition, table.Add(kvjax::Serial, version, keys, row, {}));
    CHECK_THROWS(kFailedPrecondition, table.Accum(kvjax::Serial, version, keys, row, row, &yes));
    CHECK_THROWS(kFailedPrecondition, table.Remove(version, keys));
    CHECK_THROWS(kFailedPrecondition, table.Table::Evict(kvjax::Serial, "evict", version, {}, -1));
    CHECK_THROWS(kFailedPrecondition, table.Clear(version));
    CHECK_THROWS(kFailedPrecondition, table.ClearSlots(version));
    CHECK_THROWS(kFailedPrecondition, table.BeginApply(kvjax::Serial, version, keys, &count, row, 1, {}, {},
                                                       {&target, &active, &step, out}));
    CHECK_THROWS(kFailedPrecondition, table.Gather(kvjax::Serial, version, &target, 1, bytes, &found, {}));
    CHECK_THROWS(kFailedPrecondition, table.Scatter(kvjax::Serial, version, &target, 1, in, {}, true));
    CHECK_THROWS(kFailedPrecondition, table.Size(version));
    CHECK_THROWS(kFailedPrecondition, table.Export(version, true));
    CHECK_THROWS(kFailedPrecondition, table.ExportAdmission(version));
    CHECK_THROWS(kFailedPrecondition, table.CommitLoad(data::Ready(table, version, {})));
    CHECK_THROWS(kFailedPrecondition, table.Reserve(version, 10));
  };
  table.Ensure({5});
  CHECK_EQ(table.version(), 0u);  // versions wrap around
  const kvjax::Snapshot before = table.Copy();
  call(0xFFFFFFFFu);
  call(1);
  CHECK(data::Same(before, table.Copy()));
  CHECK_EQ(table.version(), 0u);
}

TEST(NarrowKeysAreRefusedOnceKeysAreWide) {
  Live table(kDim);
  const Keys small = {0, 7, 0xFFFFFFFFull, static_cast<uint64_t>(INT64_C(-2147483648))};
  table.Insert(kvjax::Serial, table.version(), data::Span(small, true), {});
  table.Insert(kvjax::Serial, table.version(), data::Span(small, true), {});
  table.Ensure({0x100000000ull});
  CHECK_THROWS(kInvalidArgument, table.Insert(kvjax::Serial, table.version(), data::Span(small, true), {}));
  CHECK_THROWS(kInvalidArgument, table.Remove(table.version(), data::Span(small, true)));
  table.Clear(table.version());
  table.Remove(table.version(), data::Span(small, true));
}

TEST(ForeignRowIdsAreRefused) {
  Live table(kDim);
  table.Ensure({1, 2});
  table.Open({1, 9}, {1, 1});
  for (uint32_t id : {3u, kvjax::kNoRow}) {
    float row[kDim] = {};
    bool fresh;
    const kvjax::Table::Target target{id, 0};
    CHECK_THROWS(kInvalidArgument, table.Gather(kvjax::Serial, table.token, &target, 1,
                                                reinterpret_cast<std::byte*>(row), &fresh, {}));
    CHECK_THROWS(kInvalidArgument, table.Scatter(kvjax::Serial, table.token, &target, 1,
                                                 reinterpret_cast<const std::byte*>(row), {}, true));
  }
}

}  // namespace cpu_handle
