// Admission against exact counts: which keys get a row, when, and what is remembered of the others.
#include "kvjax/ffi/core/admit.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_admit {

using data::Keys;
using data::Live;
using data::State;
using kvjax::Admission;
using kvjax::AdmissionSpec;
using kvjax::AdmissionState;
using kvjax::kNoRow;
using Kind = AdmissionSpec::Kind;
using Counts = std::vector<uint32_t>;

kvjax::TableSpec Spec(const AdmissionSpec& admission) {
  kvjax::TableSpec spec = data::Spec(1);
  spec.admission = admission;
  return spec;
}

/// A batch as training brings it: distinct keys and how often each occurs.
struct Batch {
  Keys keys;
  std::vector<int32_t> counts;

  Batch(data::Stream& stream, const Keys& universe, uint64_t most) {
    std::map<uint64_t, int32_t> seen;
    const uint64_t n = stream.Below(30);
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t rank = std::min(stream.Below(universe.size()), stream.Below(universe.size()));
      seen[universe[rank]] += static_cast<int32_t>(1 + stream.Below(most));
    }
    for (const auto& [key, count] : seen) keys.push_back(key), counts.push_back(count);
  }
};

Keys Universe(size_t n) {
  Keys keys = data::kAwkward;
  data::Stream stream(5);
  while (keys.size() < n) keys.push_back(stream.Next());
  return keys;
}

/// One batch of an admission by itself; returns the decision.
Admission::Decision Step(Admission& admission, const Keys& keys, const Counts& counts, int64_t last,
                         int64_t step) {
  const auto decision = admission.Decide(keys, counts, last, step);
  admission.Commit(keys, decision);
  return decision;
}

TEST(MinCountAdmitsAtTheKthOccurrence) {
  for (const uint32_t threshold : {1u, 2u, 7u}) {
    data::Stream stream(threshold);
    const Keys universe = Universe(120);
    Live table(Spec({.kind = Kind::kMinCount, .threshold = threshold}));
    std::map<uint64_t, int64_t> rows, waiting;  // occurrences
    for (int step = 0; step < 300; ++step) {
      const Batch batch(stream, universe, 3);
      const uint64_t one = universe[stream.Below(universe.size())];
      switch (stream.Below(10)) {
        case 0:  // a row that training did not give: it takes what was counted along
          table.Ensure({one});
          rows.try_emplace(one, waiting.contains(one) ? waiting[one] : 0);
          waiting.erase(one);
          break;
        case 1:  // a removed key starts from nothing, counted or not
          table.Drop({one});
          rows.erase(one);
          waiting.erase(one);
          break;
        default: {
          const auto targets = table.Begin(batch.keys, batch.counts);
          size_t active = 0;
          for (size_t i = 0; i < batch.keys.size(); ++i) {
            const uint64_t key = batch.keys[i];
            if (const auto row = rows.find(key); row != rows.end()) {
              row->second += batch.counts[i];
            } else if ((waiting[key] += batch.counts[i]) >= threshold) {
              rows[key] = waiting[key];
              waiting.erase(key);
            }
            if (!rows.contains(key)) continue;
            CHECK_EQ(targets[active].gradient, i);
            ++active;
          }
          CHECK_EQ(targets.size(), active);
        }
      }
      CHECK_EQ(table.Size(table.version()), rows.size());
    }
    for (const uint64_t key : universe) {
      const auto row = rows.find(key);
      CHECK_EQ(table.Of(key).found, row != rows.end());
      const auto count = waiting.find(key);
      CHECK_EQ(table.Of(key).frequency, row != rows.end()        ? row->second
                                        : count != waiting.end() ? count->second
                                                                 : 0);
    }
    const AdmissionState state = table.ExportAdmission(table.version());
    CHECK_EQ(state.keys.size(), waiting.size());
    for (size_t i = 0; i < state.keys.size(); ++i) {
      CHECK_EQ(waiting[static_cast<uint64_t>(state.keys[i])], state.counts[i]);
      if (i == 0) continue;
      const auto rank = [&](size_t j) {
        return std::pair(kvjax::BucketOf(static_cast<uint64_t>(state.keys[j])), state.keys[j]);
      };
      CHECK(rank(i - 1) < rank(i));
    }
  }
}

TEST(NeitherOrderNorSplitMatters) {
  for (const Kind kind : {Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    const auto spec = Spec({.kind = kind,
                            .threshold = 4,
                            .cells = kind == Kind::kSketch ? 4u : 0u,  // most keys of a bucket collide
                            .halve_every = 5,
                            .probability = 0.5});
    Live sorted(spec), reversed(spec), split(spec);
    data::Stream stream(9);
    const Keys universe = Universe(100);
    for (int64_t step = 1; step <= 60; ++step) {
      Batch batch(stream, universe, 2);
      sorted.Begin(batch.keys, batch.counts, {}, step);
      for (size_t i = 0; i < batch.keys.size(); ++i) {
        split.Begin({batch.keys[i]}, {batch.counts[i]}, {}, step);
      }
      split.Begin({}, {}, {}, step);
      std::reverse(batch.keys.begin(), batch.keys.end());
      std::reverse(batch.counts.begin(), batch.counts.end());
      reversed.Begin(batch.keys, batch.counts, {}, step);
    }
    CHECK(data::Same(State(sorted), State(reversed)));
    // A key of a sketch may be admitted sooner once its neighbours have been counted.
    if (kind != Kind::kSketch) CHECK(data::Same(State(sorted), State(split)));
    const auto size = sorted.Size(sorted.version());
    CHECK(size > 20 && size < 100);
  }
}

TEST(ABatchMayCountAsOneOccurrence) {
  auto spec = Spec({.kind = Kind::kMinCount, .threshold = 3});
  spec.count_batches = true;
  Live table(spec);
  for (int step = 0; step < 3; ++step) {
    CHECK(!table.Of(7).found);
    table.Begin({7}, {100});
  }
  CHECK_EQ(table.Of(7).frequency, 3);
  table.Begin({7}, {100});
  CHECK_EQ(table.Of(7).frequency, 4);
}

TEST(CountsDoNotOverflow) {
  Live table(Spec({.kind = Kind::kMinCount, .threshold = kNoRow - 1}));
  table.Begin({7, 8}, {INT32_MAX, INT32_MAX});
  CHECK_EQ(table.Size(table.version()), 0u);
  table.Begin({7, 8}, {INT32_MAX, INT32_MAX - 1});
  CHECK_EQ(table.Of(7).frequency, int64_t{kNoRow} - 1);
  CHECK(!table.Of(8).found);
  table.Begin({8}, {INT32_MAX});  // more than the count can hold
  CHECK_EQ(table.Of(8).frequency, int64_t{kNoRow} - 1);
  table.Begin({8}, {INT32_MAX});
  CHECK_EQ(table.Of(8).frequency, int64_t{kNoRow} - 1 + INT32_MAX);
  // Frequencies have 62 bits and stay at the largest.
  kvjax::Snapshot s = table.Copy();
  s.frequencies = {INT64_MAX, static_cast<int64_t>(kvjax::kMaxFrequency) - 5};
  table.Restore(data::View(s));
  table.Begin({7, 8}, {6, 6});
  for (const uint64_t key : {7u, 8u}) {
    CHECK_EQ(table.Of(key).frequency, static_cast<int64_t>(kvjax::kMaxFrequency));
  }
}

TEST(ASketchNeverEstimatesTooLittle) {
  for (const uint32_t cells : {4u, 16u}) {
    Admission sketch({.kind = Kind::kSketch, .threshold = 3, .cells = cells});
    const size_t bytes = sketch.bytes();
    CHECK_EQ(bytes, size_t{65536} * cells * 2);
    data::Stream stream(cells);
    const Keys universe = Universe(50'000);
    std::map<uint64_t, uint32_t> exact;
    for (int64_t step = 1; step <= 40; ++step) {
      std::map<uint64_t, uint32_t> seen;
      for (int i = 0; i < 3000; ++i) ++seen[universe[stream.Below(universe.size())]];
      Keys keys;
      Counts counts;
      for (const auto& [key, count] : seen) keys.push_back(key), counts.push_back(count);
      const auto decision = Step(sketch, keys, counts, step - 1, step);
      for (size_t i = 0; i < keys.size(); ++i) {
        const uint32_t total = exact[keys[i]] += counts[i];
        CHECK(decision.totals[i] >= std::min(total, 3u));
        if (total >= 3) CHECK(decision.admitted[i]);
      }
    }
    CHECK_EQ(sketch.bytes(), bytes);
    CHECK_EQ(sketch.tracked(), 0u);
  }
}

TEST(ASketchSeldomAdmitsTooSoon) {
  // 100,000 keys that occur once, 1.5 to a bucket of 4 rows of 16 cells. One is admitted by mistake if others
  // cover all its 4 cells: some (1.5 / 16)^4 of them, or 8.
  Admission sketch({.kind = Kind::kSketch, .threshold = 2, .cells = 64});
  data::Stream stream(2);
  size_t wrong = 0;
  for (int64_t step = 1; step <= 100; ++step) {
    Keys keys;
    for (int i = 0; i < 1000; ++i) keys.push_back(stream.Next());
    const auto decision = Step(sketch, keys, Counts(1000, 1), step - 1, step);
    wrong += static_cast<size_t>(std::count(decision.admitted.begin(), decision.admitted.end(), 1));
  }
  CHECK(wrong < 100);
}

TEST(ASketchForgetsByHalves) {
  const AdmissionSpec spec{.kind = Kind::kSketch, .threshold = 100, .cells = 64, .halve_every = 10};
  const auto total_after = [&](int64_t last, int64_t step) {
    Admission sketch(spec);
    Step(sketch, {5}, {40}, 0, 1);
    const auto decided = sketch.Decide({5}, {0}, last, step).totals[0];
    Step(sketch, {6}, {1}, last, step);  // the cells are halved whoever comes
    CHECK_EQ(sketch.Decide({5}, {0}, step, step).totals[0], decided);
    return decided;
  };
  CHECK_EQ(total_after(1, 9), 40u);
  CHECK_EQ(total_after(1, 10), 20u);
  CHECK_EQ(total_after(9, 19), 20u);
  CHECK_EQ(total_after(1, 35), 5u);
  CHECK_EQ(total_after(1, INT64_MAX), 0u);
  CHECK_EQ(total_after(30, 11), 40u);  // an old step brings nothing back
}

TEST(ASketchSaturates) {
  Admission sketch({.kind = Kind::kSketch, .threshold = 65535, .cells = 4});
  CHECK(!Step(sketch, {5}, {65534}, 0, 1).admitted[0]);
  CHECK_EQ(sketch.Decide({5}, {0}, 1, 1).totals[0], 65534u);
  CHECK(Step(sketch, {5}, {3'000'000'000u}, 1, 1).admitted[0]);
  CHECK(Step(sketch, {5}, {3'000'000'000u}, 1, 1).admitted[0]);
  CHECK_EQ(sketch.Decide({5}, {0}, 1, 1).totals[0], 65535u);
  CHECK_EQ(Step(sketch, {5}, {kNoRow}, 1, 1).totals[0], kNoRow - 1);
  sketch.Clear();
  CHECK_EQ(sketch.Decide({5}, {0}, 1, 1).totals[0], 0u);
}

TEST(ProbabilityAdmitsItsShare) {
  constexpr int kKeys = 20'000;
  const auto admitted = [](double p, uint64_t seed, uint32_t count) {
    Admission admission({.kind = Kind::kProbability, .probability = p, .seed = seed});
    Keys keys;
    for (uint64_t key = 0; key < kKeys; ++key) keys.push_back(key);
    const auto d = Step(admission, keys, Counts(kKeys, count), 0, 1);
    CHECK_EQ(admission.bytes(), 0u);
    return d.admitted;
  };
  for (const double p : {0.03, 0.3, 0.9}) {
    const auto chosen = admitted(p, 1, 1);
    const auto share = static_cast<double>(std::count(chosen.begin(), chosen.end(), 1));
    CHECK(std::fabs(share - p * kKeys) < 5 * std::sqrt(p * (1 - p) * kKeys));
    CHECK(chosen == admitted(p, 1, 9));  // a refused key stays so
    CHECK(chosen != admitted(p, 2, 1));
    const auto more = admitted(p + 0.1, 1, 1);
    for (size_t i = 0; i < kKeys; ++i) CHECK(chosen[i] <= more[i]);
  }
  const auto none = admitted(0.0, 1, 1), all = admitted(1.0, 1, 1);
  CHECK_EQ(std::count(none.begin(), none.end(), 0), kKeys);
  CHECK_EQ(std::count(all.begin(), all.end(), 1), kKeys);
}

TEST(TrainingGoesOnAfterARestore) {
  for (const Kind kind : {Kind::kEvery, Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    const auto spec = Spec({.kind = kind,
                            .threshold = 5,
                            .cells = kind == Kind::kSketch ? 4u : 0u,
                            .halve_every = 7,
                            .probability = 0.5});
    data::Stream stream(4);
    const Keys universe = Universe(100);
    Live table(spec), restored(spec);
    for (int step = 0; step < 60; ++step) {
      const Batch batch(stream, universe, 2);
      table.Begin(batch.keys, batch.counts);
      if (step == 30) {
        restored.Train({1, 2, 3});
        const State state(table);
        restored.Restore(data::View(state.rows), state.admission);
        CHECK(data::Same(state, State(restored)));
      } else if (step > 30) {
        restored.Begin(batch.keys, batch.counts);
      }
    }
    CHECK(data::Same(State(table), State(restored)));
    table.Clear(table.version());
    CHECK(data::Same(State(table), State(Live(spec))));
  }
}

TEST(FrequenciesBeginWithWhatAdmissionHasCounted) {
  for (const Kind kind : {Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    Live table(
        Spec({.kind = kind, .threshold = 5, .cells = kind == Kind::kSketch ? 64u : 0u, .probability = 1.0}));
    table.Begin({7}, {4});
    CHECK_EQ(table.Of(7).frequency, 4);  // also while it waits
    table.Begin({7}, {3});
    CHECK_EQ(table.Of(7).frequency, 7);
    table.Begin({7}, {2});
    CHECK_EQ(table.Of(7).frequency, 9);
  }
}

TEST(AdmittedKeysGiveTheirMemoryBack) {
  Live table(Spec({.kind = Kind::kMinCount, .threshold = 2}));
  const auto bytes = [&] {
    return table.Observe([](const kvjax::Contents& c) { return c.admission.bytes(); });
  };
  Keys keys = data::kAwkward;
  for (uint64_t key = 10; key < 5010; ++key) keys.push_back(key);
  table.Train(keys);
  table.Train({9'000'000});  // still waits
  const size_t most = bytes();
  table.Train(keys);
  CHECK(16 * bytes() < most);
  CHECK_EQ(table.ExportAdmission(table.version()).keys.size(), 1u);
  table.Train({9'000'000});
  CHECK(table.Of(9'000'000).found);
}

TEST(RowsThatAreLoadedDoNotWait) {
  const auto spec = Spec({.kind = Kind::kMinCount, .threshold = 3});
  Live source(spec), table(spec);
  source.Begin({1, 2, 3}, {2, 2, 3});
  State state(source);
  source.Ensure({1});
  state.rows = source.Copy();  // key 1 both waits and has a row
  table.Restore(data::View(state.rows), state.admission);
  CHECK(table.ExportAdmission(table.version()).keys == std::vector<int64_t>{2});
  table.Drop({1});
  table.Begin({1, 2}, {2, 1});
  CHECK(table.KeySet() == std::set<uint64_t>({2, 3}));
}

TEST(AStateOfAnotherAdmissionIsLeftOut) {
  const Admission min_count({.kind = Kind::kMinCount, .threshold = 9});
  const Admission sketch({.kind = Kind::kSketch, .threshold = 9, .cells = 4});
  const AdmissionState mixed{{1, 1, 2, 3}, {5, 6, -7, INT64_MAX}, std::vector<uint16_t>(65536 * 4, 3)};
  AdmissionState got = min_count.With(mixed).Save();
  CHECK_EQ(got.keys.size(), 3u);
  CHECK(got.cells.empty());
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(got.counts[i], got.keys[i] == 1 ? 5 : got.keys[i] == 2 ? 0 : int64_t{kNoRow} - 1);
  }
  got = sketch.With(mixed).Save();
  CHECK(got.keys.empty() && got.cells == mixed.cells);
  CHECK(sketch.With({{}, {}, {1, 2}}).Save().cells == std::vector<uint16_t>(65536 * 4));
}

}  // namespace cpu_admit
