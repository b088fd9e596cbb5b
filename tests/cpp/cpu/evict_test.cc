// Eviction policies against brute force over random tables.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_evict {

using data::Floats;
using data::Keys;
using data::Live;
using data::State;
using kvjax::Snapshot;
using Set = std::set<uint64_t>;

struct Row {
  uint64_t key;
  int64_t version, frequency;
  float x, y;
  bool pinned;
};
using Rows = std::vector<Row>;

/// A function of the user's by name, of one row.
float Score(std::string_view name, float x, float y) { return name == "sum" ? x + y : x - 10 * y; }

void SetScores(Live& table) {
  table.SetScore([](std::string_view name, const Snapshot& rows, std::vector<double>& out) {
    for (size_t i = 0; i < out.size(); ++i) {
      float row[2];
      std::memcpy(row, rows.values.data() + i * 8, 8);
      out[i] = Score(name, row[0], row[1]);
    }
  });
}

/// Few different numbers, so that there are ties and rows at the very bounds.
Rows RandomRows(data::Stream& stream) {
  Rows rows;
  const size_t n = stream.Below(120);
  Set keys;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t key = i < 17 ? data::kAwkward[i] : stream.Next();
    rows.push_back({key, static_cast<int64_t>(stream.Below(20)), static_cast<int64_t>(stream.Below(6)),
                    static_cast<float>(stream.Below(7)) - 3, static_cast<float>(stream.Below(4)),
                    stream.Below(8) == 0});
  }
  return rows;
}

void Fill(Live& table, const Rows& rows, int64_t last_step = 20) {
  Snapshot s;
  s.layout = {};
  for (const Row& row : rows) {
    s.keys.push_back(static_cast<int64_t>(row.key));
    s.versions.push_back(row.version);
    s.frequencies.push_back(row.frequency);
    for (const float element : {row.x, row.y}) {
      const auto* bytes = reinterpret_cast<const std::byte*>(&element);
      s.values.insert(s.values.end(), bytes, bytes + 4);
    }
    s.pinned.push_back(static_cast<std::byte>(row.pinned));
    s.has_slots.push_back(std::byte{0});
  }
  s.last_step = last_step;
  table.Restore(data::View(s));
}

Set Where(const Rows& rows, const std::function<bool(const Row&)>& holds) {
  Set keys;
  for (const Row& row : rows) {
    if (!row.pinned && holds(row)) keys.insert(row.key);
  }
  return keys;
}

/// The n rows that come first.
Set First(Rows rows, size_t n, const std::function<double(const Row&)>& order) {
  std::erase_if(rows, [](const Row& row) { return row.pinned; });
  std::sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
    return std::pair(order(a), kvjax::Mix(a.key)) < std::pair(order(b), kvjax::Mix(b.key));
  });
  rows.resize(std::min(n, rows.size()));
  return Where(rows, [](const Row&) { return true; });
}

Set And(const Set& a, const Set& b) {
  Set out;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(out, out.end()));
  return out;
}
Set Or(Set a, const Set& b) {
  a.insert(b.begin(), b.end());
  return a;
}
Set Not(const Rows& rows, const Set& a) {
  return Where(rows, [&](const Row& row) { return !a.contains(row.key); });
}

TEST(EachWordChoosesWhatBruteForceDoes) {
  data::Stream stream(1);
  for (int round = 0; round < 25; ++round) {
    const Rows rows = RandomRows(stream);
    const size_t n = stream.Below(rows.size() + 10);
    const auto step = static_cast<int64_t>(15 + stream.Below(20));
    const auto bound = static_cast<int64_t>(stream.Below(20));
    const std::string N = std::to_string(n), B = std::to_string(bound);

    const auto age = Where(rows, [&](const Row& r) { return step - r.version > bound; });
    const auto rare = Where(rows, [&](const Row& r) { return r.frequency < bound; });
    const auto small = Where(rows, [](const Row& r) { return std::hypot(r.x, r.y) < 2.0; });
    const auto low = Where(rows, [](const Row& r) { return Score("sum", r.x, r.y) < -0.5; });
    const auto recent = [](const Row& r) { return static_cast<double>(r.version); };
    const auto frequent = [](const Row& r) { return static_cast<double>(r.frequency); };
    const auto decayed = [](const Row& r) {
      const auto units = [](double x) { return std::floor(x * 0x1p24 + 0.5); };
      return units(std::log2(static_cast<double>(r.frequency))) + units(static_cast<double>(r.version) / 2.5);
    };
    const auto score = [](const Row& r) { return double{Score("other", r.x, r.y)}; };
    const size_t but = rows.size() - std::min(n, rows.size());

    const std::vector<std::pair<std::string, Set>> cases = {
        {"max_age:" + B, age},
        {"min_frequency:" + B, rare},
        {"min_norm:2.0", small},
        {"min_norm:1e-30", Where(rows, [](const Row& r) { return r.x == 0 && r.y == 0; })},
        {"min_score:-0.5:sum", low},
        {"least_recent:" + N, First(rows, n, recent)},
        {"least_frequent:" + N + ":0", First(rows, n, frequent)},
        {"least_frequent:" + N + ":2.5", First(rows, n, decayed)},
        {"lowest_score:" + N + ":other", First(rows, n, score)},
        {"least_recent:-" + N, First(rows, but, recent)},
        {"least_frequent:-" + N + ":0.0", First(rows, but, frequent)},
        {"lowest_score:-" + N + ":other", First(rows, but, score)},
        {"least_recent:needed", {}},  // by hand no space is needed
        {"least_recent:9223372036854775807", Not(rows, {})},
        {"least_recent:-9223372036854775807", {}},
        {"max_age:9223372036854775807", {}},
        {"min_frequency:9223372036854775807", Not(rows, {})},
        {"max_age:" + B + " min_frequency:" + B + " and", And(age, rare)},
        {"max_age:" + B + " min_norm:2.0 or", Or(age, small)},
        {"max_age:" + B + " not", Not(rows, age)},
        {"max_age:" + B + " min_norm:2.0 not and min_score:-0.5:sum least_recent:" + N + " or and",
         And(And(age, Not(rows, small)), Or(low, First(rows, n, recent)))},
        {"max_age:" + B + " not not not", Not(rows, age)},
    };
    for (const auto& [formula, victims] : cases) {
      Live table(2);
      SetScores(table);
      Fill(table, rows);
      Set left = table.KeySet();
      for (const uint64_t key : victims) CHECK_EQ(left.erase(key), 1u);
      const uint32_t version = table.version();
      CHECK_EQ(table.Victims("why\n" + formula, step).at(0), victims.size());
      CHECK_EQ(table.version(), version);
      table.Evict("why\n" + formula, step);
      if (table.KeySet() != left) std::cerr << formula << " of " << rows.size() << " rows: ";
      CHECK(table.KeySet() == left);
      CHECK_EQ(table.version(), version + 1);
      table.Observe(
          [&](const kvjax::Contents& c) { CHECK_EQ(c.counters.evicted.at("why"), victims.size()); });
    }
  }
}

TEST(ADryRunEndsNoStep) {
  Live table(2);
  table.Ensure({1, 2, 3});
  table.Open({2, 7}, {1, 1});
  CHECK_EQ(table.Victims("why\nleast_recent:2").at(0), 2u);
  table.End();
  CHECK(table.KeySet() == (Set{1, 2, 3, 7}));
  table.Observe([](const kvjax::Contents& c) { CHECK(c.counters.evicted.empty()); });
}

TEST(ScoresAreDoubles) {
  // In ascending order; in float32 most of them were one number.
  const std::vector<double> scores = {-1e300,
                                      -0x1.0000000000001p0,
                                      -1.0,
                                      -5e-324,
                                      0.0,
                                      5e-324,
                                      1e-310,
                                      1.0,
                                      0x1.0000000000001p0,
                                      0x1.0000000000002p0,
                                      1e300};
  const auto left = [&](const std::string& formula) {
    Live table(2);
    // Against the order of the keys' hashes, which would break ties.
    Keys keys(scores.size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
    std::sort(keys.begin(), keys.end(), [](auto a, auto b) { return kvjax::Mix(a) > kvjax::Mix(b); });
    table.SetScore([&](std::string_view, const Snapshot& rows, std::vector<double>& out) {
      for (size_t i = 0; i < out.size(); ++i) {
        const auto key = static_cast<uint64_t>(rows.keys[i]);
        out[i] = scores[static_cast<size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin())];
      }
    });
    table.Ensure(keys);
    table.Evict("why\n" + formula);
    Set numbers;
    for (const uint64_t key : table.KeySet()) {
      numbers.insert(static_cast<uint64_t>(std::find(keys.begin(), keys.end(), key) - keys.begin()));
    }
    return numbers;
  };
  Set want;
  for (uint64_t i = 0; i < scores.size(); ++i) want.insert(i);
  for (size_t n = 1; n <= scores.size(); ++n) {
    want.erase(want.begin());
    CHECK(left("lowest_score:" + std::to_string(n) + ":f") == want);
  }
  CHECK(left("min_score:1.0000000000000002:f") == Set({8, 9, 10}));
}

TEST(RowsThatAreNotNumbersHaveNoNorm) {
  const float nan = std::nanf(""), inf = INFINITY;
  const Rows rows = {{1, 0, 0, nan, 0, false}, {2, 0, 0, 5, nan, false},  {3, 0, 0, -inf, 0, false},
                     {4, 0, 0, 1, 1, false},   {5, 0, 0, nan, nan, true}, {6, 0, 0, inf, nan, false}};
  const auto left = [&](const std::string& formula) {
    Live table(2);
    Fill(table, rows);
    table.Evict("why\n" + formula);
    return table.KeySet();
  };
  CHECK(left("min_norm:0.0") == Set({3, 4, 5}));  // pinned rows stay whatever they are
  CHECK(left("min_norm:2.0") == Set({3, 5}));
  CHECK(left("min_norm:2.0 not") == Set({1, 2, 4, 5, 6}));
}

TEST(NegativeStepsStandForTheLast) {
  Live table(2);
  Fill(table, {{1, 10, 0, 0, 0, false}, {2, 15, 0, 0, 0, false}}, 20);
  table.Evict("old\nmax_age:5");
  CHECK(table.KeySet() == Set{2});
  table.Evict("old\nmax_age:5", 21);
  CHECK(table.KeySet().empty());
  table.Evict("old\nmax_age:5 not");  // an empty table has nothing to lose
  CHECK(table.KeySet().empty());
}

TEST(RowsAreCountedByTheFirstAlternativeThatChoosesThem) {
  data::Stream stream(2);
  const Rows rows = RandomRows(stream);
  Live table(2);
  Fill(table, rows);
  std::map<std::string, std::vector<int64_t>> given;
  table.SetSink([&](const Snapshot& s, std::string_view reason) {
    CHECK(given.emplace(reason, std::vector(s.keys.begin(), s.keys.end())).second);  // once a reason
  });
  const Set a = Where(rows, [](const Row& r) { return r.version < 8; });
  const Set b = Where(rows, [](const Row& r) { return r.frequency < 3; });
  table.Evict("A\nmax_age:12\nnone\nmin_norm:0.0\nB & more\nmin_frequency:3");
  const auto keys = [&](const char* reason) { return Set(given[reason].begin(), given[reason].end()); };
  CHECK(!given.contains("none"));
  CHECK(keys("A") == a);
  Set only_b;
  std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::inserter(only_b, only_b.end()));
  CHECK(keys("B & more") == only_b);
  CHECK(!a.empty() && !only_b.empty());
}

TEST(ManyAlternatives) {
  std::string policy;
  Rows rows;
  for (uint64_t i = 0; i < 600; ++i) {
    rows.push_back({i, 0, static_cast<int64_t>(i), 0, 0, false});
    policy += "reason " + std::to_string(i) + "\nmin_frequency:" + std::to_string(i + 1) + "\n";
  }
  Live table(2);
  Fill(table, rows);
  table.Evict(policy);
  CHECK(table.KeySet().empty());
  table.Observe([](const kvjax::Contents& c) {
    for (int i : {0, 254, 255, 256, 511, 512, 599}) {
      CHECK_EQ(c.counters.evicted.at("reason " + std::to_string(i)), 1u);
    }
  });
}

TEST(TiesDoNotDependOnTheOrderOfInsertion) {
  Keys keys = data::kAwkward;
  for (uint64_t key = 100; key < 300; ++key) keys.push_back(key);
  Set kept;
  for (int round = 0; round < 4; ++round) {
    Live table(2);
    table.Ensure({5000, 5001, 5002});
    if (round % 2 == 0) std::reverse(keys.begin(), keys.end());
    if (round == 3) table.Reserve(table.version(), 5000);
    for (size_t i = 0; i < keys.size(); i += 50) {
      table.Ensure({keys.begin() + static_cast<long>(i),
                    keys.begin() + static_cast<long>(std::min(i + 50, keys.size()))});
    }
    table.Drop({5001, 5000, 5002});
    table.Evict("restrict\nleast_recent:-60");
    CHECK_EQ(table.Size(table.version()), 60u);
    if (round == 0) kept = table.KeySet();
    CHECK(table.KeySet() == kept);
  }
}

TEST(RestrictKeepsExactlyN) {
  data::Stream stream(3);
  for (int round = 0; round < 10; ++round) {
    const Rows rows = RandomRows(stream);
    const auto pinned =
        static_cast<size_t>(std::count_if(rows.begin(), rows.end(), [](auto& r) { return r.pinned; }));
    for (const size_t n : {size_t{0}, size_t{5}, rows.size() / 2, rows.size(), rows.size() + 5}) {
      for (const char* ranking : {"least_recent:-", "least_frequent:-"}) {
        Live table(2);
        Fill(table, rows);
        const bool recent = ranking[6] == 'r';
        table.Evict(std::string("restrict\n") + ranking + std::to_string(n) + (recent ? "" : ":0"));
        CHECK_EQ(table.Size(table.version()), std::max(std::min(n, rows.size()), pinned));
      }
    }
  }
}

TEST(ExtremeVersionsAndFrequencies) {
  constexpr auto kMost = static_cast<int64_t>(kvjax::kMaxFrequency);
  const Rows rows = {
      {1, 0, 0, 0, 0, false}, {2, INT64_MAX, kMost, 0, 0, false}, {3, INT64_MAX - 101, 1, 0, 0, false}};
  const auto left = [&](const std::string& formula, int64_t step) {
    Live table(2);
    Fill(table, rows, INT64_MAX);
    table.Evict("why\n" + formula, step);
    return table.KeySet();
  };
  CHECK(left("max_age:100", INT64_MAX) == Set{2});
  CHECK(left("max_age:101", INT64_MAX) == Set({2, 3}));
  CHECK(left("max_age:0", 0) == Set({1, 2, 3}));
  CHECK(left("max_age:9223372036854775806", INT64_MAX) == Set({2, 3}));
  CHECK(left("least_recent:1", 5) == Set({2, 3}));
  CHECK(left("least_recent:2", 5) == Set{2});
  CHECK(left("least_frequent:2:1e-300", INT64_MAX) == Set{2});
  CHECK(left("least_frequent:2:1e300", INT64_MAX) == Set{2});
  CHECK(left("min_frequency:2", 0) == Set{2});
  // The step after the last is the last.
  Live table(2);
  Fill(table, rows, INT64_MAX);
  table.Train({3});
  CHECK_EQ(table.Of(3).version, INT64_MAX);
}

TEST(UnknownPoliciesAreRefused) {
  Live table(2);
  SetScores(table);
  Fill(table, {{1, 0, 0, 0, 0, false}});
  const State before(table);
  for (const char* formula : {"",
                              "max_age",
                              "max_age:",
                              "max_age:x",
                              "max_age:1x",
                              "max_age:9223372036854775808",
                              "max_age:1.5",
                              "min_norm:",
                              "min_norm:1e400",
                              "least_recent:",
                              "least_recent:-",
                              "least_recent:needed2",
                              "least_recent:-needed",
                              "least_recent:99999999999999999999",
                              "least_frequent:5",
                              "least_frequent:5:x",
                              "oldest:5",
                              "and",
                              "max_age:1 and",
                              "not",
                              "max_age:1 max_age:2",
                              "max_age:1  max_age:2 and",
                              "max_age:1 max_age:2 and or"}) {
    CHECK_THROWS(kInvalidArgument, table.Evict(std::string("why\n") + formula, 5));
  }
  CHECK_THROWS(kInvalidArgument, table.Evict("a reason without a formula", 5));
  std::string deep = "max_age:1";
  for (int i = 0; i < 64; ++i) deep += " max_age:1";
  CHECK_THROWS(kInvalidArgument, table.Evict("why\n" + deep, 5));
  CHECK(data::Same(before, State(table)));
  CHECK_EQ(table.version(), 1u);
  table.Evict("");  // no alternatives, nothing to do
  CHECK(table.KeySet() == Set{1});
}

}  // namespace cpu_evict
