// Headers and slots of rows, and whole-table copies of it all.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kvjax/ffi/core/snapshot.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_slots {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::Snapshot;

kvjax::SlotLayout Adam(size_t dim) {
  kvjax::SlotLayout layout;
  layout.Add("mu", "float32[" + std::to_string(dim) + "]", 4 * dim);
  layout.Add("flag", "bool", 1);  // not a multiple of 4: the next slot is aligned all the same
  layout.Add("nu", "float32", 4);
  return layout;
}

struct Chunk {
  Floats values, mu, nu;
  std::vector<uint8_t> flag, fresh;
};

Chunk Gather(const Live& table, const data::Targets& ids) {
  const size_t n = ids.size(), dim = static_cast<size_t>(table.spec().dim);
  Chunk c{Floats(n * dim), Floats(n * dim), Floats(n), std::vector<uint8_t>(n), {}};
  const auto fresh = std::make_unique<bool[]>(n);
  const auto bytes = [](auto& v) { return reinterpret_cast<std::byte*>(v.data()); };
  table.Gather(kvjax::Serial, table.token, ids.data(), n, bytes(c.values), fresh.get(),
               {bytes(c.mu), bytes(c.flag), bytes(c.nu)});
  c.fresh.assign(fresh.get(), fresh.get() + n);
  return c;
}

void Scatter(Live& table, const data::Targets& ids, const Chunk& c) {
  const auto bytes = [](const auto& v) { return reinterpret_cast<const std::byte*>(v.data()); };
  table.Scatter(kvjax::Serial, table.token, ids.data(), ids.size(), bytes(c.values),
                {bytes(c.mu), bytes(c.flag), bytes(c.nu)}, true);
}

/// One step of Adam-like training: every slot and value becomes a number made of key, column and step.
void Train(Live& table, const Keys& keys, float mark) {
  const size_t dim = static_cast<size_t>(table.spec().dim);
  const auto ids = table.Open(keys, std::vector<int32_t>(keys.size(), 1), Adam(dim));
  Chunk c = Gather(table, ids);
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t d = 0; d < dim; ++d)
      c.values[i * dim + d] = c.mu[i * dim + d] = mark + static_cast<float>(i * dim + d);
    c.nu[i] = -mark - static_cast<float>(i);
    c.flag[i] = 1;
  }
  Scatter(table, ids, c);
}

/// One step of an optimizer without slots.
void TrainSgd(Live& table, const Keys& keys) {
  const auto ids = table.Open(keys, std::vector<int32_t>(keys.size(), 1));
  const Floats values(keys.size() * static_cast<size_t>(table.spec().dim), 0.5f);
  table.Scatter(kvjax::Serial, table.token, ids.data(), ids.size(), data::Bytes(values), {}, true);
}

TEST(SlotsComeBackAsTheyWereWritten) {
  Live table(5);
  CHECK_EQ(Adam(5).stride(), 28u);
  Train(table, {1, 2, 3}, 100);
  const Chunk c = Gather(table, table.Open({3, 9, 1}, {1, 1, 1}, Adam(5)));
  CHECK(c.fresh == std::vector<uint8_t>({0, 1, 0}));
  CHECK(c.flag == std::vector<uint8_t>({1, 0, 1}));
  CHECK(c.nu == Floats({-102, 0, -100}));
  CHECK(Floats(c.mu.begin(), c.mu.begin() + 5) == Floats({110, 111, 112, 113, 114}));
}

TEST(ReusedRowsHaveFreshSlots) {
  Live table(2);
  Train(table, {1, 2}, 100);
  table.Drop({1});
  CHECK_EQ(Gather(table, table.Open({50}, {1}, Adam(2))).fresh[0], 1);
}

TEST(AnUnlikeLayoutIsRefused) {
  Live table(2);
  Train(table, {1, 2}, 100);
  const Snapshot before = table.Copy();
  kvjax::SlotLayout other;
  other.Add("accumulator", "float32[2]", 8);
  CHECK_THROWS(kFailedPrecondition, table.Begin({3}, {1}, other));
  CHECK(data::Same(before, table.Copy()));
  TrainSgd(table, {1});  // an optimizer without slots leaves them alone
  CHECK_EQ(Gather(table, table.Open({1}, {1}, Adam(2))).nu[0], -100.0f);
  table.ClearSlots(table.version());
  CHECK(table.Copy().layout.empty());
  table.Begin({3}, {1}, other);
  CHECK(table.Copy().layout == other);
}

TEST(RowsOfAnOptimizerWithoutSlotsStayFresh) {
  Live table(2);
  TrainSgd(table, {1});
  CHECK_EQ(Gather(table, table.Open({1}, {1}, Adam(2))).fresh[0], 1);  // before any slots
  Train(table, {2}, 100);
  table.Drop({2});
  TrainSgd(table, {3});  // takes the row that key 2 had
  CHECK_EQ(Gather(table, table.Open({3}, {1}, Adam(2))).fresh[0], 1);
}

TEST(SlotsWithoutElementsAreHarmless) {
  Live table(2);
  kvjax::SlotLayout layout;
  layout.Add("empty", "float32[0]", 0);
  const auto ids = table.Open({1}, {1}, layout);
  Floats values(2);
  std::byte slot;
  bool fresh;
  table.Gather(kvjax::Serial, table.token, ids.data(), 1, reinterpret_cast<std::byte*>(values.data()), &fresh,
               {&slot});
  table.Scatter(kvjax::Serial, table.token, ids.data(), 1, data::Bytes(values), {&slot}, true);
  const Snapshot s = table.Copy();
  CHECK_EQ(s.slots.size(), 1u);
  table.Restore(data::View(s));
  CHECK(data::Same(s, table.Copy()));
}

TEST(ExportIsSortedAndComplete) {
  Live table(2);
  Keys keys = data::kAwkward;
  data::Stream stream(3);
  while (keys.size() < 3000) keys.push_back(stream.Next());  // some 60 of them share a bucket
  table.Ensure(keys);
  const Snapshot s = table.Copy(false);
  CHECK_EQ(s.keys.size(), table.Size(table.version()));
  CHECK_EQ(s.offsets.size(), kvjax::kNumBuckets + 1u);
  for (size_t i = 0; i + 1 < s.keys.size(); ++i) {
    const auto a = kvjax::BucketOf(static_cast<uint64_t>(s.keys[i]));
    const auto b = kvjax::BucketOf(static_cast<uint64_t>(s.keys[i + 1]));
    CHECK(a < b || (a == b && s.keys[i] < s.keys[i + 1]));
  }
  for (size_t i = 0; i < s.keys.size(); ++i) {
    const auto bucket = kvjax::BucketOf(static_cast<uint64_t>(s.keys[i]));
    CHECK(s.offsets[bucket] <= static_cast<int64_t>(i) && static_cast<int64_t>(i) < s.offsets[bucket + 1]);
    const Floats row = table.Rows({static_cast<uint64_t>(s.keys[i])});
    CHECK_EQ(std::memcmp(s.values.data() + i * 8, row.data(), 8), 0);
  }
}

TEST(LoadRestoresWhatExportGave) {
  Live table(3);
  Train(table, data::kAwkward, 100);
  Train(table, {5, 6}, 200);
  table.Drop({5, 0});
  table.Ensure({77});
  table.Put({6, 78}, {1, 2, 3, 4, 5, 6});
  TrainSgd(table, {79, 6});
  for (const bool slots : {true, false}) {
    const Snapshot s = table.Copy(slots);
    Live other(3);
    Train(other, {1, 2, 999}, 500);  // Load replaces all of it
    other.Restore(data::View(s));
    Snapshot back = other.Copy(slots);
    if (!slots) back.has_slots = s.has_slots;  // without slots all rows are fresh
    CHECK(data::Same(s, back));
    other.Begin({1}, {1});
    CHECK_EQ(other.Copy(false).last_step, s.last_step + 1);
    Live empty(3);
    table.Restore(data::View(empty.Copy()));
    CHECK_EQ(table.Size(table.version()), 0u);
    table.Restore(data::View(s));
  }
}

TEST(EqualTablesGiveEqualBytesWhateverTheirPast) {
  Live one(2), two(2);
  Train(two, {8, 9}, 300);
  two.Drop({8, 9});  // their slots must not come back with the rows' next keys
  one.Begin({}, {}, Adam(2), 1);
  for (Live* table : {&one, &two}) {
    table->Ensure({1, 2, 3});
    Train(*table, {2}, 500);
  }
  CHECK(data::Same(one.Copy(), two.Copy()));
}

/// Of a table whose rows are all in one slab.
bool Wide(const Live& table) {
  return table.Observe([](const kvjax::Contents& c) {
    const size_t bytes = c.store.header_bytes();
    const size_t page = kvjax::PageBytes();
    CHECK(bytes == page || bytes == 2 * page);  // a page of each plane
    return bytes == 2 * page;
  });
}

TEST(HeadersTakeEightBytesUntilANumberDoesNotFit) {
  constexpr int64_t kSecond = int64_t{UINT32_MAX}, kOften = int64_t{1} << 29;
  const auto often = static_cast<int32_t>(kOften - 1);
  // By training: a key that occurs often, or a step that is late.
  Live table(2);
  table.Begin({1, 2}, {often, 1}, {}, kSecond);
  CHECK(!Wide(table));
  table.Begin({1, 3}, {often, 1}, {}, kSecond);  // the first comes near the end
  CHECK(!Wide(table) && table.Of(1) == Live::Info({true, 2 * kOften - 2, kSecond}));
  table.Pin({1, 2});
  table.Begin({1}, {5}, {}, kSecond);
  CHECK(Wide(table) && table.Of(1) == Live::Info({true, 2 * kOften + 3, kSecond, true}));
  CHECK(table.Of(2) == Live::Info({true, 1, kSecond, true}) && table.Of(3) == Live::Info({true, 1, kSecond}));
  table.Train({4, 3}, kSecond + 1);
  CHECK(table.Of(3) == Live::Info({true, 2, kSecond + 1}) &&
        table.Of(4) == Live::Info({true, 1, kSecond + 1}));
  table.Put({2}, {7, 7});  // by hand
  CHECK(table.Of(2) == Live::Info({true, 1, kSecond + 1, true}));
  table.Train({2}, INT64_MAX);
  const Snapshot all = table.Copy();
  CHECK(all.pinned[0] == std::byte{1} && all.pinned[2] == std::byte{0});
  table.Unpin(table.version(), data::Span({1, 2}));
  table.Drop({1, 2});  // of which nothing is left when their rows have other keys
  table.Ensure({8, 9});
  CHECK(table.Of(8) == Live::Info({true, 0, INT64_MAX}) && table.Of(9) == Live::Info({true, 0, INT64_MAX}));
  table.Clear(table.version());
  table.Train({1}, 0);
  CHECK(!Wide(table) && table.Of(1) == Live::Info({true, 1, 0}));
  Live late(2);
  late.Train({1}, kSecond + 1);
  CHECK(Wide(late) && late.Of(1) == Live::Info({true, 1, kSecond + 1}));
  Live at_once(2);
  at_once.Begin({1}, {INT32_MAX});
  CHECK(Wide(at_once) && at_once.Of(1).frequency == INT32_MAX);

  // By a restore, also of a last step alone, from which rows are written by hand.
  Live restored(2);
  restored.Restore(data::View(all));
  CHECK(Wide(restored) && data::Same(restored.Copy(), all));
  for (const int64_t number : {int64_t{0}, int64_t{1}, kOften - 1, kOften, 2 * kOften, kSecond, kSecond + 1,
                               INT64_MAX / 2, INT64_MAX}) {
    Snapshot s = all;
    const int64_t frequency = std::min(number, int64_t{kvjax::kMaxFrequency});
    s.last_step = number;
    std::fill(s.frequencies.begin(), s.frequencies.end(), 3);
    std::fill(s.versions.begin(), s.versions.end(), 0);
    const auto restore = [&] {
      restored.Restore(data::View(s));
      CHECK(data::Same(restored.Copy(), s));
    };
    restore();
    CHECK_EQ(Wide(restored), s.last_step > kSecond);
    restored.Put({2, 77}, {1, 1, 1, 1});
    CHECK(restored.Of(2).version == s.last_step && restored.Of(77).version == s.last_step);
    s.last_step = 0;
    s.frequencies[1] = frequency;
    restore();
    CHECK_EQ(Wide(restored), frequency >= kOften);
    s.frequencies[1] = 3, s.versions[1] = s.last_step = number;
    restore();
    CHECK_EQ(Wide(restored), number > kSecond);
  }

  // By a count of a key that has waited.
  kvjax::TableSpec spec = data::Spec(2);
  spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = kvjax::kNoRow - 1};
  Live waiting(spec);
  for (int i = 0; i < 3; ++i) waiting.Begin({5, 6}, {often, 1});
  waiting.Put({6}, {1, 1});
  CHECK(!Wide(waiting));
  waiting.Put({5}, {1, 1});
  CHECK(Wide(waiting) && waiting.Of(5).frequency == 3 * (kOften - 1) && waiting.Of(6).frequency == 3);
}

TEST(WideHeadersGrowAndMoveWithTheirRows) {
  Live table(1);
  table.Train({0}, int64_t{1} << 40);
  Keys keys(300'000), rest;  // more than a slab of headers
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = i;
    if (i % 7 == 0) rest.push_back(i);
  }
  table.Train(keys, int64_t{1} << 41);
  table.Train(rest, int64_t{1} << 42);
  table.Evict("why\nmax_age:1");  // so few are left that they move together
  CHECK_EQ(table.Observe([](const kvjax::Contents& c) { return c.store.end_row(); }), rest.size());
  for (const uint64_t key : rest)
    CHECK(table.Of(key) == Live::Info({true, key == 0 ? 3 : 2, int64_t{1} << 42}));
}

TEST(LoadsAreRefusedAndChangeNothing) {
  Live table(2);
  Train(table, {1, 2}, 100);
  const Snapshot before = table.Copy();
  const auto refused = [&](auto spoil) {
    Snapshot bad = before;
    spoil(bad);
    CHECK_THROWS(kInvalidArgument, table.Restore(data::View(bad)));
    CHECK(data::Same(before, table.Copy()));
  };
  refused([](Snapshot& s) { s.keys[1] = s.keys[0]; });
  refused([](Snapshot& s) { s.frequencies[1] = -1; });
  refused([](Snapshot& s) { s.last_step = -1; });
  refused([](Snapshot& s) { s.versions[1] = -1; });
  refused([](Snapshot& s) { s.versions[1] = s.last_step + 1; });
}

}  // namespace cpu_slots
