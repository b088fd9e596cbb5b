// Full tables, eviction by the step, and the sink that is given evicted rows.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_capacity {

using data::Floats;
using data::Keys;
using data::Live;
using data::State;
using kvjax::OnFull;
using kvjax::Snapshot;
using Set = std::set<uint64_t>;

kvjax::TableSpec Spec(size_t max_capacity, OnFull on_full, const std::string& policy = "",
                      int64_t every = 0) {
  kvjax::TableSpec spec = data::Spec(2);
  spec.max_capacity = max_capacity;
  spec.on_full = on_full;
  spec.policy = kvjax::Policy::Parse(policy);
  spec.evict_every = every;
  return spec;
}

uint64_t Evicted(const Live& table, const std::string& reason) {
  return table.Observe([&](const kvjax::Contents& c) {
    const auto found = c.counters.evicted.find(reason);
    return found == c.counters.evicted.end() ? 0 : found->second;
  });
}

Keys RandomBatch(data::Stream& stream, uint64_t keys, uint64_t most) {
  Set batch;
  for (uint64_t n = stream.Below(most + 1); n > 0; --n) batch.insert(stream.Below(keys));
  return {batch.begin(), batch.end()};
}

TEST(AFullTableKeepsTheMostRecentRowsAndTheBatch) {
  constexpr size_t kMost = 40;
  data::Stream stream(1);
  Live table(Spec(kMost, OnFull::kEvict));
  table.Pin({1000, 1001});
  std::map<uint64_t, int64_t> rows = {{1000, 0}, {1001, 0}};  // key, version
  uint64_t evicted = 0;
  for (int64_t step = 1; step <= 200; ++step) {
    const Keys batch = RandomBatch(stream, 200, 30);
    const bool trains = stream.Below(4) != 0;
    const Set in_batch(batch.begin(), batch.end());
    std::vector<std::tuple<int64_t, uint64_t, uint64_t>> order;  // of those that may be evicted
    for (const auto& [key, version] : rows) {
      if (key < 1000 && !in_batch.contains(key)) order.emplace_back(version, kvjax::Mix(key), key);
    }
    std::sort(order.begin(), order.end());
    for (const uint64_t key : batch) rows.try_emplace(key, step - 1);
    for (size_t i = 0; rows.size() > kMost; ++i, ++evicted) rows.erase(std::get<2>(order[i]));
    if (trains) {
      table.Train(batch, step);
      for (const uint64_t key : batch) rows[key] = step;
    } else {
      table.Ensure(batch);
      table.Train({}, step);
    }
    Set want;
    for (const auto& [key, version] : rows) want.insert(key);
    CHECK(table.KeySet() == want);
  }
  CHECK(table.Size(table.version()) == kMost && evicted > 100);
  CHECK_EQ(Evicted(table, "capacity"), evicted);
}

TEST(TheTablesPolicyComesFirst) {
  // The policy chooses two rows, and the least recent one makes up what lacks.
  Live table(Spec(6, OnFull::kEvict, "rare\nmin_frequency:2"));
  table.Begin({1, 2, 3, 4, 5, 6}, {9, 1, 9, 9, 1, 9});
  table.Train({1}, 5);
  table.Train({7, 8, 9}, 6);
  CHECK_EQ(table.Size(table.version()), 6u);
  CHECK(!table.Of(2).found && !table.Of(5).found && table.Of(1).found);
  CHECK_EQ(Evicted(table, "rare"), 2u);
  CHECK_EQ(Evicted(table, "capacity"), 1u);
  // It may take more than is needed: space for the rows to come.
  Live bulk(Spec(6, OnFull::kEvict, "bulk\nleast_frequent:4:0"));
  bulk.Begin({1, 2, 3, 4, 5, 6}, {9, 8, 7, 6, 5, 4});
  bulk.Train({7});
  CHECK(bulk.KeySet() == Set({1, 2, 7}));
  // "needed" takes exactly that.
  Live lfu(Spec(6, OnFull::kEvict, "lfu\nleast_frequent:needed:0"));
  lfu.Begin({1, 2, 3, 4, 5, 6}, {9, 8, 7, 6, 5, 4});
  lfu.Train({7, 8});
  CHECK(lfu.KeySet() == Set({1, 2, 3, 4, 7, 8}));
}

TEST(WhatCannotGoIsAnErrorThatChangesNothing) {
  Live table(Spec(5, OnFull::kEvict, "all\nmax_age:0"));
  table.Train({1, 2, 3, 4, 5});
  table.Pin({1, 2});
  const State before(table);
  CHECK_THROWS(kResourceExhausted, table.Train({10, 11, 12, 13}, 9));        // pinned rows stay
  CHECK_THROWS(kResourceExhausted, table.Train({3, 4, 10, 11}, 9));          // so do those of the batch
  CHECK_THROWS(kResourceExhausted, table.Ensure({10, 11, 12, 13, 14, 15}));  // more than fit at all
  CHECK_THROWS(kResourceExhausted, table.Pin({10, 11, 12, 13}));
  CHECK(data::Same(before, State(table)));
  table.Unpin(table.version(), data::Span({1}));
  table.Train({10, 11, 12, 13}, 9);
  CHECK(table.KeySet() == Set({2, 10, 11, 12, 13}));
}

TEST(OnFullErrorChangesNothing) {
  Live table(Spec(4, OnFull::kError));
  table.Begin({1, 2, 3}, {1, 1, 1});
  const State before(table);
  const bool no[] = {false, false};
  const Floats rows(4, 1.0f);
  CHECK_THROWS(kResourceExhausted, table.Train({4, 5}));
  CHECK_THROWS(kResourceExhausted, table.Ensure({4, 5}));
  CHECK_THROWS(kResourceExhausted, table.Put({4, 5}, rows));
  CHECK_THROWS(kResourceExhausted, table.Pin({4, 5}));
  CHECK_THROWS(kResourceExhausted,
               table.Add(kvjax::Serial, table.version(), data::Span({4, 5}), rows.data(), {}));
  CHECK_THROWS(kResourceExhausted,
               table.Accum(kvjax::Serial, table.version(), data::Span({4, 5}), rows.data(), rows.data(), no));
  CHECK(data::Same(before, State(table)));
  table.Train({1, 2, 3, 4});
  table.Put({4, 4}, rows);
  table.Train({4, 3});
  CHECK_EQ(table.Size(table.version()), 4u);

  Live large(2);
  large.Ensure({1, 2, 3, 4, 5});
  for (const OnFull on_full : {OnFull::kError, OnFull::kEvict}) {
    Live small(Spec(4, on_full));
    const Snapshot s = large.Copy();
    CHECK_THROWS(kResourceExhausted, small.Restore(data::View(s)));
  }
  kvjax::SnapshotView endless;
  endless.n = kvjax::kNoRow;
  CHECK_THROWS(kResourceExhausted, large.Restore(endless));
}

TEST(OnFullGrowCounts) {
  Live table(Spec(4, OnFull::kGrow));
  const auto over = [&] {
    return table.Observe([](const kvjax::Contents& c) { return c.counters.over_capacity; });
  };
  table.Train({1, 2, 3});
  CHECK_EQ(over(), 0u);
  table.Train({3, 4, 5, 6});
  CHECK_EQ(over(), 2u);
  table.Train({1, 2});
  CHECK_EQ(over(), 2u);
  table.Ensure({7, 8, 1});
  CHECK_EQ(over(), 4u);
  CHECK_EQ(table.Size(table.version()), 8u);
}

TEST(TheTimeHasComeWhenTheStepPassesAMultiple) {
  Live table(Spec(0, OnFull::kGrow, "old\nmax_age:2", 10));
  const auto train = [&](uint64_t key, int64_t step) {
    const uint64_t before = Evicted(table, "old");
    table.Train({key}, step);
    return Evicted(table, "old") - before;
  };
  CHECK_EQ(train(1, 1), 0u);
  CHECK_EQ(train(2, 2), 0u);
  CHECK_EQ(train(3, 9), 0u);
  CHECK_EQ(train(4, 10), 2u);
  CHECK_EQ(train(5, 10), 0u);  // passed already
  CHECK_EQ(train(6, 19), 0u);
  CHECK_EQ(train(7, 5), 3u);   // counts as step 20: a lower one turns nothing back; 3, 4, 5
  CHECK_EQ(train(8, 47), 2u);  // several multiples at once; 6, 7
  CHECK_EQ(train(9, 49), 0u);
  table.Ensure({20});  // only training counts
  table.Evict("none\nmax_age:5000", 1000);
  CHECK_EQ(train(8, 50), 0u);  // 8 is in the batch; 9 and 20 are young
  CHECK_EQ(train(8, 60), 2u);
  CHECK(table.KeySet() == Set{8});
  table.Restore(data::View(table.Copy()));
  CHECK_EQ(train(10, 61), 0u);  // the restored table knows its step
}

kvjax::SlotLayout Layout() {
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[3]", 12);
  return layout;
}

TEST(TheSinkGetsWhatGoesBeforeItGoes) {
  data::Stream stream(3);
  Live table(Spec(50, OnFull::kEvict, "rare\nmin_frequency:2\nold\nmax_age:9", 7));
  std::vector<Snapshot> given;
  table.SetSink([&](const Snapshot& s, std::string_view) { given.push_back(s); });
  for (int step = 1; step <= 60; ++step) {
    const Keys batch = RandomBatch(stream, 150, 25);
    const Snapshot before = table.Copy();
    given.clear();
    const auto targets = table.Open(batch, std::vector<int32_t>(batch.size(), 1), Layout());
    Floats values(2 * batch.size()), slot(3 * batch.size());
    for (float& x : values) x = static_cast<float>(stream.Below(100));
    for (float& x : slot) x = static_cast<float>(stream.Below(100));
    table.Scatter(kvjax::Serial, table.token, targets.data(), targets.size(), data::Bytes(values),
                  {data::Bytes(slot)}, true);
    const Set left = table.KeySet();
    std::map<int64_t, size_t> evicted;  // key, position in `before`
    for (size_t i = 0; i < before.keys.size(); ++i) {
      if (!left.contains(static_cast<uint64_t>(before.keys[i]))) evicted[before.keys[i]] = i;
    }
    for (const Snapshot& s : given) {
      CHECK(!s.keys.empty() && s.layout == Layout());
      for (size_t i = 0; i < s.keys.size(); ++i) {
        if (i > 0) {
          const auto rank = [&](size_t j) {
            return std::pair(kvjax::BucketOf(static_cast<uint64_t>(s.keys[j])), s.keys[j]);
          };
          CHECK(rank(i - 1) < rank(i));
        }
        const auto found = evicted.find(s.keys[i]);
        CHECK(found != evicted.end());  // once
        if (found == evicted.end()) continue;
        const size_t j = found->second;
        evicted.erase(found);
        CHECK_EQ(s.frequencies[i], before.frequencies[j]);
        CHECK_EQ(s.versions[i], before.versions[j]);
        CHECK(s.has_slots[i] == before.has_slots[j]);
        CHECK_EQ(std::memcmp(s.values.data() + 8 * i, before.values.data() + 8 * j, 8), 0);
        CHECK_EQ(std::memcmp(s.slots[0].data() + 12 * i, before.slots[0].data() + 12 * j, 12), 0);
      }
    }
    CHECK(evicted.empty());
  }
}

TEST(ManyRowsGoToTheSinkInBatches) {
  constexpr size_t kMost = 65'536;
  Live table(1);
  Keys keys(2 * kMost + 100);
  std::iota(keys.begin(), keys.end(), uint64_t{1} << 40);
  table.Put(keys, Floats(keys.size(), 2.0f));
  const uint32_t version = table.version();
  Keys given;
  std::vector<size_t> sizes;
  size_t fails_at = 2;
  // The rows are the sink's own, to keep without a copy.
  table.SetSink([&](Snapshot s, std::string_view reason) {
    if (sizes.size() + 1 == fails_at) throw std::runtime_error("the disk is full");
    sizes.push_back(s.keys.size());
    CHECK(reason == "all" && s.values.size() == 4 * s.keys.size());
    given.insert(given.end(), s.keys.begin(), s.keys.end());
  });
  bool failed = false;
  try {
    table.Evict("all\nleast_recent:-0");
  } catch (const std::runtime_error&) {
    failed = true;
  }
  CHECK(failed && sizes.size() == 1);  // a batch was given, and nothing has been evicted
  CHECK(table.version() == version && table.Size(version) == keys.size());
  fails_at = 0;
  sizes.clear();
  given.clear();
  table.Evict("all\nleast_recent:-0");
  CHECK(sizes == std::vector<size_t>({kMost, kMost, 100}));
  CHECK(std::is_sorted(given.begin(), given.end(), [](uint64_t a, uint64_t b) {  // over all batches
    return std::pair(kvjax::BucketOf(a), a) < std::pair(kvjax::BucketOf(b), b);
  }));
  std::sort(given.begin(), given.end());
  CHECK(given == keys);
  CHECK_EQ(table.Size(table.version()), 0u);
}

TEST(ASinkThatThrowsLeavesEverythingAsItWas) {
  for (const bool slots : {false, true}) {
    auto spec = Spec(30, OnFull::kEvict, "old\nmax_age:2\nrare\nmin_frequency:2", 2);
    spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 2};
    Live table(spec);
    Keys keys;
    for (uint64_t key = 0; key < 30; ++key) keys.push_back(key);
    table.Begin(keys, std::vector<int32_t>(30, 2), slots ? Layout() : kvjax::SlotLayout{});
    table.Begin({5, 40, 41}, {3, 1, 1}, {}, 3);
    const State before(table);
    int calls = 0;
    bool fails = true;
    table.SetSink([&](const Snapshot&, std::string_view) {
      ++calls;
      if (fails) throw std::runtime_error("the disk is full");
    });
    const uint32_t version = table.version();
    const auto refuses = [&](auto call) {
      try {
        call();
      } catch (const std::runtime_error&) {
        return data::Same(before, State(table)) && table.version() == version;
      }
      return false;
    };
    const auto train = [&] { table.Begin({40, 41, 50}, {1, 1, 1}, Layout(), 9); };
    CHECK(refuses(train));
    CHECK(refuses([&] { table.Ensure({60}); }));
    CHECK(refuses([&] { table.Evict("all\nleast_recent:-0"); }));
    CHECK_EQ(calls, 3);
    fails = false;
    train();
    CHECK_EQ(calls, 4);
    CHECK(table.KeySet() == Set({40, 41}));  // all others are older than 2 steps
    table.SetSink(nullptr);
    table.Evict("all\nleast_recent:-0");
    CHECK_EQ(calls, 4);
    CHECK(table.KeySet().empty());
  }
}

TEST(CallsFromSinksAndScoresAreErrors) {
  Live table(Spec(3, OnFull::kEvict, "low\nlowest_score:needed:f"));
  const auto calls_back = [&] {
    CHECK_THROWS(kFailedPrecondition, table.Rows({1}));
    CHECK_THROWS(kFailedPrecondition, table.Ensure({1}));
    CHECK_THROWS(kFailedPrecondition, table.Restore({}));
    CHECK_THROWS(kFailedPrecondition, table.Observe([](const kvjax::Contents&) { return 0; }));
    CHECK_THROWS(kFailedPrecondition, table.SetSink(nullptr));
  };
  int calls = 0;
  table.SetScore([&](std::string_view name, const Snapshot& rows, std::vector<double>& out) {
    ++calls;
    CHECK(name == "f" && rows.keys.size() == out.size());
    calls_back();
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(rows.keys[i]);
  });
  table.SetSink([&](const Snapshot&, std::string_view) {
    ++calls;
    calls_back();
  });
  table.Ensure({1, 2, 3});
  CHECK_EQ(calls, 0);
  table.Ensure({4});
  CHECK_EQ(calls, 2);
  CHECK(table.KeySet() == Set({2, 3, 4}));
  // An error from there is passed on, and the table can be called again.
  table.SetSink([&](const Snapshot&, std::string_view) { table.Ensure({1}); });
  CHECK_THROWS(kFailedPrecondition, table.Ensure({5}));
  CHECK(table.KeySet() == Set({2, 3, 4}));
}

}  // namespace cpu_capacity
