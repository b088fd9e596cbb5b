// The device table on a queue that does what it is asked for later, as a GPU does: the host must neither read
// what is not there yet, nor give back memory that is still to be used, nor let more rows come than there is
// space for.
#include "kvjax/ffi/device/backend_bags.h"
#include "tests/cpp/support/later.h"

namespace device_queue {

using data::Keys;
using device::Of;
using kvjax::Op;
using kvjax::TableSpec;
using kvjax::device::Budget;
using later::Chain;
using later::Later;

/// A training step, with slots or without, that gives all its rows one value.
void Train(data::Live& cpu, Chain& gpu, const Keys& batch, bool with_slots, float value) {
  struct Step {
    Keys keys;
    std::vector<int32_t> counts;
    data::Floats rows, slots;  // what is written; and as gradients, which nobody looks at
    std::vector<uint32_t> canaries;
    int64_t at;
  };
  const std::set<uint64_t> distinct(batch.begin(), batch.end());
  const auto dim = static_cast<size_t>(cpu.spec().dim);
  const size_t n = distinct.size();
  Step& s = gpu.Keep(Step{.keys = Keys(distinct.begin(), distinct.end()),
                          .counts = std::vector<int32_t>(n, 2),
                          .rows = data::Floats(n * dim, value),
                          .slots = data::Floats(n * dim, -value),
                          .canaries = {kvjax::kCanary},
                          .at = -1});
  const auto layout = with_slots ? device::Momentum(cpu.spec().dim) : kvjax::SlotLayout();
  std::vector<const std::byte*> slots;
  if (with_slots) slots.push_back(data::Bytes(s.slots));
  gpu.Write([&](auto* by, auto* next) {
    gpu.table.WriteStep(gpu.q, {.step = {.version = by,
                                         .keys = data::Span(s.keys),
                                         .gradients = {s.counts.data(), s.rows.data(), s.canaries.data(), 1},
                                         .step = &s.at,
                                         .layout = layout},
                                .values = data::Bytes(s.rows),
                                .slots = slots,
                                .next = next});
  });
  const auto targets = cpu.Open(s.keys, s.counts, layout);
  cpu.Scatter(kvjax::Serial, cpu.token, targets.data(), targets.size(), data::Bytes(s.rows), slots, true);
}

/// Writes that make and erase rows, the same on the CPU.
void Churn(const TableSpec& spec, uint64_t seed, int steps, uint64_t universe, size_t most, size_t reserve,
           Budget budget = {}) {
  data::Live cpu(spec, std::make_shared<kvjax::HostSlabs>(), 1);
  Chain gpu(spec, budget);
  auto& t = gpu.table;
  data::Stream stream(seed);
  device::Sunk sunk[2];
  if (!spec.policy.empty()) {
    const auto score = [](std::string_view, const kvjax::Snapshot& rows, std::vector<double>& out) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<double>(rows.keys[i] % 7);
    };
    cpu.SetScore(score), t.SetScore(score);
    const auto keep = [](device::Sunk& in) {
      return [&in](kvjax::Snapshot rows, std::string_view why) { in.emplace_back(why, std::move(rows)); };
    };
    cpu.SetSink(keep(sunk[0])), t.SetSink(keep(sunk[1]));
  }
  const auto dim = static_cast<size_t>(spec.dim);
  const auto compare = [&] {
    const uint32_t live = gpu.Now();
    CHECK_EQ(live, cpu.version());
    CHECK(data::Same(t.Export(live, true), cpu.Copy()));
    const auto counted = device::Counted(t);
    CHECK(counted == device::Counted(cpu));
    CHECK(counted.at("size") <= t.Stats().capacity);
    CHECK(std::equal(sunk[0].begin(), sunk[0].end(), sunk[1].begin(), sunk[1].end(),
                     [](auto& a, auto& b) { return a.first == b.first && data::Same(a.second, b.second); }));
  };
  for (int step = 0; step < steps; ++step) {
    Later::lag = stream.Below(3) == 0 ? stream.Below(400) : 40;
    Keys batch;
    for (size_t i = stream.Below(most + 1); i > 0; --i) batch.push_back(1 + stream.Below(universe));
    const Keys& keys = gpu.Keep(batch);
    const uint32_t v = cpu.version();
    switch (stream.Below(13)) {
      case 0:
      case 1:
      case 2:
        cpu.Ensure(keys);
        gpu.Write([&](auto* by, auto* next) {
          t.Insert(gpu.q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next));
        });
        break;
      case 3:
      case 4:
        cpu.Drop(keys);
        gpu.Write(
            [&](auto* by, auto* next) { t.Remove(gpu.q, Of(Op::kRemove, by, keys, nullptr, {}, next)); });
        break;
      case 5: {
        const auto& values = gpu.Keep(data::Floats(keys.size() * dim, static_cast<float>(step)));
        cpu.Put(keys, values);
        gpu.Write([&](auto* by, auto* next) {
          t.Upsert(gpu.q, Of(Op::kUpsert, by, keys, nullptr, data::Bytes(values), {}, next));
        });
        break;
      }
      case 6: {
        const auto& deltas = gpu.Keep(data::Floats(keys.size() * dim, 0.5f));
        cpu.Add(kvjax::Serial, v, data::Span(keys), deltas.data(), {});
        gpu.Write([&](auto* by, auto* next) {
          t.Add(gpu.q, Of(Op::kAdd, by, keys, nullptr, data::Bytes(deltas), {}, next));
        });
        break;
      }
      case 7: {
        const auto& rows = gpu.Keep(data::Floats(keys.size() * dim, 1.5f));
        const auto& exists = gpu.Keep(device::Mask(new bool[keys.size()]));
        for (size_t i = 0; i < keys.size(); ++i) exists[i] = stream.Below(2) == 0;
        cpu.Accum(kvjax::Serial, v, data::Span(keys), rows.data(), rows.data(), exists.get());
        gpu.Write([&](auto* by, auto* next) {
          t.Accum(gpu.q, {.version = by,
                          .keys = data::Span(keys),
                          .old_rows = rows.data(),
                          .new_rows = rows.data(),
                          .exists = exists.get(),
                          .next = next});
        });
        break;
      }
      case 8:
        if (stream.Below(4) != 0) break;
        cpu.Evict("few\nleast_recent:9");
        gpu.Write([&](auto* by, auto* next) {
          const auto& at = gpu.Keep(int64_t{-1});
          t.Evict(gpu.q, {.version = by,
                          .policy = kvjax::Policy::Parse("few\nleast_recent:9"),
                          .step = &at,
                          .next = next});
        });
        break;
      case 9:
        if (stream.Below(6) != 0) break;
        cpu.Clear(v);
        gpu.Write([&](auto* by, auto* next) { t.Clear(gpu.q, {.version = by, .next = next}); });
        break;
      case 11:
        Train(cpu, gpu, keys, stream.Below(2) == 0, static_cast<float>(step));
        break;
      case 10:
        if (stream.Below(4) == 0) t.Reserve(gpu.Now(), stream.Below(reserve));
        break;
      default:
        if (stream.Below(4) == 0) compare();
    }
  }
  compare();
}

TEST(RoomIsEnoughHoweverFarTheDeviceIsBehind) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Churn(data::Spec(1), seed, 250, 60, 8, 60);        // about the smallest index, of space for 56
    Churn(data::Spec(1), seed, 150, 130, 30, 113);     // and the next one
    Churn(data::Spec(1), seed, 120, 100000, 60, 300);  // ever new keys
  }
}

TEST(TheHostStaysAheadOfKeysThatAreKnown) {
  Chain gpu(data::Spec(1));
  const Keys& keys = gpu.Keep(Keys{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  Later::lag = 10000;
  for (int step = 0; step < 30; ++step) {
    const size_t idle = Later::idle;
    gpu.Write([&](auto* by, auto* next) {
      gpu.table.Insert(gpu.q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next));
    });
    if (step > 10) CHECK_EQ(Later::idle, idle);
  }
  CHECK_EQ(gpu.table.Size(gpu.Now()), 10u);
}

TEST(RowsOfManySlabs) {
  // Four rows to a slab: one row too many is beyond the memory.
  TableSpec spec = data::Spec(1 << 17);
  spec.initializer = data::Elements(kvjax::Distribution::Kind::kConstant, 0.25);
  Churn(spec, 9, 60, 14, 4, 10);
}

TEST(RowsInTwoMemories) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Churn(data::Spec(3), seed, 200, 130, 60, 113, {.bytes = 1024, .slab_bytes = 256});
    Churn(data::Spec(3), seed, 100, 100000, 60, 300, {.bytes = 0, .slab_bytes = 256});
  }
}

TEST(TablesThatAreFullSettleFirst) {
  TableSpec spec = data::Spec(2);
  spec.max_capacity = 40;
  spec.on_full = kvjax::OnFull::kEvict;
  for (uint64_t seed = 1; seed <= 3; ++seed) Churn(spec, seed, 150, 90, 20, 60);
  spec.policy = kvjax::Policy::Parse("low\nlowest_score:needed:f\nleast\nmin_score:1:f");
  Churn(spec, 4, 100, 90, 20, 60);  // with functions of the user
}

TEST(FullTablesDoNotWait) {
  TableSpec spec = data::Spec(2);
  spec.max_capacity = 100;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse("stale\nleast_frequent:needed:3.5 min_norm:0.5 not and");
  spec.evict_every = 7;
  data::Live cpu(spec);
  Chain gpu(spec);
  data::Stream stream(3);
  const data::Floats zeros(40);
  const auto step = [&] {
    device::Gradients made;
    for (uint64_t i = 0; i < 20; ++i) made.keys.push_back(1000 * stream.Below(50) + i);
    made.counts.resize(20, 1);
    made.rows.resize(40);
    const device::Gradients& g = gpu.Keep(std::move(made));
    const auto targets = cpu.Open(g.keys, g.counts);
    cpu.Scatter(kvjax::Serial, cpu.token, targets.data(), targets.size(), data::Bytes(zeros), {}, true);
    gpu.Write([&](auto* by, auto* next) {
      gpu.table.WriteStep(gpu.q, {.step = {.version = by,
                                           .keys = data::Span(g.keys),
                                           .gradients = {g.counts.data(), g.rows.data()},
                                           .step = &g.step},
                                  .values = data::Bytes(zeros),
                                  .next = next});
    });
  };
  const auto prune = [&] {
    const int64_t& now = gpu.Keep(int64_t{-1});
    cpu.Evict("restrict\nleast_recent:-95");
    gpu.Write([&](auto* by, auto* next) {
      gpu.table.Evict(gpu.q, {.op = Op::kRestrict,
                              .version = by,
                              .policy = kvjax::Policy::Parse("restrict\nleast_recent:-95"),
                              .step = &now,
                              .next = next});
    });
  };
  Later::lag = 0;
  for (int i = 0; i < 40; ++i) step();  // the index has grown, too
  CHECK_EQ(gpu.table.Size(gpu.Now()), 100u);
  const size_t asked = Later::asked;
  step();
  Later::lag = 3 * (Later::asked - asked) / 2;
  Later::waits = 0;
  for (int i = 0; i < 40; ++i) {
    step();
    if (i % 10 == 0) prune();
  }
  CHECK_EQ(Later::waits, 0u);
  const uint32_t live = gpu.Now();
  CHECK_EQ(live, cpu.version() + 1);
  CHECK(data::Same(gpu.table.Export(live, true), cpu.Copy()));
  CHECK(device::Counted(gpu.table) == device::Counted(cpu));
  CHECK(device::Counted(gpu.table).contains("evicted capacity"));
}

TEST(WhatFollowsARefusedWriteIsRefusedToo) {
  Chain gpu(data::Spec(1));
  auto& t = gpu.table;
  Later::lag = 100000;
  const Keys a = {1, 2}, b = {3, 4}, c = {5};
  const auto insert = [&](const Keys& keys) {
    gpu.Write(
        [&](auto* by, auto* next) { t.Insert(gpu.q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next)); });
  };
  uint32_t* const old = gpu.handle;
  insert(a);
  uint32_t* const live = gpu.handle;
  gpu.handle = old;
  insert(b);
  t.Remove(gpu.q, Of(Op::kRemove, gpu.handle, a, nullptr, {}, gpu.Word()));
  insert(c);
  CHECK_THROWS(kFailedPrecondition, gpu.Now());
  CHECK_EQ(*live, 2u);
  CHECK_EQ(*gpu.handle, 1u);  // as stale as what it was made from
  CHECK_EQ(t.Size(2), 2u);
  gpu.handle = live;
  insert(c);
  CHECK_EQ(t.Size(gpu.Now()), 3u);
}

/// A table of the keys 1 and 2, and calls through a handle that is stale.
struct Stale : Chain {
  Stale() : Chain(data::Spec(1)) {
    uint32_t* const first = handle;
    Write(
        [&](auto* by, auto* next) { table.Insert(q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next)); });
    live = Now();
    old = first;
    Later::lag = 100000;
  }
  void Refuse() { table.Remove(q, Of(Op::kRemove, old, keys, nullptr, {}, Word())); }
  /// Through a handle without a version.
  void Follow() {
    table.Lookup(q, {.version = nullptr, .keys = data::Span(keys), .rows = rows, .found = found});
  }

  const Keys keys = {1, 2};
  uint32_t live = 0;
  uint32_t* old = nullptr;
  std::byte rows[8];
  bool found[2] = {};
};

TEST(AFollowingReadLeavesToOthersWhatTheyWereRefusedFor) {
  Stale t;
  t.Refuse();
  t.q.Wait();
  t.Follow();
  t.q.Wait();
  CHECK(t.found[0] && t.found[1]);
  CHECK_THROWS(kFailedPrecondition, t.table.Raise());
  CHECK_EQ(t.table.Size(t.live), 2u);
}

TEST(WhatIsLoadedLeavesRefusalsAsTheyAre) {
  Stale t;
  const kvjax::Snapshot rows = t.table.Export(t.live, true);
  t.Refuse();
  auto loaded = data::Ready(t.table, t.live, data::View(rows));  // between a refusal and its error
  CHECK_THROWS(kFailedPrecondition, t.table.Raise());
  CHECK_EQ(t.table.Size(t.live), 2u);
  t.live = t.table.CommitLoad(std::move(loaded));
  t.Refuse();
  t.q.Wait();
  CHECK_THROWS(kFailedPrecondition, t.table.Raise());  // and not kept as one that nobody has raised yet
}

TEST(WhereAFillFailsTheDeviceIsToldLater) {
  Stale t;
  t.Refuse();
  t.q.Wait();
  CHECK_THROWS(kFailedPrecondition, t.table.Raise());
  Later::fills = false;
  bool threw = false;
  try {
    (void)t.table.Size(t.live);
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  CHECK(threw);
  Later::fills = true;
  CHECK_EQ(t.table.Size(t.live), 2u);
  t.Refuse();
  t.q.Wait();
  CHECK_THROWS(kFailedPrecondition, t.table.Raise());
}

TEST(TheEndOfAReportThrowsNothing) {
  Stale t;
  {
    const kvjax::device::OwnReport<Later> report(t.q, &t.table, Op::kValueAndGrad);
    t.Refuse();
    t.q.Wait();
    CHECK_THROWS(kFailedPrecondition, t.table.Raise());
    Later::fills = false;
  }
  Later::fills = true;
  CHECK_EQ(t.table.Size(t.live), 2u);
}

}  // namespace device_queue
