// One shard of a sharded table: which shard owns a key, how gradients arrive, and writes that are planned
// before they are done.
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/route.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_sharded {

using data::Floats;
using data::Keys;
using data::Live;
using data::State;
using kvjax::Call;
using kvjax::Phase;
using kvjax::Serial;

constexpr int64_t kDim = 2;

Keys Batch(uint64_t seed, size_t n, uint64_t below) {
  data::Stream stream(seed);
  Keys keys(data::kAwkward.begin(), data::kAwkward.end());
  while (keys.size() < n) keys.push_back(stream.Below(below));
  return keys;
}

TEST(OwnersAreContiguousRangesOfBuckets) {
  for (const uint32_t shards : {1u, 2u, 3u, 8u, 1000u, kvjax::kNumBuckets}) {
    std::vector<uint32_t> keys_of(shards);
    size_t wrong = 0;
    for (uint64_t key = 0; key < 300'000; ++key) {
      const uint32_t owner = kvjax::OwnerOf(key, shards);
      wrong += owner != uint64_t{kvjax::BucketOf(key)} * shards / kvjax::kNumBuckets || owner >= shards;
      ++keys_of[owner];
    }
    CHECK_EQ(wrong, 0u);
    if (shards == 8) {
      for (const uint32_t n : keys_of) CHECK(n > 36'000 && n < 39'000);
    }
  }
}

/// Sends what a route says, round by round, and looks what comes to whom.
void CheckRoute(const Keys& keys, const bool* mask, const std::vector<int32_t>& owners, uint32_t shards,
                int32_t capacity) {
  const size_t n = keys.size();
  Keys sorted(n, 7);
  std::vector<int32_t> order(n, -5), starts(shards + 1, -5), position(n, -5), round(n, -5);
  kvjax::Route("t", data::Span(keys), mask, owners.empty() ? nullptr : owners.data(), shards, capacity,
               {sorted.data(), order.data(), starts.data(), position.data(), round.data()});
  std::map<uint64_t, size_t> first;
  for (size_t i = 0; i < n; ++i) {
    if (mask == nullptr || mask[i]) first.try_emplace(keys[i], i);
  }
  CHECK_EQ(starts[0], 0);
  CHECK_EQ(static_cast<size_t>(starts[shards]), first.size());
  for (uint32_t s = 0; s < shards; ++s) {
    for (int32_t i = starts[s]; i < starts[s + 1]; ++i) {
      const auto at = static_cast<size_t>(i);
      CHECK_EQ(first.at(sorted[at]), static_cast<size_t>(order[at]));
      CHECK_EQ(owners.empty() ? kvjax::OwnerOf(sorted[at], shards)
                              : static_cast<uint32_t>(owners[first.at(sorted[at])]),
               s);
      if (i > starts[s]) CHECK(order[at - 1] < order[at]);  // those of one owner as they came
    }
  }
  for (size_t i = first.size(); i < n; ++i) CHECK(sorted[i] == 0 && order[i] == 0);
  for (size_t i = 0; i < n; ++i) {
    if (mask != nullptr && !mask[i]) {
      CHECK(round[i] == -1 && position[i] == 0);
      continue;
    }
    const int32_t owner = position[i] / capacity, nth = round[i] * capacity + position[i] % capacity;
    CHECK_EQ(sorted[static_cast<size_t>(starts[static_cast<size_t>(owner)] + nth)], keys[i]);
  }
}

TEST(RouteSortsByOwner) {
  const auto mask = std::make_unique<bool[]>(400);
  for (size_t i = 0; i < 400; ++i) mask[i] = i % 3 != 1;
  for (const uint32_t shards : {1u, 2u, 7u}) {
    for (const int32_t capacity : {1, 5, 400}) {
      for (const Keys& keys : {Keys{}, Batch(1, 400, 90), Batch(2, 400, uint64_t{1} << 60)}) {
        std::vector<int32_t> owners;
        for (const uint64_t key : keys) owners.push_back(static_cast<int32_t>(key % shards));
        CheckRoute(keys, nullptr, {}, shards, capacity);
        CheckRoute(keys, mask.get(), {}, shards, capacity);
        CheckRoute(keys, mask.get(), owners, shards, capacity);
        CheckRoute(keys, nullptr, std::vector<int32_t>(keys.size(), 0), shards, capacity);  // all to one
      }
    }
  }
}

TEST(PartitionersAreCheckedForRange) {
  const Keys keys = {5, 6};
  bool owned[2];
  for (const int32_t bad : {-1, 3, INT32_MIN, INT32_MAX}) {
    const int32_t owners[] = {0, bad};
    CHECK_THROWS(kInvalidArgument, kvjax::Owned("t", data::Span(keys), owners, 3, 0, owned));
  }
}

/// What senders give, in rounds of `capacity` keys each.
struct Sent {
  std::vector<Keys> keys;
  std::vector<Floats> rows;
};

void Deliver(Live& table, const Sent& sent, size_t capacity) {
  size_t most = 1;
  for (const Keys& keys : sent.keys) most = std::max(most, keys.size());
  const size_t senders = sent.keys.size(), rounds = (most + capacity - 1) / capacity;
  for (size_t r = 0; r < rounds; ++r) {
    Keys keys(senders * capacity, 99);
    std::vector<int32_t> counts(senders * capacity, 0);
    Floats rows(senders * capacity * kDim, 1e30f);
    for (size_t s = 0; s < senders; ++s) {
      for (size_t i = 0; i < capacity && r * capacity + i < sent.keys[s].size(); ++i) {
        keys[s * capacity + i] = sent.keys[s][r * capacity + i];
        counts[s * capacity + i] = 2;
        for (size_t d = 0; d < kDim; ++d) {
          rows[(s * capacity + i) * kDim + d] = sent.rows[s][(r * capacity + i) * kDim + d];
        }
      }
    }
    table.Receive(Serial, table.version(), data::Span(keys), counts.data(), rows.data(), senders,
                  static_cast<int32_t>(r), static_cast<int32_t>(rounds), {});
  }
}

kvjax::ShardSummary Plan(Live& table, const kvjax::SlotLayout& slots = {}) {
  kvjax::ShardSummary summary;
  const uint32_t version = table.version();
  const int64_t next = -1;
  table.PlanStep(Serial, {.version = &version, .step = &next, .layout = slots}, summary);
  return summary;
}

uint32_t Step(Live& table, int32_t& active) {
  int64_t step = 0;
  const kvjax::ShardSummary summary = Plan(table);
  CHECK(!table.Prepare(Serial, "apply", table.version(), {summary}, 0));
  const uint32_t token = table.CommitStep(Serial, table.version(), &active, &step);
  const uint32_t version = table.version();
  CHECK_THROWS(kFailedPrecondition,
               table.CommitStep(Serial, version, &active, &step));  // not before they are back
  CHECK_EQ(table.Scatter(Serial, token, nullptr, 0, nullptr, {}, /*last=*/true, /*holds=*/true), token);
  int32_t none = 0;
  return table.CommitStep(Serial, version, &none, &step);
}

TEST(GradientsAreSummedInTheOrderOfSendersWhateverTheRounds) {
  data::Stream stream(3);
  Sent sent{std::vector<Keys>(3), std::vector<Floats>(3)};
  for (size_t s = 0; s < 3; ++s) {
    for (uint64_t key = s; key < 40; key += s + 1) sent.keys[s].push_back(key * key);
    for (size_t i = 0; i < sent.keys[s].size() * kDim; ++i) {
      sent.rows[s].push_back(static_cast<float>(stream.Below(1'000'000)) * 1e-3f);
    }
  }
  std::vector<Floats> sums;
  for (const size_t capacity : {size_t{1}, size_t{7}, size_t{64}}) {
    Live table(kDim);
    Deliver(table, sent, capacity);
    int32_t active = 0;
    Step(table, active);
    CHECK_EQ(active, 40);
    const auto& in = table.shard_step().received.merged();
    CHECK_EQ(in.n, 40u);
    std::map<uint64_t, std::vector<float>> by_key;
    for (size_t i = 0; i < in.n; ++i) by_key[in.keys[i]].assign(in.rows + i * kDim, in.rows + (i + 1) * kDim);
    Floats flat;
    for (const auto& [key, row] : by_key) flat.insert(flat.end(), row.begin(), row.end());
    sums.push_back(flat);
    CHECK_EQ(table.Of(0).frequency, 2);        // of the first sender alone
    CHECK_EQ(table.Of(39 * 39).frequency, 4);  // of the first and the second
  }
  CHECK(sums[0] == sums[1] && sums[1] == sums[2]);
}

using Write = std::function<uint32_t(Live&, Call)>;

/// Planned and then done is the same as done at once; planned alone is nothing.
void CheckPhases(const Write& write) {
  Live whole(kDim), planned(kDim);
  for (Live* table : {&whole, &planned}) table->Ensure({1, 2, 3, 4, 5});
  const State before(planned);
  CHECK_EQ(write(planned, {planned.version(), Phase::kPlan}), 0u);
  CHECK(data::Same(before, State(planned)));
  planned.Unpin({planned.version(), Phase::kPlan, "unpin"}, {});  // the plan of another write takes its place
  CHECK_THROWS(kFailedPrecondition, write(planned, {planned.version(), Phase::kCommit}));
  CHECK(data::Same(before, State(planned)));
  write(planned, {planned.version(), Phase::kPlan});
  CHECK_EQ(write(planned, {planned.version(), Phase::kCommit}), write(whole, whole.version()));
  CHECK(data::Same(State(whole), State(planned)));
  CHECK_THROWS(kFailedPrecondition, write(planned, {planned.version(), Phase::kCommit}));
}

TEST(WritesAreDoneAsPlanned) {
  static const Keys keys = {4, 5, 6, 7, 6};
  static const Floats rows = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  static const bool exists[] = {true, false, false, true, true};
  const auto span = data::Span(keys);
  CheckPhases([&](Live& t, Call c) { return t.Insert(Serial, c, span, {}); });
  CheckPhases([&](Live& t, Call c) { return t.Table::Pin(Serial, c, span, {}); });
  CheckPhases([&](Live& t, Call c) { return t.Unpin(c, span); });
  CheckPhases([&](Live& t, Call c) { return t.Upsert(Serial, c, span, data::Bytes(rows)); });
  CheckPhases([&](Live& t, Call c) { return t.Assign(Serial, c, span, data::Bytes(rows)); });
  CheckPhases([&](Live& t, Call c) { return t.Add(Serial, c, span, rows.data(), {}); });
  CheckPhases([&](Live& t, Call c) { return t.Accum(Serial, c, span, rows.data(), rows.data(), exists); });
  CheckPhases([&](Live& t, Call c) { return t.Remove(c, span); });
  CheckPhases([&](Live& t, Call c) {
    return t.Table::Evict(Serial, "evict", c, kvjax::Policy::Parse("r\nleast_recent:2"), 0);
  });
  CheckPhases([&](Live& t, Call c) { return t.Clear(c); });
  CheckPhases([&](Live& t, Call c) { return t.ClearSlots(c); });
}

/// Tables over which the keys of one table are spread.
struct Shards {
  static constexpr size_t kShards = 3;
  std::vector<std::unique_ptr<Live>> tables;

  explicit Shards(const kvjax::TableSpec& spec) {
    for (size_t s = 0; s < kShards; ++s) tables.push_back(std::make_unique<Live>(spec));
  }
  static std::array<Keys, kShards> Split(const Keys& keys) {
    std::array<Keys, kShards> split;
    for (const uint64_t key : keys) split[key % 7 % kShards].push_back(key);  // the last has fewer
    return split;
  }
  /// What write(table, call, shard) plans on all shards, which agree on the victims and then commit.
  template <class Write>
  void Do(std::string_view op, Write write) {
    std::vector<kvjax::ShardSummary> summaries(kShards);
    std::vector<std::optional<kvjax::Tally>> counts;
    const auto each = [&](auto f) {
      for (size_t s = 0; s < kShards; ++s) f(*tables[s], s);
    };
    each([&](Live& t, size_t s) {
      write(t, Call{t.version(), Phase::kPropose, op}, s);
      t.Summarize(t.version(), summaries[s]);
    });
    each([&](Live& t, size_t s) { counts.push_back(t.Prepare(Serial, op, t.version(), summaries, s)); });
    while (counts[0]) {
      kvjax::Tally sum;
      for (const auto& count : counts) {
        for (size_t b = 0; b < kvjax::Tally::kBins; ++b) sum.counts[b] += count.value().counts[b];
      }
      each([&](Live& t, size_t s) { counts[s] = t.Continue(Serial, op, t.version(), sum); });
    }
    each([&](Live& t, size_t s) { write(t, Call{t.version(), Phase::kCommit, op}, s); });
  }
  [[nodiscard]] std::set<uint64_t> KeySet() const {
    std::set<uint64_t> all;
    for (const auto& table : tables) all.merge(table->KeySet());
    return all;
  }
};

/// Few different ages and frequencies, so that rows of several shards are at the end of a ranking.
void LoadTrained(Live& table, const Keys& keys) {
  kvjax::Snapshot rows;
  rows.Resize(keys.size(), kDim * sizeof(float));
  for (size_t i = 0; i < keys.size(); ++i) {
    data::Stream stream(keys[i]);
    rows.keys[i] = static_cast<int64_t>(keys[i]);
    rows.versions[i] = static_cast<int64_t>(stream.Below(20));
    rows.frequencies[i] = static_cast<int64_t>(stream.Below(6));
    rows.pinned[i] = std::byte{stream.Below(9) == 0}, rows.has_slots[i] = std::byte{0};
  }
  std::memset(rows.values.data(), 0, rows.values.size());
  rows.last_step = 20;
  table.Restore(data::View(rows));
}

/// The victims of each ranking are those of all shards together, and so is whether they are enough.
TEST(ShardsEvictWhatOneTableWould) {
  for (const char* const policy : {
           "r\nleast_recent:20",
           "r\nleast_frequent:7:0\ns\nleast_frequent:9:2.5\nt\nleast_recent:11",
           "r\nleast_frequent:40:0 least_recent:30 and",
           "r\nleast_recent:30 least_frequent:25:0 not and\ns\nmax_age:9",
           "r\nmin_frequency:2 least_recent:0 or",
           "r\nmax_age:50",
           "",
       }) {
    kvjax::TableSpec spec = data::Spec(kDim);
    spec.max_capacity = 300;
    spec.on_full = kvjax::OnFull::kEvict;
    spec.policy = kvjax::Policy::Parse(policy);
    Live whole(spec);
    Shards shards(spec);
    Keys old;
    for (uint64_t key = 0; key < 900; key += 3) old.push_back(key);
    LoadTrained(whole, old);
    for (size_t s = 0; s < Shards::kShards; ++s) LoadTrained(*shards.tables[s], Shards::Split(old)[s]);
    data::Stream stream(5);
    for (int64_t turn = 21; turn < 40; ++turn) {
      std::set<uint64_t> batch;
      for (uint64_t n = 1 + stream.Below(40); n > 0; --n) batch.insert(stream.Below(900));
      const Keys keys(batch.begin(), batch.end());
      const std::array<Keys, Shards::kShards> split = Shards::Split(keys);
      whole.Ensure(keys);
      shards.Do("insert",
                [&](Live& t, Call c, size_t s) { return t.Insert(Serial, c, data::Span(split[s]), {}); });
      CHECK(whole.KeySet() == shards.KeySet());
      if (turn % 4 == 0) {
        whole.Table::Pin(Serial, whole.version(), data::Span(keys), {});
        shards.Do("pin", [&](Live& t, Call c, size_t s) {
          return t.Table::Pin(Serial, c, data::Span(split[s]), {});
        });
        whole.Unpin(whole.version(), data::Span(keys));
        for (size_t s = 0; s < Shards::kShards; ++s) {
          shards.tables[s]->Unpin(shards.tables[s]->version(), data::Span(split[s]));
        }
      }
      if (turn % 5 == 0 && *policy != '\0') {
        whole.Evict(policy, turn);
        shards.Do("evict", [&](Live& t, Call c, size_t) {
          return t.Table::Evict(Serial, "evict", c, kvjax::Policy::Parse(policy), turn);
        });
      }
      CHECK(whole.KeySet() == shards.KeySet());
    }
    const auto evicted = [](const Live& t) {
      return t.Observe([](const kvjax::Contents& c) { return c.counters.evicted; });
    };
    auto all = evicted(*shards.tables[0]);
    for (size_t s = 1; s < Shards::kShards; ++s) {
      for (const auto& [reason, rows] : evicted(*shards.tables[s])) all[reason] += rows;
    }
    CHECK(all == evicted(whole) && all.size() > 0);
  }
}

TEST(AStepThatIsOnlyPlannedLeavesNothing) {
  kvjax::SlotLayout slots;
  slots.Add("mu", "float32[2]", 8);
  Live table(kDim);
  table.Ensure({1, 2});
  const State before(table);
  Deliver(table, {{{2, 3}}, {{1, 1, 1, 1}}}, 8);
  const kvjax::ShardSummary summary = Plan(table, slots);
  CHECK(!table.Prepare(Serial, "apply", table.version(), {summary}, 0));
  CHECK(data::Same(before, State(table)));
  table.Unpin({table.version(), Phase::kPlan}, {});  // the next write forgets it
  int32_t active = 0;
  int64_t step = 0;
  CHECK_THROWS(kFailedPrecondition, table.CommitStep(Serial, table.version(), &active, &step));
  slots = {};
  slots.Add("trace", "float32[2]", 8);  // another optimizer is free to come
  table.Begin({1}, {1}, slots);
}

TEST(WhatHasChangedSinceAnEarlierVersion) {
  Live table(kDim);
  table.Ensure({1, 2, 3});
  const uint32_t before = table.version();
  const Keys keys = {1, 2, 9};
  bool changed[3];
  const auto ask = [&](uint32_t since) {
    table.Changed(table.version(), since, data::Span(keys), changed);
    return std::vector<bool>(changed, changed + 3);
  };
  CHECK(ask(before) == std::vector<bool>({false, false, false}));
  table.Train({2, 9});
  CHECK(ask(before) == std::vector<bool>({false, true, true}));
  CHECK(ask(before - 1) == std::vector<bool>({true, true, true}));
  table.Ensure({50});
  CHECK(ask(before) == std::vector<bool>({true, true, true}));
}

}  // namespace cpu_sharded
