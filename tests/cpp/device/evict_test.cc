// Eviction from the device table, against the CPU's: the same rows for the same reasons, to the last tie.
#include <numeric>

#include "tests/cpp/support/pair.h"

namespace device_evict {

using namespace pairs;

/// A formula with few different numbers, so that rows tie and stand at the very bounds.
std::string RandomFormula(data::Stream& stream, bool needed, int depth = 0) {
  const auto number = [&](uint64_t below) { return std::to_string(stream.Below(below)); };
  const auto rows = [&]() -> std::string {
    if (needed && stream.Below(2) == 0) return "needed";
    return (stream.Below(4) == 0 ? "-" : "") + number(60);
  };
  switch (stream.Below(depth < 3 ? 11 : 8)) {
    case 0:
      return "max_age:" + number(9);
    case 1:
      return "min_frequency:" + number(12);
    case 2:
      return "min_norm:" + number(800);
    case 3:
      return "min_score:" + number(1000) + ":f";
    case 4:
      return "least_recent:" + rows();
    case 5:
    case 6:
      return "least_frequent:" + rows() + ":" + (stream.Below(2) == 0 ? "0" : "1.7");
    case 7:
      return "lowest_score:" + rows() + ":f";
    case 8:
      return RandomFormula(stream, needed, depth + 1) + " not";
    default:
      const std::string left = RandomFormula(stream, needed, depth + 1);
      return left + " " + RandomFormula(stream, needed, depth + 1) + (stream.Below(2) == 0 ? " and" : " or");
  }
}
std::string RandomPolicy(data::Stream& stream, bool needed) {
  std::string policy;
  for (uint64_t a = 0; a <= stream.Below(3); ++a) {
    policy +=
        "reason " + std::to_string(4 * a + stream.Below(4)) + "\n" + RandomFormula(stream, needed) + "\n";
  }
  return policy;
}

void Fill(Pair& pair, const Snapshot& rows) {
  pair.Both([&] { pair.cpu.Restore(data::View(rows)); }, [&] { pair.gpu.Restore(data::View(rows)); });
}
void Evict(Pair& pair, const std::string& policy, int64_t step = -1) {
  const int before = pair.refusals;
  const size_t rows = pair.cpu.KeySet().size(), shown = pair.sunk[0].size() + pair.sunk[1].size();
  const std::vector<uint32_t> dry = pair.cpu.Victims(policy, step);
  CHECK(dry == pair.gpu.Victims(policy, step));
  CHECK_EQ(pair.sunk[0].size() + pair.sunk[1].size(), shown);  // no sink sees a dry run
  pair.Both([&] { pair.cpu.Evict(policy, step); }, [&] { pair.gpu.Prune(policy, step); });
  CHECK_EQ(pair.refusals, before);
  CHECK_EQ(rows - pair.cpu.KeySet().size(), std::accumulate(dry.begin(), dry.end(), size_t{0}));
}

TEST(PoliciesByHand) {
  Pair pair(Spec(), Threads(3, 32), 31, 150);
  pair.Sink();
  for (int i = 0; i < 10; ++i) pair.Write(14, 60);
  pair.Write(1, 20);
  const Snapshot rows = pair.cpu.Copy();
  for (int round = 0; round < 40; ++round) {
    Fill(pair, rows);
    Evict(pair, RandomPolicy(pair.stream, false), static_cast<int64_t>(pair.stream.Below(20)) - 1);
  }
  CHECK(pair.sunk[0].size() > 40);
}

TEST(PoliciesOfTables) {
  data::Stream stream(32);
  for (int round = 0; round < 18; ++round) {
    TableSpec spec = Spec();
    spec.max_capacity = stream.Below(4) == 0 ? 0 : 30 + stream.Below(40);
    spec.on_full = static_cast<OnFull>(stream.Below(3));
    spec.evict_every = static_cast<int64_t>(stream.Below(5));
    spec.policy = kvjax::Policy::Parse(RandomPolicy(stream, spec.max_capacity > 0));
    if (round % 3 == 0) {
      spec.admission = {.kind = AdmissionSpec::Kind::kMinCount,
                        .unadmitted = AdmissionSpec::Unadmitted::kShared,
                        .shared_key = round % 2 == 0 ? 1u : 1ull << 50,
                        .threshold = 3};
    }
    Pair pair(spec, Threads(3, 16), static_cast<uint64_t>(round), 120);
    if (round % 2 == 0) pair.Sink();
    pair.Run(10, 40);
  }
}

TEST(RankingsOfManyRows) {
  // More rows than a ranking lists, whose orders have all their difference in digits far apart.
  Pair pair(Spec(1), Threads(4, 4096), 33, 0);
  Snapshot rows;
  for (int64_t key = 0; key < 70'000; ++key) {
    rows.keys.push_back(key);
    rows.versions.push_back(key % 3 + (key < 9 ? int64_t{1} << (7 * key) : 0));
    rows.frequencies.push_back(1 + key % 7);
  }
  const size_t n = rows.keys.size();
  rows.values.assign(4 * n, {}), rows.has_slots.assign(n, {}), rows.pinned.assign(n, {});
  rows.pinned[5] = std::byte{1};
  rows.last_step = int64_t{1} << 60;
  Fill(pair, rows);
  for (const char* policy :
       {"a\nleast_recent:1", "a\nleast_recent:-69990", "b\nleast_frequent:1000:3.3", "c\nleast_recent:30000",
        "d\nleast_recent:100 not least_frequent:20000:0 and", "e\nleast_recent:-3", "f\nleast_recent:10"}) {
    Evict(pair, policy);
  }
  CHECK_EQ(pair.cpu.Size(pair.cpu.version()), 1u);  // the pinned one
}

TEST(RanksOfEveryWidth) {
  // From orders that are all one to those that take 64 bits.
  for (const int64_t range : {int64_t{0}, int64_t{1}, int64_t{1} << 11, int64_t{1} << 54, INT64_MAX}) {
    Pair pair(Spec(1), Threads(3, 64), 34, 0);
    Snapshot rows;
    for (int64_t key = 0; key < 300; ++key) {
      rows.keys.push_back(key);
      rows.versions.push_back(range == INT64_MAX && key % 2 == 0 ? INT64_MAX - key : key % 5 * (range / 4));
      rows.frequencies.push_back(key % 2);
    }
    rows.values.assign(1200, {}), rows.has_slots.assign(300, {}), rows.pinned.assign(300, {});
    rows.last_step = INT64_MAX;
    Fill(pair, rows);
    for (const char* policy : {"a\nleast_recent:7", "b\nleast_frequent:90:1e17", "c\nleast_recent:-120",
                               "d\nleast_recent:119", "e\nleast_recent:5"}) {
      Evict(pair, policy);
    }
    CHECK_EQ(pair.cpu.Size(pair.cpu.version()), 0u);
  }
}

TEST(WhatIsFullSaysSo) {
  for (const OnFull on_full : {OnFull::kEvict, OnFull::kError}) {
    TableSpec spec = Spec();
    spec.max_capacity = 10;
    spec.on_full = on_full;
    if (on_full == OnFull::kEvict) spec.policy = kvjax::Policy::Parse("old\nmax_age:3");
    Pair pair(spec, Threads(4, 2), 35, 0);
    const Keys kept = {1, 2, 3, 4}, more = {5, 6, 7, 8, 9, 10}, too_many = {1, 20, 21, 22, 23, 24, 25, 26};
    pair.Both([&] { pair.cpu.Pin(kept); }, [&] { pair.gpu.Pinned(kvjax::Op::kPin, kept); });
    pair.Both([&] { pair.cpu.Ensure(more); }, [&] { pair.gpu.Ensure(more); });
    std::string said[2];
    pair.Both(
        [&] {
          try {
            pair.cpu.Ensure(too_many);
          } catch (const kvjax::Error& error) {
            said[0] = error.what();
            throw;
          }
        },
        [&] {
          try {
            pair.gpu.Ensure(too_many);
          } catch (const kvjax::Error& error) {
            said[1] = error.what();
            throw;
          }
        });
    CHECK_EQ(pair.refusals, 1);
    CHECK_EQ(said[0], said[1]);
  }
}

}  // namespace device_evict
