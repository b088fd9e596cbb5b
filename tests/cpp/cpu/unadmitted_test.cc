// Keys without a row: what they read as, which row their gradients train, and initial rows that come with a
// call.
#include <algorithm>
#include <memory>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_unadmitted {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::AdmissionSpec;
using kvjax::Missing;
using kvjax::Table;
using Unadmitted = AdmissionSpec::Unadmitted;

constexpr uint64_t kShared = 1ull << 50;

kvjax::TableSpec Spec(Unadmitted unadmitted) {
  kvjax::TableSpec spec = data::Spec(2);
  spec.admission = {.kind = AdmissionSpec::Kind::kMinCount,
                    .unadmitted = unadmitted,
                    .shared_key = kShared,
                    .threshold = 100};
  return spec;
}

Floats Initial(uint64_t key) {
  const Live blank(2);
  return blank.Rows({key});
}

TEST(WhatAKeyWithoutARowReadsAs) {
  for (const Unadmitted unadmitted : {Unadmitted::kInitial, Unadmitted::kZeros, Unadmitted::kShared}) {
    Live table(Spec(unadmitted));
    const bool zeros = unadmitted == Unadmitted::kZeros, shares = unadmitted == Unadmitted::kShared;
    CHECK(table.Rows({3}) == (zeros ? Floats(2) : shares ? Initial(kShared) : Initial(3)));
    table.Put({1, kShared}, {10, 11, 20, 21});
    std::vector<uint8_t> found;
    CHECK(table.Rows({1}, &found) == Floats({10, 11}));
    CHECK(found == std::vector<uint8_t>{1});
    CHECK(table.Rows({3}, &found) == (zeros ? Floats(2) : shares ? Floats({20, 21}) : Initial(3)));
    CHECK(found == std::vector<uint8_t>{0});
    CHECK(table.Rows({3}, &found, Missing::kInitial) == Initial(3));
    // Where the mask is false there is nothing, whatever the key.
    const Keys keys = {1, 3, 3};
    const bool mask[] = {false, true, false};
    bool hits[3];
    Floats rows(6, 7.0f);
    table.Lookup(kvjax::Serial, table.version(), data::Span(keys), mask, {}, Missing::kTable,
                 reinterpret_cast<std::byte*>(rows.data()), hits);
    CHECK(Floats(rows.begin(), rows.begin() + 2) == Floats(2));
    CHECK(Floats(rows.begin() + 2, rows.begin() + 4) == table.Rows({3}));
    CHECK(Floats(rows.begin() + 4, rows.end()) == Floats(2));
    CHECK(!hits[0] && !hits[1] && !hits[2]);
  }
}

TEST(GradientsOfUnadmittedKeysAreDropped) {
  for (const Unadmitted unadmitted : {Unadmitted::kInitial, Unadmitted::kZeros}) {
    Live table(Spec(unadmitted));
    table.Ensure({1});
    const auto targets = table.Begin({5, 1, kShared}, {2, 3, 4}, {}, -1, {1, 2, 3, 4, 5, 6});
    CHECK_EQ(targets.size(), 1u);
    CHECK_EQ(targets[0].gradient, 1u);
    CHECK(table.shared_gradient == Floats(2));
    CHECK_EQ(table.Size(table.version()), 1u);
    table.Observe([](const kvjax::Contents& c) { CHECK_EQ(c.counters.refused, 6u); });
  }
}

TEST(TheSharedRowGetsTheSumOfTheirGradients) {
  for (const bool count_batches : {false, true}) {
    for (const bool present : {false, true}) {
      auto spec = Spec(Unadmitted::kShared);
      spec.count_batches = count_batches;
      Live table(spec);
      table.Ensure({1});
      if (present) table.Put({kShared}, {20, 21});
      // 2^24 + 1 - 2^24 is 1, and not 0 as it would be in float32.
      const auto targets =
          table.Open({5, 1, 6, 7}, {2, 3, 4, 5}, {}, 9, {0x1p24f, 1, 50, 50, 1, 2, -0x1p24f, 4});
      CHECK_EQ(targets.size(), 2u);
      CHECK_EQ(targets[0].gradient, 1u);
      CHECK_EQ(targets[1].gradient, Table::kSharedGradient);
      CHECK(table.shared_gradient == Floats({1, 7}));
      Floats out(2);
      bool fresh;
      table.Gather(kvjax::Serial, table.token, &targets[1], 1, reinterpret_cast<std::byte*>(out.data()),
                   &fresh, {});
      table.End();
      CHECK(table.Of(kShared) == (Live::Info{true, count_batches ? 1 : 11, 9}));
      CHECK(table.Of(1) == (Live::Info{true, count_batches ? 1 : 3, 9}));
      CHECK_EQ(table.Size(table.version()), 2u);
      const Floats row = present ? Floats({20, 21}) : Initial(kShared);
      CHECK(table.Rows({kShared}) == row);
      CHECK(table.Rows({5}) == row);
      CHECK(out == row);
    }
  }
}

TEST(TheSharedKeyMayBeInTheBatchItself) {
  for (const bool present : {false, true}) {
    Live table(Spec(Unadmitted::kShared));
    if (present) table.Ensure({kShared});
    auto targets = table.Begin({5, kShared, 6}, {2, 3, 4}, {}, -1, {1, 2, 10, 20, 100, 200});
    CHECK_EQ(targets.size(), 1u);  // one row, one gradient
    CHECK_EQ(targets[0].gradient, Table::kSharedGradient);
    CHECK(table.shared_gradient == Floats({111, 222}));
    CHECK_EQ(table.Of(kShared).frequency, 9);
    CHECK_EQ(table.Size(table.version()), 1u);
    // Alone it is a key like others, admitted at once.
    Live other(Spec(Unadmitted::kShared));
    if (present) other.Ensure({kShared});
    targets = other.Begin({kShared}, {3}, {}, -1, {10, 20});
    CHECK_EQ(targets.size(), 1u);
    CHECK_EQ(targets[0].gradient, 0u);
    CHECK(other.shared_gradient == Floats(2));
    CHECK_EQ(other.Of(kShared).frequency, 3);
  }
}

TEST(TheSumDoesNotDependOnTheOrderOfTheBatch) {
  // 1e8 + 1 - 1e8 needs more than float32; 2^60 + 1 - 2^60 more than double, where an order must be kept.
  for (const float large : {1e8f, 0x1p60f}) {
    using Pair = std::pair<uint64_t, float>;
    for (uint64_t first = 5; first < 50; first += 5) {
      std::vector<Pair> batch = {{first, large}, {first + 1, 1.0f}, {first + 2, -large}, {first + 3, 3.0f}};
      Floats shared_gradient;
      do {
        Live table(Spec(Unadmitted::kShared));
        Keys keys;
        Floats gradients;
        for (const auto& [key, value] : batch) {
          keys.push_back(key);
          gradients.insert(gradients.end(), {value, -value});
        }
        table.Begin(keys, {1, 1, 1, 1}, {}, -1, gradients);
        if (shared_gradient.empty()) shared_gradient = table.shared_gradient;
        CHECK(table.shared_gradient == shared_gradient);
        if (large == 1e8f) CHECK(shared_gradient == Floats({4, -4}));
      } while (std::next_permutation(batch.begin(), batch.end()));
    }
  }
}

TEST(WhatTheNextOccurrenceAdmitsReadsAsItsInitialRow) {
  for (const Unadmitted unadmitted : {Unadmitted::kZeros, Unadmitted::kShared}) {
    auto spec = Spec(unadmitted);
    spec.admission.threshold = 3;
    Live table(spec);
    table.Begin({3, 4}, {2, 1});
    CHECK(table.Rows({3}) == Initial(3));
    CHECK(table.Rows({4}) != Initial(4));
    CHECK_EQ(table.Of(3).frequency, 2);
    bool own[2], found[2];
    Floats rows(4);
    const Keys keys = {3, 4};
    for (const bool with_initial : {false, true}) {
      table.Lookup(kvjax::Serial, table.version(), data::Span(keys), nullptr, {}, Missing::kTable,
                   reinterpret_cast<std::byte*>(rows.data()), with_initial ? own : found, with_initial);
    }
    CHECK(own[0] && !own[1] && !found[0] && !found[1]);
    table.Begin({3, 4}, {1, 5});
    CHECK(table.Of(3).found && !table.Of(4).found);  // however often it is there
    CHECK(table.Rows({4}) == Initial(4));
  }
}

TEST(TheSharedRowIsNeverEvicted) {
  auto spec = Spec(Unadmitted::kShared);
  spec.max_capacity = 3;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse("old\nmax_age:0");
  spec.evict_every = 100;
  spec.admission.threshold = 2;
  Live table(spec);
  const auto keys = [&] { return table.KeySet(); };
  using Set = std::set<uint64_t>;
  table.Ensure({kShared});
  table.Train({9});  // every row has been written later than that of the shared key
  table.Begin({1, 2, 3, 5, 6, 8, 11, 12, 13}, std::vector<int32_t>(9, 1));
  table.Begin({1, 2}, {2, 2});
  table.Begin({3, 4}, {2, 1});  // while gradients train it
  CHECK(keys() == Set({kShared, 3}));
  table.Begin({5, 6}, {2, 2});  // and while none do
  CHECK(keys() == Set({kShared, 5, 6}));
  table.Ensure({7});
  CHECK_EQ(table.Size(table.version()), 3u);
  CHECK(table.Of(kShared).found);
  table.Begin({8}, {2}, {}, 200);  // the policy's time has come
  CHECK(keys() == Set({kShared, 8}));
  const data::State before(table);
  CHECK_THROWS(kResourceExhausted, table.Begin({11, 12, 13}, {2, 2, 2}));  // it is one of three rows
  CHECK(data::Same(before, data::State(table)));
  table.Evict("all\nleast_recent:-0");
  CHECK(keys() == Set{kShared});
  table.Drop({kShared});  // but it may be removed
  CHECK(keys().empty());
  // Where no keys share a row, the key is like others.
  spec.admission.unadmitted = Unadmitted::kZeros;
  Live other(spec);
  other.Ensure({kShared});
  other.Evict("all\nleast_recent:-0");
  CHECK(other.KeySet().empty());
}

/// Rows for new keys as Python makes them: row k of the call is {100 k, key}.
struct Given {
  explicit Given(const Live& table, const Keys& keys) : missing(keys.size() + 1) {
    missing.resize(table.FindMissing(kvjax::Serial, table.version(), data::Span(keys),
                                     data::AllOf(keys.size()), missing.data()));
    for (size_t i = 0; i < missing.size(); ++i) {
      rows.push_back(100 * static_cast<float>(i));
      rows.push_back(static_cast<float>(missing[i]));
    }
  }
  [[nodiscard]] kvjax::InitialRows Initial() const { return {data::Bytes(rows), missing.size()}; }
  Keys missing;
  Floats rows;
};

TEST(InitialRowsMayBeGiven) {
  auto spec = Spec(Unadmitted::kShared);
  spec.initializer.kind = kvjax::Initializer::Kind::kGiven;
  spec.admission.shared_key = 77;
  Live table(spec);
  table.Put({1}, {5, 6});
  const auto lookup = [&](const Keys& keys, Missing missing) {
    const Given given(table, keys);
    Floats rows(2 * keys.size());
    const auto found = std::make_unique<bool[]>(keys.size());
    table.Lookup(kvjax::Serial, table.version(), data::Span(keys), data::AllOf(keys.size()), given.Initial(),
                 missing, reinterpret_cast<std::byte*>(rows.data()), found.get());
    return rows;
  };
  CHECK(Given(table, {4, 1, 3, 4}).missing == Keys({4, 3, 77}));
  CHECK(Given(table, {4, 77, 3}).missing == Keys({4, 77, 3}));
  CHECK(lookup({4, 1, 3, 4}, Missing::kInitial) == Floats({0, 4, 5, 6, 100, 3, 0, 4}));
  CHECK(lookup({4, 1, 3, 4}, Missing::kTable) == Floats({200, 77, 5, 6, 200, 77, 200, 77}));
  CHECK(lookup({4, 77, 3}, Missing::kTable) == Floats({100, 77, 100, 77, 100, 77}));
  CHECK(lookup({}, Missing::kTable).empty());

  const Keys keys = {8, 3, 8};
  table.Insert(kvjax::Serial, table.version(), data::Span(keys), Given(table, keys).Initial());
  CHECK(lookup(keys, Missing::kTable) == Floats({0, 8, 100, 3, 0, 8}));
  // Too few rows change nothing.
  const data::State before(table);
  const Given one(table, {20});
  const Keys many = {30, 31, 32, 33};
  CHECK_THROWS(kInvalidArgument,
               table.Insert(kvjax::Serial, table.version(), data::Span(many), one.Initial()));
  CHECK_THROWS(kInvalidArgument, table.Insert(kvjax::Serial, table.version(), data::Span(many), {}));
  CHECK(data::Same(before, data::State(table)));

  for (const bool in_batch : {false, true}) {
    Live other(spec);
    const Keys batch = in_batch ? Keys{8, 77, 9} : Keys{8, 9};
    other.Begin({9}, {99}, {}, -1, {}, Given(other, {9}).Initial());  // so that the next one admits it
    other.Drop({77});
    const Given given(other, batch);
    const std::vector<int32_t> counts(batch.size(), 1);
    other.Begin(batch, counts, {}, -1, {}, given.Initial());
    CHECK(other.Rows({77, 9}) == (in_batch ? Floats({100, 77, 200, 9}) : Floats({200, 77, 100, 9})));
  }
}

}  // namespace cpu_unadmitted
