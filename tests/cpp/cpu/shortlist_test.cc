// The shortlists of rows to evict: what is chosen from them is what would be chosen from all rows, among
// writes of all kinds.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_shortlist {

using data::Keys;
using data::Live;
using kvjax::Snapshot;
using Set = std::set<uint64_t>;

kvjax::TableSpec Spec(size_t max_capacity, const std::string& policy) {
  kvjax::TableSpec spec = data::Spec(2);
  spec.max_capacity = max_capacity;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse(policy);
  return spec;
}

uint64_t Evicted(const Live& table, const std::string& reason) {
  return table.Observe([&](const kvjax::Contents& c) { return c.counters.evicted.at(reason); });
}

Keys RandomBatch(data::Stream& stream, uint64_t keys, uint64_t most) {
  Set batch;
  for (uint64_t n = stream.Below(most + 1); n > 0; --n) batch.insert(stream.Below(keys));
  return {batch.begin(), batch.end()};
}

/// On a table that is large enough for a shortlist. fewest: rows that it evicts at once.
void TestShortlist(const std::string& policy, size_t fewest) {
  constexpr size_t kMost = 4000;
  data::Stream stream(2);
  Live table(Spec(kMost, policy));
  std::map<uint64_t, int64_t> rows;  // key, version
  Set pinned;
  size_t listed = 0;
  int64_t last = 0;
  for (int64_t turn = 1; turn <= 400; ++turn) {
    const int64_t step = last + static_cast<int64_t>(stream.Below(3));
    const Keys batch = turn == 1 ? Keys() : RandomBatch(stream, 8000, turn < 60 ? 400 : 60);
    if (turn == 1 || turn == 200) {  // old rows and new ones, in no order
      rows.clear(), pinned.clear();
      Snapshot loaded;
      loaded.layout = {};
      for (uint64_t key = 0; key < 7800; key += 2) {
        rows[key] = static_cast<int64_t>(stream.Below(30));
        loaded.keys.push_back(static_cast<int64_t>(key));
        loaded.frequencies.push_back(1);
        loaded.versions.push_back(rows[key]);
        loaded.pinned.push_back(std::byte{0});
        loaded.has_slots.push_back(std::byte{0});
      }
      loaded.values.resize(loaded.keys.size() * 8);
      loaded.last_step = last = 30;
      if (turn > 1) table.Clear(table.version());
      table.Restore(data::View(loaded));
      continue;
    }
    const Set in_batch(batch.begin(), batch.end());
    std::vector<std::tuple<int64_t, uint64_t, uint64_t>> order;
    for (const auto& [key, version] : rows) {
      if (!pinned.contains(key) && !in_batch.contains(key)) order.emplace_back(version, kvjax::Mix(key), key);
    }
    std::sort(order.begin(), order.end());
    for (const uint64_t key : batch) rows.try_emplace(key, last);
    const size_t excess = rows.size() - std::min(rows.size(), kMost);
    for (size_t i = 0; excess > 0 && i < std::max(excess, fewest); ++i) rows.erase(std::get<2>(order[i]));
    switch (stream.Below(8)) {
      case 0:
        table.Ensure(batch);
        break;
      case 1:
        table.Pin(batch);
        pinned.insert(batch.begin(), batch.end());
        break;
      default:
        table.Train(batch, step);
        last = std::max(last, step);
        for (const uint64_t key : batch) rows[key] = step;
    }
    if (stream.Below(5) == 0 && !pinned.empty()) {
      const Keys some(pinned.begin(), pinned.end());
      table.Unpin(table.version(), data::Span(some));
      pinned.clear();
    }
    if (stream.Below(9) == 0) {
      const Keys gone = RandomBatch(stream, 8000, 50);
      table.Drop(gone);
      for (const uint64_t key : gone) rows.erase(key), pinned.erase(key);
    }
    listed += table.Observe([](const kvjax::Contents& c) { return !c.shortlists.empty(); });
    if (turn % 4 != 0) continue;
    Set want;
    for (const auto& [key, version] : rows) want.insert(key);
    CHECK(table.KeySet() == want);
  }
  CHECK(listed > 100 && Evicted(table, policy.empty() ? "capacity" : "ours") > 1000);
}

TEST(TheShortlistChoosesWhatAllRowsWould) {
  TestShortlist("", 0);
  TestShortlist("ours\nleast_recent:needed", 0);
  TestShortlist("ours\nleast_recent:20", 20);
}

/// A table that forgets its lists before each call chooses from all rows.
void TestBesideAllRows(const std::string& policy, int64_t every) {
  constexpr uint64_t kKeys = 3000;
  kvjax::TableSpec spec = Spec(1000, policy);
  spec.evict_every = every;
  Live table(spec), plain(spec);
  data::Stream stream(policy.size());
  int64_t step = 40;
  size_t listed = 0;
  const auto both = [&](auto call) {
    listed += table.Observe([](const kvjax::Contents& c) { return !c.shortlists.empty(); });
    plain.Observe([](const kvjax::Contents& c) { c.shortlists.Clear(); });
    call(table), call(plain);
  };
  const auto load = [&] {
    Snapshot loaded;
    loaded.layout = {};
    for (uint64_t key = 0; key < kKeys; key += 3) {
      loaded.keys.push_back(static_cast<int64_t>(key));
      loaded.frequencies.push_back(static_cast<int64_t>(stream.Below(4) * stream.Below(4)));
      loaded.versions.push_back(step - 30 + static_cast<int64_t>(stream.Below(31)));
      loaded.pinned.push_back(std::byte{stream.Below(20) == 0});
      loaded.has_slots.push_back(std::byte{0});
    }
    for (size_t i = 0; i < loaded.keys.size() * 2; ++i) {
      const auto element = static_cast<float>(stream.Below(100)) / 100.0f;
      loaded.values.insert(loaded.values.end(), reinterpret_cast<const std::byte*>(&element),
                           reinterpret_cast<const std::byte*>(&element) + sizeof(element));
    }
    loaded.last_step = step;
    both([&](Live& t) { t.Restore(data::View(loaded)); });
  };
  load();
  for (int turn = 1; turn <= 300; ++turn) {
    const Keys batch = RandomBatch(stream, kKeys, stream.Below(9) == 0 ? 300 : 20);
    switch (stream.Below(10)) {
      case 0:
        both([&](Live& t) { t.Ensure(batch); });
        break;
      case 1:
        both([&](Live& t) { t.Put(batch, data::Floats(2 * batch.size(), 0.25f)); });
        break;
      case 2:
        both([&](Live& t) { t.Drop(batch); });
        break;
      case 3:
        both([&](Live& t) {
          t.Pin({batch.begin(), batch.begin() + static_cast<ptrdiff_t>(batch.size() / 8)});
        });
        break;
      case 4:
        both([&](Live& t) { t.Unpin(t.version(), data::Span(batch)); });
        break;
      case 5:
        if (turn % 50 == 0) load();
        if (turn % 7 == 0) both([&](Live& t) { t.Evict(policy, turn % 2 == 0 ? -1 : step - 5); });
        break;
      default:
        step += static_cast<int64_t>(stream.Below(turn % 90 == 0 ? 4000 : 3));
        std::vector<int32_t> counts;
        for (size_t i = 0; i < batch.size(); ++i) counts.push_back(static_cast<int32_t>(1 + stream.Below(3)));
        both([&](Live& t) { t.Begin(batch, counts, {}, step); });
    }
    if (turn % 10 == 0) CHECK(table.KeySet() == plain.KeySet());
  }
  const auto evicted = [](const kvjax::Contents& c) { return c.counters.evicted; };
  CHECK(table.Observe(evicted) == plain.Observe(evicted));
  CHECK(listed > 25);
}

TEST(WhatIsChosenFromListsIsWhatWouldBeChosenFromAllRows) {
  int turns = 0;
  for (const char* const policy : {
           "",
           "ours\nleast_recent:20",
           "ours\nleast_frequent:needed:0",
           "ours\nleast_frequent:20:0",
           "ours\nleast_frequent:needed:2.5",
           "ours\nleast_frequent:10:400",
           "ours\nleast_frequent:needed:0.01",
           "ours\nmax_age:25",
           "ours\nmin_frequency:2",
           "old\nmax_age:30\nrare\nleast_frequent:needed:0",
           "ours\nmax_age:6 min_frequency:2 and",
           "ours\nmax_age:9 min_norm:0.5 and",
           "ours\nmax_age:28 least_frequent:5:0 or",
           "ours\nmax_age:20 least_frequent:20:0 not and",
           "ours\nleast_frequent:20:9 least_recent:15 and",
           "ours\nleast_frequent:9:2.5 least_frequent:9:30 or",
           "often\nleast_frequent:5:0\nlately\nleast_frequent:5:7\nnow\nleast_frequent:5:0.5",
           "old\nmax_age:28\nrare\nmin_frequency:1",
       }) {
    TestBesideAllRows(policy, *policy != '\0' && turns++ % 2 == 0 ? 3 : 0);
  }
}

/// A scan lists what all policies that take turns need, and no list more than these.
TEST(EachHalfLifeHasItsList) {
  Live table(Spec(4000, "ours\nleast_frequent:9:2.5 least_frequent:9:30 or"));
  const auto listed = [&](double half_life) {
    return table.Observe([&](const kvjax::Contents& c) {
      const kvjax::Rule rule{.kind = kvjax::Rule::Kind::kFrequent, .half_life = half_life};
      const auto all = [](const kvjax::Candidate&) { return true; };
      return c.shortlists.First(kvjax::Serial, c.store, rule, 1, 0, all).has_value();
    });
  };
  Keys keys(4001);
  std::iota(keys.begin(), keys.end(), 0);
  table.Train({keys.begin(), keys.end() - 1}, 1);
  table.Train({keys.end() - 1, keys.end()}, 2);
  CHECK(listed(2.5) && listed(30) && !listed(7));
  table.Evict("by hand\nleast_frequent:1:7");
  CHECK(listed(2.5) && listed(30) && listed(7));
  for (int other = 100; other < 107; ++other) table.Evict("r\nleast_frequent:1:" + std::to_string(other));
  CHECK(listed(106) && listed(100) && listed(7) && !listed(2.5) && !listed(30));
}

/// Else a step would look through that list in vain, or at all rows, and then at all rows again for its
/// capacity.
TEST(BroadBoundsLeaveTheListOfTheCapacity) {
  Live table(Spec(4000, ""));
  const auto recent = [&] {
    return table.Observe([](const kvjax::Contents& c) {
      const kvjax::Rule rule{.kind = kvjax::Rule::Kind::kRecent};
      const auto all = [](const kvjax::Candidate&) { return true; };
      return c.shortlists.First(kvjax::Serial, c.store, rule, 1, 0, all).has_value();
    });
  };
  Keys old(2400), rare(1601);
  std::iota(old.begin(), old.end(), 0), std::iota(rare.begin(), rare.end(), 2400);
  for (int64_t step = 1; step < 3; ++step) table.Train(old, step);
  table.Train(rare, 10);  // one too many
  CHECK(recent());
  for (const char* const none : {"max_age:2 min_frequency:2 and", "max_age:2 min_frequency:1 and"}) {
    table.Evict(std::string("ours\n") + none);
    CHECK(recent() && table.Size(table.version()) == 4000);
  }
}

/// Else each step would look at all rows for them.
TEST(RowsBeyondABoundAreThoseOfTheListBeforeIt) {
  Live table(Spec(0, ""));
  Keys rare(40), others(3960);
  std::iota(rare.begin(), rare.end(), 0), std::iota(others.begin(), others.end(), 40);
  table.Train(rare, 1), table.Train(others, 5), table.Train(others, 6);
  constexpr int kUnknown = -1;
  const auto beyond = [&](kvjax::Rule::Kind kind, int64_t n, int64_t step) {
    return table.Observe([&](const kvjax::Contents& c) {
      const auto all = [](const kvjax::Candidate&) { return true; };
      const auto rows = c.shortlists.First(kvjax::Serial, c.store, {.kind = kind, .n = n}, 0, step, all);
      return rows ? static_cast<int>(rows->size()) : kUnknown;
    });
  };
  using Kind = kvjax::Rule::Kind;
  CHECK(table.Victims("old\nmax_age:3\nrare\nmin_frequency:2", 6) == std::vector<uint32_t>({40, 0}));
  CHECK_EQ(beyond(Kind::kAge, 3, 6), 40);
  CHECK_EQ(beyond(Kind::kAge, 3, 9), 40);  // those of before step 6, which the list ends with
  CHECK_EQ(beyond(Kind::kAge, 3, 10), kUnknown);
  CHECK_EQ(beyond(Kind::kAge, 6, 6), 0);
  CHECK_EQ(beyond(Kind::kAge, INT64_MAX, 6), 0);
  CHECK_EQ(beyond(Kind::kFrequency, 1, 6), 0);
  CHECK_EQ(beyond(Kind::kFrequency, 2, 6), 40);
  CHECK_EQ(beyond(Kind::kFrequency, 3, 6), kUnknown);
  CHECK_EQ(beyond(Kind::kAge, 3, 6), 40);  // what was not known has left the lists as they are
}

/// Else each step would look at all rows, find those, and look at all rows again.
TEST(OldPinnedRowsDoNotFillTheShortlist) {
  Live table(Spec(8000, ""));
  const auto batch = [](uint64_t begin, uint64_t end) {
    Keys keys;
    for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
    return keys;
  };
  const auto free = [&] {
    return table.Observe([](const kvjax::Contents& c) {
      const auto unpinned = [](const kvjax::Candidate& r) { return r.header.pinned == 0; };
      const kvjax::Rule rule{.kind = kvjax::Rule::Kind::kRecent};
      const auto first = c.shortlists.First(kvjax::Serial, c.store, rule, 1, 0, unpinned);
      return first ? first->size() : 0;
    });
  };
  const Keys pinned = batch(0, 4000);
  table.Pin(pinned);
  table.Train(batch(4000, 8000), 1);
  table.Train(batch(4000, 4010), 2);  // rows of the last step are not listed
  table.Train(batch(8000, 8010), 3);
  CHECK(free() == 1);
  const Keys recent = batch(4000, 4010);  // as a program may pin a batch for its step
  table.Pin(recent);
  table.Unpin(table.version(), data::Span(recent));
  CHECK(free() == 1);
  table.Unpin(table.version(), data::Span(pinned));
  CHECK(free() == 0);
  table.Train(batch(8010, 8020), 4);
  size_t left = 0;
  for (const uint64_t key : table.KeySet()) left += key < 4000;
  CHECK(left == 3990);
}

/// What a scan costs depends on all rows, so a list may have most of those that are free.
TEST(FewFreeRowsAreListedWhereMostRowsArePinned) {
  Live table(Spec(8000, ""));
  Keys pinned, others;
  for (uint64_t key = 0; key < 7800; ++key) pinned.push_back(key);
  for (uint64_t key = 7800; key < 8000; ++key) others.push_back(key);
  table.Pin(pinned);
  table.Train(others, 1);
  for (int64_t step = 2; step < 30; ++step) {
    Keys batch;
    for (uint64_t i = 0; i < 20; ++i) batch.push_back(8000 + static_cast<uint64_t>(step) * 20 + i);
    table.Train(batch, step);
    CHECK(table.Observe([](const kvjax::Contents& c) { return !c.shortlists.empty(); }) &&
          table.Size(table.version()) == 8000);
  }
}

}  // namespace cpu_shortlist
