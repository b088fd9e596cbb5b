// Every allocation of every write fails once: the table must then be as it was, and work on.
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "tests/cpp/support/guarantee.h"

namespace {

using kvjax::AdmissionSpec, kvjax::Call, kvjax::OwnBatch;

/// From rows and from none: memory for the first rows is asked for elsewhere.
void CheckKeys(const Op& op, int at_least) {
  CheckStrongGuarantee({op, at_least});
  CheckStrongGuarantee({.op = op, .at_least = at_least, .fill = Nothing});
}

TEST(InsertUpsertAndPin) {
  CheckKeys([](Live& t) { t.Ensure(kMany); }, 8);
  CheckKeys([](Live& t) { t.Put(kMany, Values()); }, 8);
  CheckKeys([](Live& t) { t.Pin(kMany); }, 8);
}

TEST(AssignAddAndAccum) {
  static const auto exists = std::make_unique<bool[]>(kMany.size());
  for (size_t i = 0; i < kMany.size(); ++i) exists[i] = i % 3 == 0;
  CheckStrongGuarantee(
      {[](Live& t) { t.Assign(Serial, t.version(), data::Span(kMany), data::Bytes(Values())); }, 3});
  CheckKeys([](Live& t) { t.Add(Serial, t.version(), data::Span(kMany), Values().data(), {}); }, 10);
  CheckKeys(
      [](Live& t) {
        t.Accum(Serial, t.version(), data::Span(kMany), Values().data(), Values().data(), exists.get());
      },
      9);
}

TEST(BeginApply) {
  CheckKeys([](Live& t) { t.Begin(Range(15, 30), std::vector<int32_t>(15, 3), Layout()); }, 12);
  const Op late = [](Live& t) { t.Train(Range(15, 30), int64_t{1} << 40); };  // makes headers wide
  CheckStrongGuarantee({late, 14, Spec(), Trained});
}

TEST(BeginApplyWithAdmission) {
  using Kind = AdmissionSpec::Kind;
  for (const Kind kind : {Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    TableSpec spec = Spec();
    spec.admission = {.kind = kind,
                      .unadmitted = AdmissionSpec::Unadmitted::kShared,
                      .shared_key = 1ull << 40,
                      .threshold = 3,
                      .cells = kind == Kind::kSketch ? 4u : 0u,
                      .halve_every = 2,
                      .probability = 0.5};
    CheckStrongGuarantee({Train, 12, spec, Trained});
  }
}

TEST(BeginApplyWithEviction) {
  TableSpec spec = Spec();
  spec.max_capacity = 50;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse(
      "a reason that does not fit into a std::string\nmax_age:0 min_frequency:2 and\n"
      "another such reason, as long as the first\nleast_frequent:needed:3.5");
  CheckStrongGuarantee({Train, 25, spec, Trained});  // too many rows
  spec.max_capacity = 0;
  spec.evict_every = 2;
  CheckStrongGuarantee({Train, 25, spec, Trained});  // the second step
  spec.max_capacity = 48;
  CheckStrongGuarantee({Train, 25, spec, Some});  // and slots come with it
}

/// Lists that memory has run out for are as good as none, and none that is left out of date.
TEST(EvictionByShortlists) {
  TableSpec spec = Spec();
  spec.dim = 4;
  spec.max_capacity = 400;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse("two half-lives\nleast_frequent:2:3.5 least_frequent:2:50 or");
  const Op full = [](Live& t) { t.Train(Range(0, 400), 1), t.Train(Range(0, 300), 2); };
  const Op listed = [=](Live& t) { full(t), t.Train(Range(400, 403), 3); };
  const Op step = [](Live& t) { t.Train(Range(403, 408), 4); };
  const Op same = [](Live& t) {
    const Snapshot rows = t.Copy();
    Live without(t.spec());
    without.Restore(data::View(rows));
    for (Live* table : {&t, &without}) table->Train(Range(408, 412), 5);
    CHECK(t.KeySet() == without.KeySet());
  };
  for (const Op& fill : {full, listed}) CheckStrongGuarantee({step, 30, spec, fill, 1, same});
}

TEST(Evict) {
  const Op evict = [](Live& t) { t.Evict("a reason that does not fit into a std::string\nleast_recent:10"); };
  CheckStrongGuarantee({evict, 8, Spec(), Trained});
  CheckStrongGuarantee({[](Live& t) { t.Evict("restrict\nleast_recent:-10"); }, 8, Spec(), Trained});
  const auto with_sink = [](Live& t) {
    Trained(t);
    t.SetSink([](const Snapshot&, std::string_view) {});
  };
  CheckStrongGuarantee({evict, 25, Spec(), with_sink});
}

TEST(Remove) {
  CheckStrongGuarantee({[](Live& t) { t.Drop(Range(0, 40)); }, 1});
}

/// Plans a write, and commits it without memory.
void CheckCommit(const std::function<uint32_t(Live&, Call)>& write) {
  Live whole(Spec()), planned(Spec());
  for (Live* table : {&whole, &planned}) Trained(*table);
  write(whole, whole.version());
  const uint32_t version = planned.version();
  write(planned, {version, kvjax::Phase::kPlan});
  faults = {.armed = true, .for_good = true, .fail_at = 1};
  write(planned, {version, kvjax::Phase::kCommit});
  faults.armed = false;
  CHECK_EQ(faults.count, 0);
  CHECK(data::Same(State(whole), State(planned)));
}

TEST(CommitsTakeNoMemory) {
  static const auto mask = std::make_unique<bool[]>(kMany.size());
  for (size_t i = 0; i < kMany.size(); ++i) mask[i] = i % 5 != 0;
  const auto own = [&](auto write) {  // as a backend does it
    CheckCommit([=](Live& t, Call c) {
      const bool kept = c.phase == kvjax::Phase::kCommit;
      OwnBatch batch = kept ? t.TakeBatch(c.version) : OwnBatch(data::Span(kMany), mask.get());
      const uint32_t next = write(t, c, batch);
      if (c.phase == kvjax::Phase::kPlan) t.KeepBatch(c.version, std::move(batch));
      return next;
    });
  };
  own([](Live& t, Call c, OwnBatch& b) { return t.Insert(Serial, c, b.keys.keys(), {}); });
  own([](Live& t, Call c, OwnBatch& b) { return t.Table::Pin(Serial, c, b.keys.keys(), {}); });
  for (const auto write : {&kvjax::Table::Unpin, &kvjax::Table::Remove})
    own([write](Live& t, Call c, OwnBatch& b) { return (t.*write)(c, b.keys.keys()); });
  for (const auto write : {&kvjax::Table::Upsert, &kvjax::Table::Assign}) {
    own([write](Live& t, Call c, OwnBatch& b) {
      const auto* const rows = b.keys.Rows(data::Bytes(Values()), 4 * kDim, b.rows);
      return (t.*write)(Serial, c, b.keys.keys(), rows);
    });
  }
  own([](Live& t, Call c, OwnBatch& b) {
    return t.Add(Serial, c, b.keys.keys(), b.keys.Rows(Values().data(), kDim, b.old_rows), {});
  });
  own([](Live& t, Call c, OwnBatch& b) {
    const float* const rows = b.keys.Rows(Values().data(), kDim, b.old_rows);
    const auto* const exists = b.keys.Rows(reinterpret_cast<const uint8_t*>(mask.get()), 1, b.exists);
    return t.Accum(Serial, c, b.keys.keys(), rows, rows, reinterpret_cast<const bool*>(exists));
  });
  CheckCommit([](Live& t, Call c) {
    static const auto policy = kvjax::Policy::Parse("r\nleast_recent:12");
    return t.Table::Evict(Serial, "evict", c, policy, 0);
  });
  for (const auto write : {&kvjax::Table::Clear, &kvjax::Table::ClearSlots})
    CheckCommit([write](Live& t, Call c) { return (t.*write)(c); });
}

TEST(TheCommitOfAStepTakesNoMemory) {
  Live table(Spec());
  Trained(table);
  const Keys keys = Range(15, 60);
  const data::Floats rows(keys.size() * kDim, 0.5f);
  const uint32_t version = table.version();
  const int64_t next = -1;
  table.Receive(Serial, version, data::Span(keys), std::vector<int32_t>(keys.size(), 2).data(), rows.data(),
                1, 0, 1, {});
  kvjax::ShardSummary summary;
  table.PlanStep(Serial, {.version = &version, .step = &next, .layout = Layout()}, summary);
  CHECK(!table.Prepare(Serial, "apply", version, {summary}, 0));
  int32_t active = 0;
  int64_t step = 0;
  data::Floats values(keys.size() * kDim), slot(keys.size() * kDim);
  const auto to = [](auto& v) { return reinterpret_cast<std::byte*>(v.data()); };
  const auto fresh = std::make_unique<bool[]>(keys.size());
  const std::vector<std::byte*> gathered = {to(slot)};
  const std::vector<const std::byte*> scattered(gathered.begin(), gathered.end());
  faults = {.armed = true, .for_good = true, .fail_at = 1};
  const uint32_t token = table.CommitStep(Serial, version, &active, &step);
  const auto n = static_cast<size_t>(active);
  const auto* const targets = table.shard_step().targets.data();
  table.Gather(Serial, token, targets, n, to(values), fresh.get(), gathered);
  table.Scatter(Serial, token, targets, n, to(values), scattered, /*last=*/true, /*holds=*/true);
  CHECK_EQ(table.version(), version);
  CHECK_EQ(table.CommitStep(Serial, version, &active, &step), version + 1);
  faults.armed = false;
  CHECK_EQ(faults.count, 0);
  CHECK(n == keys.size() && step == 2 && table.version() == version + 1);
}

TEST(AStepOfAShard) {
  const Op step = [](Live& t) {
    const Keys keys = Range(15, 60);
    const data::Floats rows(keys.size() * kDim, 0.5f);
    const uint32_t version = t.version();
    const int64_t next = -1;
    int32_t active = 0;
    int64_t used = 0;
    for (int32_t round = 0; round < 3; ++round) {
      t.Receive(Serial, version, {keys.data() + 15 * round, 15}, std::vector<int32_t>(15, 2).data(),
                rows.data(), 1, round, 3, {});
    }
    kvjax::ShardSummary summary;
    t.PlanStep(Serial, {.version = &version, .step = &next}, summary);
    CHECK(!t.Prepare(Serial, "apply", version, {summary}, 0));
    const uint32_t token = t.CommitStep(Serial, version, &active, &used);
    t.Scatter(Serial, token, nullptr, 0, nullptr, {}, /*last=*/true, /*holds=*/true);
    t.CommitStep(Serial, version, &active, &used);
  };
  CheckStrongGuarantee({step, 20, Spec(), Some});
}

TEST(RemovalOneByOneSeldomAllocates) {
  // Else each would copy the list of free rows.
  Live table(1);
  table.Ensure(Range(0, 5000));
  faults = {.armed = true};
  for (uint64_t key = 0; key < 5000; ++key) {
    const uint64_t removed = key;
    table.Remove(table.version(), {&removed, 1});
  }
  faults.armed = false;
  CHECK(faults.count < 60);
}

TEST(ClearAndClearSlots) {
  CheckStrongGuarantee({[](Live& t) { t.Clear(t.version()); }, 0});
  CheckStrongGuarantee({[](Live& t) { t.ClearSlots(t.version()); }, 0, Spec(), Trained});
}

TEST(ASinkThatCannotBeSetLeavesTheOld) {
  Live table(1);
  int calls = 0;
  table.SetSink([&](const Snapshot&, std::string_view) { ++calls; });
  faults = {true, true, 0, 1};
  bool failed = false;
  try {
    table.SetSink([](const Snapshot&, std::string_view) { throw 1; });
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  faults.armed = false;
  CHECK(failed);
  table.Ensure({1, 2});
  table.Evict("all\nleast_recent:9");
  CHECK_EQ(calls, 1);
}

}  // namespace
