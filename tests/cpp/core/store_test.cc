// RowStore against a map: rows are made, erased and moved together.
#include "kvjax/ffi/core/store.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/load.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_store {

using kvjax::kNoRow;
using kvjax::RowHeader;
using kvjax::RowStore;

constexpr size_t kRow = 520, kSlot = 260;  // 4032 values to a slab: some thousand rows fill several

kvjax::SlotLayout Layout() {
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[65]", kSlot);
  return layout;
}

/// Host memory of which all that is reserved counts, written or not.
class Reserved final : public kvjax::SlabAllocator {
 public:
  std::byte* Allocate(size_t bytes) override { return slabs_.Allocate(bytes); }
  void Free(std::byte* slab, size_t bytes) noexcept override { slabs_.Free(slab, bytes); }

 private:
  kvjax::HostSlabs slabs_;
};

/// A store whose rows hold a mark in every part, and what they should hold.
class Marked {
 public:
  explicit Marked(bool slots) : store(std::make_shared<Reserved>(), kRow) {
    if (slots) store.AttachSlots(Layout());
  }

  void Insert(uint64_t key) {
    if (marks.contains(key)) return;
    store.Reserve(1);
    const uint32_t row = store.FreeRow(0);
    CHECK_EQ(store.Insert(key), row);
    const uint64_t mark = marks[key] = ++count_;
    for (const size_t at : {size_t{0}, kRow - 8}) std::memcpy(store.Value(row) + at, &mark, 8);
    store.Widen(mark, -static_cast<int64_t>(mark));
    store.SetHeader(
        row, {.frequency = mark, .pinned = mark & 1, .has_slots = 0, .version = -static_cast<int64_t>(mark)});
    if (!store.layout().empty()) std::memcpy(store.Slots(row) + kSlot - 8, &mark, 8);
  }
  void Erase(uint64_t key) {
    store.ReserveErase(1);
    CHECK_EQ(store.Erase(key), marks.erase(key) == 1);
  }
  void Check() const {
    CHECK_EQ(store.size(), marks.size());
    std::set<uint32_t> rows;
    for (const auto& [key, mark] : marks) {
      const uint32_t row = store.index().Find(key);
      CHECK(row < store.end_row() && rows.insert(row).second);
      if (row >= store.end_row()) continue;
      for (const size_t at : {size_t{0}, kRow - 8}) CHECK_EQ(std::memcmp(store.Value(row) + at, &mark, 8), 0);
      const RowHeader header = store.Header(row);
      CHECK_EQ(uint64_t{header.frequency}, mark);
      CHECK_EQ(uint64_t{header.pinned}, mark & 1);
      CHECK_EQ(header.version, -static_cast<int64_t>(mark));
      if (!store.layout().empty()) CHECK_EQ(std::memcmp(store.Slots(row) + kSlot - 8, &mark, 8), 0);
    }
    // The ids that come next are free.
    for (size_t i = 0; i < 3; ++i) CHECK(!rows.contains(store.FreeRow(i)));
  }
  [[nodiscard]] size_t bytes() const {
    return store.value_bytes() + store.header_bytes() + store.slot_bytes() + store.index().bytes();
  }

  RowStore store;
  std::map<uint64_t, uint64_t> marks;

 private:
  uint64_t count_ = 0;
};

TEST(RandomRowsComeGoAndMove) {
  for (const bool slots : {false, true}) {
    data::Stream stream(slots);
    Marked marked(slots);
    int moves = 0;
    for (int round = 0; round < 12; ++round) {
      // Grows to some 12,000 rows, then shrinks to few or to none.
      const bool grows = round % 2 == 0;
      const uint64_t universe = 20'000;
      for (int i = 0; i < 9000; ++i) {
        const uint64_t key = stream.Below(universe) << (stream.Below(2) * 40);
        grows ? marked.Insert(key) : marked.Erase(key);
      }
      if (!grows) {
        const size_t keep = round % 4 == 1 ? 700 : 0;
        while (marked.marks.size() > keep) marked.Erase(marked.marks.rbegin()->first);
      }
      const size_t bytes = marked.bytes();
      const bool moved = marked.store.Compact();
      marked.Check();
      moves += moved;
      CHECK_EQ(moved, !grows);
      if (moved) {
        CHECK_EQ(marked.store.end_row(), marked.marks.size());
        CHECK(marked.bytes() < bytes);
        CHECK(!marked.store.Compact());
      }
    }
    CHECK_EQ(moves, 6);
    CHECK(marked.bytes() < 4096);  // nothing is left but the smallest index
  }
}

TEST(CompactWaitsUntilItIsWorthIt) {
  Marked marked(true);
  for (uint64_t key = 0; key < 1000; ++key) marked.Insert(key);
  for (uint64_t key = 0; key < 999; ++key) marked.Erase(key);
  CHECK(!marked.store.Compact());  // a small table
  for (uint64_t key = 0; key < 2000; ++key) marked.Insert(key);
  for (uint64_t key = 0; key < 999; ++key) marked.Erase(key);
  CHECK(!marked.store.Compact());  // more than half are left
  marked.Erase(1999);
  marked.Erase(1998);
  CHECK(marked.store.Compact());
  marked.Check();
}

TEST(CompactLeavesWhatWasReserved) {
  Marked marked(true);
  marked.store.Widen(1, -1);  // as its marks want it
  marked.store.ReserveInAll(9000);
  const size_t reserved = marked.bytes();
  for (uint64_t key = 0; key < 20'000; ++key) marked.Insert(key);
  for (uint64_t key = 0; key < 9'000; ++key) marked.Erase(key);
  CHECK(!marked.store.Compact());
  for (uint64_t key = 9'000; key < 19'000; ++key) marked.Erase(key);
  CHECK(marked.store.Compact());
  CHECK_EQ(marked.store.end_row(), 1000u);
  CHECK_EQ(marked.bytes(), reserved);
  marked.Check();
  for (uint64_t key = 0; key < 8000; ++key) marked.Insert(key);
  CHECK_EQ(marked.bytes(), reserved);  // 9000 rows need no more
  CHECK(!marked.store.Compact());
  for (uint64_t key = 0; key < 8000; ++key) marked.Erase(key);
  CHECK(!marked.store.Compact());  // there is nothing to give back
  marked.Check();
}

TEST(WhatWasReservedOutlivesTheRows) {
  data::Live table(1);
  table.Reserve(table.version(), 9000);
  const auto end = [&] { return table.Observe([](const kvjax::Contents& c) { return c.store.end_row(); }); };
  const auto fill_and_thin = [&] {
    data::Keys keys(8000);
    std::iota(keys.begin(), keys.end(), uint64_t{0});
    table.Ensure(keys);
    keys.pop_back();
    table.Drop(keys);
  };
  fill_and_thin();
  CHECK_EQ(end(), 8000u);  // the space stays, so nothing moves
  table.Clear(table.version());
  fill_and_thin();
  CHECK_EQ(end(), 8000u);
  table.Restore(data::View(table.Copy()));
  fill_and_thin();
  CHECK(end() >= 8000u);
}

TEST(FreeRowsArePromisedInTheOrderOfInsertion) {
  Marked marked(false);
  for (uint64_t key = 0; key < 10; ++key) marked.Insert(key);
  for (const uint64_t key : {7, 2, 5}) marked.Erase(key);
  marked.store.Reserve(6);
  std::vector<uint32_t> promised;
  for (size_t i = 0; i < 6; ++i) promised.push_back(marked.store.FreeRow(i));
  CHECK(promised == std::vector<uint32_t>({5, 2, 7, 10, 11, 12}));
  CHECK_EQ(marked.store.Insert(100), 5u);
  const uint64_t keys[] = {101, 102, 103, 104, uint64_t{1} << 40, 106};
  const uint32_t rows[] = {2, kvjax::kNoRow, 7, 10, kvjax::kNoRow, 11};
  CHECK_EQ(marked.store.Insert(keys, rows, 6), 4u);
  CHECK(!marked.store.wide());  // that key has got no row
  for (size_t i = 0; i < 6; ++i) CHECK_EQ(marked.store.index().Find(keys[i]), rows[i]);
  CHECK_EQ(marked.store.Insert(uint64_t{1} << 40), 12u);
  CHECK(marked.store.wide());
}

TEST(SlotsAreAttachedAndDetached) {
  Marked marked(false);
  for (uint64_t key = 0; key < 20; ++key) marked.Insert(key);
  CHECK(marked.store.Slots(3) == nullptr);
  marked.store.AttachSlots({});
  CHECK(marked.store.layout().empty());
  marked.store.AttachSlots(Layout());
  CHECK(marked.store.layout() == Layout() && marked.store.slot_bytes() > 0);
  for (uint32_t row = 0; row < 20; ++row) CHECK(marked.store.Slots(row)[kSlot - 1] == std::byte{0});
  marked.store.ChangeHeader(3, [](RowHeader& header) { header.has_slots = 1; });
  marked.store.DetachSlots();
  CHECK_EQ(uint64_t{marked.store.Header(3).has_slots}, 0u);
  CHECK_EQ(marked.store.slot_bytes(), 0u);
  marked.Check();
  const RowStore empty = marked.store.Empty();
  CHECK_EQ(empty.size() + empty.value_bytes() + empty.end_row(), 0u);
}

/// A load whose keys come in these parts: the part and the position of the first key that comes twice, if
/// any.
std::optional<std::pair<size_t, size_t>> FirstTwice(const std::vector<std::vector<uint64_t>>& parts,
                                                    size_t row_bytes = 8) {
  RowStore store(std::make_shared<kvjax::HostSlabs>(), row_bytes);
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[2]", 8);
  kvjax::StoreFill fill;
  kvjax::StoreFill::Begin(store, {.rows = 3000, .layout = layout, .last_step = 1});
  size_t loaded = 0;
  for (const auto& keys : parts) {
    const size_t n = keys.size();
    kvjax::Snapshot rows;
    rows.layout = layout;
    rows.Resize(n, row_bytes);
    for (size_t i = 0; i < n; ++i) {
      rows.keys[i] = static_cast<int64_t>(keys[i]);
      rows.frequencies[i] = rows.versions[i] = static_cast<int64_t>(keys[i] >> 4);
      std::memcpy(rows.values.data() + (i + 1) * row_bytes - 8, &keys[i], 8);
      std::memcpy(rows.slots[0].data() + i * 8, &keys[i], 8);
    }
    const size_t added = fill.Add(store, data::View(rows), row_bytes);
    if (added < n) return std::pair(static_cast<size_t>(&keys - parts.data()), added);
    loaded += n;
  }
  CHECK_EQ(store.size(), loaded);
  for (const auto& keys : parts) {
    for (const uint64_t key : keys) {
      const uint32_t row = store.index().Find(key);
      CHECK(row < store.end_row());
      if (row >= store.end_row()) continue;
      CHECK_EQ(std::memcmp(store.Value(row) + row_bytes - 8, &key, 8), 0);
      CHECK_EQ(std::memcmp(store.Slots(row), &key, 8), 0);
      CHECK_EQ(uint64_t{store.Header(row).frequency}, key >> 4);
      CHECK_EQ(store.Header(row).version, static_cast<int64_t>(key >> 4));
    }
  }
  return std::nullopt;
}

TEST(ALoadInPartsFindsKeysThatComeTwice) {
  std::vector<uint64_t> keys(3000);
  data::Stream stream(4);
  for (uint64_t& key : keys) key = stream.Next();
  std::sort(keys.begin(), keys.end(), [](uint64_t x, uint64_t y) {  // the order of snapshots
    return std::pair(kvjax::BucketOf(x), static_cast<int64_t>(x)) <
           std::pair(kvjax::BucketOf(y), static_cast<int64_t>(y));
  });
  const auto part = [&](size_t begin, size_t end) {
    return std::vector<uint64_t>(keys.begin() + static_cast<ptrdiff_t>(begin),
                                 keys.begin() + static_cast<ptrdiff_t>(end));
  };
  const auto at = [](size_t part, size_t i) { return std::optional(std::pair(part, i)); };
  CHECK(!FirstTwice({part(0, 1500), {}, part(1500, 3000)}));
  CHECK(!FirstTwice({keys}, kvjax::kStreamFrom / 2048));  // rows that go past the caches
  CHECK(!FirstTwice({part(1500, 3000), part(0, 1500)}));
  auto mixed = part(0, 1500);
  std::swap(mixed[3], mixed[1400]);
  CHECK(!FirstTwice({mixed, part(1500, 3000)}));
  // Parts that are in order, and begin with the last key or with the first one of those before.
  CHECK(FirstTwice({part(0, 1000), part(999, 2000)}) == at(1, 0));
  CHECK(FirstTwice({part(500, 1500), part(0, 1000)}) == at(1, 500));
  // The same key next to itself, and far from itself.
  auto twice = part(0, 2000);
  twice[1300] = twice[1299];
  CHECK(FirstTwice({twice}) == at(0, 1300));
  twice = part(1000, 2000);
  twice[900] = keys[7];
  CHECK(FirstTwice({part(0, 1000), twice}) == at(1, 900));
}

TEST(MemoryOfATableFallsWithItsRows) {
  data::Live table(64);
  data::Keys keys;
  for (uint64_t key = 0; key < 60'000; ++key) keys.push_back(key * 7919);
  const auto bytes = [&] {
    return table.Observe([](const kvjax::Contents& c) {
      return c.store.value_bytes() + c.store.header_bytes() + c.store.slot_bytes() + c.store.index().bytes();
    });
  };
  table.Ensure(keys);
  const data::Floats row = table.Rows({keys[3]});
  const size_t full = bytes();
  table.Evict("restrict\nleast_recent:-3000");
  CHECK(bytes() < full / 4);
  const size_t few = bytes();
  table.Ensure(keys);
  CHECK_EQ(bytes(), full);
  CHECK(table.Rows({keys[3]}) == row);  // the initial row of a key is one for ever
  table.Drop(keys);
  CHECK(bytes() < few);
  table.Ensure(keys);
  CHECK(table.Rows({keys[3]}) == row);
  // Training compacts as well: all that is not in the batch is evicted.
  kvjax::TableSpec spec = data::Spec(64);
  spec.policy = kvjax::Policy::Parse("all\nmax_age:0");
  spec.evict_every = 2;
  data::Live trained(spec);
  trained.Ensure(keys);
  trained.Train({1}, 1);
  const data::Keys last = {keys[50'000], 5, keys[100], 6};
  const auto targets = trained.Open(last, {1, 1, 1, 1}, {}, 2);
  data::Floats values(4 * 64);
  const auto fresh = std::make_unique<bool[]>(4);
  trained.Gather(kvjax::Serial, trained.token, targets.data(), 4, reinterpret_cast<std::byte*>(values.data()),
                 fresh.get(), {});
  trained.End();
  CHECK_EQ(trained.Size(trained.version()), 4u);
  CHECK(values == trained.Rows(last));
}

}  // namespace core_store
