// One shard of a sharded table on the device beside one on the CPU: which shard owns a key, how gradients
// arrive, and writes that are planned before they are done. The queue lags behind, as a GPU does.
#include "kvjax/ffi/device/sharded.h"

#include <list>

#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/device/route.h"
#include "tests/cpp/support/later.h"

namespace device_sharded {

using data::Floats;
using data::Keys;
using device::Bytes;
using device::Mask;
using device::Of;
using kvjax::Serial;
using kvjax::device::Threads;
using later::Later;
using Ints = std::vector<int32_t>;

constexpr size_t kDim = 3, kSenders = 3;

struct Batch {
  Batch(size_t n, uint32_t shards) : keys(n, 7), order(n, -5), starts(shards + 1, -5) {
    slot = round = order;
    routed = {keys.data(), order.data(), starts.data(), slot.data(), round.data()};
  }
  bool operator==(const Batch& other) const {
    return keys == other.keys && order == other.order && starts == other.starts && slot == other.slot &&
           round == other.round;
  }
  Keys keys;
  Ints order, starts, slot, round;
  kvjax::Routed routed;
};

TEST(RoutesAreThoseOfTheCpu) {
  data::Stream stream(1);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{300}}) {
    for (const uint32_t shards : {1u, 3u, 8u}) {
      for (const bool given : {false, true}) {
        Keys keys(data::kAwkward.begin(), data::kAwkward.end());
        while (keys.size() < n) keys.push_back(stream.Below(90));
        keys.resize(n);
        Ints owners;
        const Mask mask(new bool[n + 1]);
        for (size_t i = 0; i < n; ++i) {
          owners.push_back(static_cast<int32_t>(keys[i] % shards)), mask[i] = i % 3 != 1;
        }
        const int32_t* const by = given ? owners.data() : nullptr;
        Batch want(n, shards), got(n, shards);
        kvjax::Route("t", data::Span(keys), mask.get(), by, shards, 5, want.routed);
        Threads q(4, 1);
        kvjax::device::RouteKeys(q, keys.data(), {.mask = mask.get()}, {by, shards}, n, 5, got.routed);
        CHECK(want == got);
      }
    }
  }
}

TEST(APartitionerThatIsOutOfRangeIsFound) {
  Threads q(4, 1);
  for (const int32_t bad : {-1, 3, INT32_MIN, INT32_MAX}) {
    const int32_t owners[] = {0, bad, 2, bad};
    const bool valid[] = {true, false, true, true};
    uint32_t unowned = 99;
    kvjax::device::FindUnowned(q, {owners, 3}, {.mask = valid}, 4, &unowned);
    CHECK_EQ(unowned, 3u);
    kvjax::device::FindUnowned(q, {owners, 4}, {.mask = valid}, 1, &unowned);
    CHECK_EQ(unowned, 1u);  // none
  }
}

/// A shard on the CPU and one on the device.
struct Shards {
  explicit Shards(const kvjax::TableSpec& spec)
      : cpu(spec, std::make_shared<kvjax::HostSlabs>(), 1), gpu(spec, Later()) {}

  void Compare() {
    CHECK_EQ(gpu.handle, cpu.version());
    CHECK_EQ(gpu.SettledVersion(), cpu.version());
    CHECK(data::Same(gpu.Copy(), cpu.Copy()));
    CHECK(device::Counted(gpu) == device::Counted(cpu));
  }

  /// Sends random gradients in rounds of `capacity` keys of each sender.
  void Deliver(data::Stream& stream, size_t capacity) {
    std::vector<Keys> sent(kSenders);
    size_t rounds = 1;
    for (Keys& keys : sent) {
      for (uint64_t key = stream.Below(3); key < 60; key += 1 + stream.Below(4)) keys.push_back(key * key);
      rounds = std::max(rounds, (keys.size() + capacity - 1) / capacity);
    }
    for (size_t r = 0; r < rounds; ++r) {
      const size_t n = kSenders * capacity;
      operands.push_back({Keys(n, 99), Ints(n, 0), Floats(n * kDim, 1e30f), {}, {}});
      auto& [keys, counts, rows, initial, turn] = operands.back();
      Keys valid;
      for (size_t s = 0; s < kSenders; ++s) {
        for (size_t i = 0; i < capacity && r * capacity + i < sent[s].size(); ++i) {
          const size_t k = s * capacity + i;
          valid.push_back(keys[k] = sent[s][r * capacity + i]);
          counts[k] = 1 + static_cast<int32_t>(stream.Below(3));
          for (size_t d = 0; d < kDim; ++d)
            rows[k * kDim + d] = static_cast<float>(stream.Below(1'000'000)) * 1e-3f;
        }
      }
      if (cpu.spec().initializer.kind == kvjax::Generator::Kind::kGiven) {
        Keys missing(valid.size() + 1);
        missing.resize(cpu.FindMissing(Serial, cpu.version(), data::Span(valid), nullptr, missing.data()));
        initial = device::RowsFor(missing, cpu.row_bytes());
      }
      turn[0] = static_cast<int32_t>(r), turn[1] = static_cast<int32_t>(rounds);
      const kvjax::InitialRows given{initial.data(), initial.size() / cpu.row_bytes()};
      cpu.Receive(Serial, cpu.version(), data::Span(keys), counts.data(), rows.data(), kSenders, turn[0],
                  turn[1], given);
      gpu.Receive(gpu.q, {.version = &gpu.handle,
                          .keys = data::Span(keys),
                          .gradients = {counts.data(), rows.data()},
                          .senders = kSenders,
                          .round = &turn[0],
                          .rounds = &turn[1],
                          .initial = given});
    }
  }
  void Plan(int64_t step, const kvjax::SlotLayout& layout) {
    kvjax::ShardSummary summary;
    const uint32_t version = cpu.version();
    cpu.PlanStep(Serial, {.version = &version, .step = &step, .layout = layout}, summary);
    CHECK(!cpu.Prepare(Serial, "apply", cpu.version(), {summary}, 0));
    gpu.PlanStep(gpu.q, {.version = &gpu.handle, .step = &step, .layout = layout});
  }
  void Commit(const kvjax::SlotLayout& layout, size_t chunk) {
    int32_t active = -1, gpu_active = -1;
    int64_t step = -1, gpu_step = -1;
    const uint32_t token = cpu.CommitStep(Serial, cpu.version(), &active, &step);
    uint32_t opened = 0;
    gpu.CommitStep(gpu.q, {&gpu.handle, &opened, &gpu_active, &gpu_step});
    gpu.q.Wait();
    CHECK_EQ(opened, gpu.handle);
    CHECK_EQ(step, gpu_step);
    using Slots = std::vector<std::byte*>;
    const auto raw = [&](Floats& f) {
      return layout.empty() ? Slots() : Slots{reinterpret_cast<std::byte*>(f.data())};
    };
    const auto constant = [](const Slots& of) { return std::vector<const std::byte*>(of.begin(), of.end()); };
    const size_t bytes = cpu.row_bytes();
    {
      const auto& in = cpu.shard_step().received.merged();
      const auto* const targets = cpu.shard_step().targets.data();
      const auto n = static_cast<size_t>(active);
      Bytes values(n * bytes);
      Floats slots(n * kDim);
      const Mask fresh(new bool[n + 1]);
      cpu.Gather(Serial, token, targets, n, values.data(), fresh.get(), raw(slots));
      for (size_t i = 0; i < n; ++i) {
        device::Descend(cpu.spec().type, kDim, values.data() + i * bytes,
                        in.rows + targets[i].gradient * kDim, layout.empty() || fresh[i],
                        slots.data() + i * kDim);
      }
      cpu.Scatter(Serial, token, targets, n, values.data(), constant(raw(slots)), true);
    }
    Bytes values(chunk * bytes);
    Floats slots(chunk * kDim), grads(chunk * kDim);
    const Mask fresh(new bool[chunk]);
    Keys row_keys(chunk);
    for (int32_t start = 0; start == 0 || start < gpu_active; start += static_cast<int32_t>(chunk)) {
      const kvjax::ChunkSpan rows{nullptr, 0, &start, &gpu_active, chunk};
      gpu.Gather(gpu.q, {.version = &gpu.handle,
                         .chunk = rows,
                         .values = values.data(),
                         .grads = grads.data(),
                         .fresh = fresh.get(),
                         .row_keys = row_keys.data(),
                         .slots = raw(slots)});
      gpu.q.Wait();
      for (size_t i = 0; i < chunk; ++i) {
        device::Descend(cpu.spec().type, kDim, values.data() + i * bytes, grads.data() + i * kDim,
                        layout.empty() || fresh[i], slots.data() + i * kDim);
      }
      uint32_t through = 0;
      gpu.Scatter(gpu.q, {.version = &opened,
                          .chunk = rows,
                          .values = values.data(),
                          .slots = constant(raw(slots)),
                          .out = &through});
      gpu.q.Wait();
      CHECK_EQ(through, opened);
    }
    CHECK_EQ(gpu.SettledVersion(), gpu.handle);  // nobody has seen any of it
    gpu.Write(
        [&](auto* version, auto* next) { gpu.CommitStep(gpu.q, {version, next, &gpu_active, &gpu_step}); });
    CHECK_EQ(step, gpu_step);
  }

  struct Operands {
    Keys keys;
    Ints counts;
    Floats rows;
    Bytes initial;
    int32_t turn[2];
  };
  data::Live cpu;
  device::Device<Later> gpu;
  std::list<Operands> operands;  // of calls that may not have read them yet
};

kvjax::TableSpec Spec() {
  kvjax::TableSpec spec = data::Spec(kDim);
  spec.sharded = true;
  return spec;
}

TEST(TrainingIsThatOfTheCpuWhateverTheRounds) {
  Later::lag = 40;
  for (const size_t capacity : {size_t{1}, size_t{7}, size_t{64}}) {
    for (const bool given : {false, true}) {
      for (const bool admits : {false, true}) {
        kvjax::TableSpec spec = Spec();
        if (given) spec.initializer.kind = kvjax::Generator::Kind::kGiven;
        if (admits) spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 6};
        Shards both(spec);
        data::Stream stream(capacity);
        const auto layout = device::Momentum(kDim);
        for (int64_t step = 0; step < 3; ++step) {
          both.Deliver(stream, capacity);
          both.Plan(step, layout);
          both.Commit(layout, 1 + stream.Below(40));
          both.Compare();
        }
      }
    }
  }
}

TEST(AStepThatIsOnlyPlannedLeavesNothing) {
  Shards both(Spec());
  data::Stream stream(3);
  both.Deliver(stream, 60);
  both.Plan(-1, {});
  both.Commit({}, 60);
  both.Deliver(stream, 5);
  both.Plan(-1, device::Momentum(kDim));
  both.Compare();
  both.Deliver(stream, 5);  // another optimizer, that has no slots, is free to come
  both.Plan(-1, {});
  both.Commit({}, 9);
  both.Compare();
}

TEST(AnotherWriteEndsAStepThatIsPlanned) {
  Shards both(Spec());
  auto& gpu = both.gpu;
  data::Stream stream(7);
  const auto layout = device::Momentum(kDim);
  both.Deliver(stream, 60);
  both.Plan(-1, layout);
  both.Commit(layout, 60);
  uint32_t next = 0;
  int64_t used = 0;
  int32_t active = 0;
  const auto plan = [&](kvjax::Op op) { gpu.Plan(gpu.q, {op, &gpu.handle, data::Span(Keys{})}); };
  const auto commit = [&] { gpu.CommitStep(gpu.q, {&gpu.handle, &next, &active, &used}); };
  const auto again = [&] { gpu.PlanStep(gpu.q, {.version = &gpu.handle, .step = &used, .layout = layout}); };
  for (const kvjax::Op op : {kvjax::Op::kClearSlots, kvjax::Op::kClear}) {
    both.Deliver(stream, 60);
    both.Plan(-1, layout);
    plan(op);
    CHECK_THROWS(kFailedPrecondition, commit());
    CHECK_THROWS(kFailedPrecondition, again());  // whose gradients have been forgotten
    op == kvjax::Op::kClear ? gpu.Empty() : gpu.ForgetSlots();
    const kvjax::Call call(both.cpu.version());
    op == kvjax::Op::kClear ? both.cpu.Clear(call) : both.cpu.ClearSlots(call);
    both.Compare();
  }
}

TEST(AStepOfWhichARoundIsMissingIsNotPlanned) {
  Shards both(Spec());
  auto& gpu = both.gpu;
  const Keys keys(kSenders, 5);
  const Ints counts(kSenders, 1);
  const Floats rows(kSenders * kDim, 1.0f);
  const int32_t turn = 0, turns = 2;
  const int64_t step = -1;
  gpu.Receive(gpu.q, {.version = &gpu.handle,
                      .keys = data::Span(keys),
                      .gradients = {counts.data(), rows.data()},
                      .senders = kSenders,
                      .round = &turn,
                      .rounds = &turns});
  CHECK_THROWS(kFailedPrecondition, gpu.PlanStep(gpu.q, {.version = &gpu.handle, .step = &step}));
}

TEST(AStepIsCommittedOnlyForTheVersionThatItWasPlannedFor) {
  Shards both(Spec());
  auto& gpu = both.gpu;
  data::Stream stream(8);
  both.Deliver(stream, 60);
  both.Plan(-1, {});
  const uint32_t planned = gpu.handle;
  uint32_t next = 0;
  int64_t used = 0;
  int32_t active = 0;
  gpu.Drop({1});  // a write whose plan came before the step's
  CHECK_THROWS(kFailedPrecondition, gpu.CommitStep(gpu.q, {&gpu.handle, &next, &active, &used}));
  gpu.CommitStep(gpu.q, {&planned, &next, &active, &used});
  gpu.q.Wait();
  CHECK_THROWS(kFailedPrecondition, gpu.Raise());
  CHECK_EQ(gpu.Copy().keys.size(), 0u);
}

/// A step that brings slots, planned and then opened, so that its chunks may come.
struct OpenStep {
  explicit OpenStep(Shards& both) : both(both), version(both.gpu.handle) {
    data::Stream stream(5);
    both.Deliver(stream, 60);
    both.Plan(-1, device::Momentum(kDim));
    Commit();
  }
  void Commit() { both.gpu.CommitStep(both.gpu.q, {&version, &next, &active, &used}); }

  Shards& both;
  const uint32_t version;
  uint32_t next = 0;
  int64_t used = 0;
  int32_t active = 0;
};

TEST(ALoadEndsAStepThatWouldBringSlots) {
  const auto layout = device::Momentum(kDim);
  data::Stream stream(6);
  Shards trained(Spec()), both(Spec());
  trained.Deliver(stream, 60);
  trained.Plan(-1, layout);
  trained.Commit(layout, 60);
  const kvjax::Snapshot saved = trained.cpu.Copy();
  OpenStep step(both);
  both.cpu.Restore(data::View(saved)), both.gpu.Restore(data::View(saved));
  CHECK_THROWS(kFailedPrecondition, step.Commit());
  both.gpu.q.Wait();
  CHECK(data::Same(both.gpu.Export(both.gpu.handle, true, "export", /*raises=*/false), both.cpu.Copy()));
}

TEST(AStepThatIsRefusedBringsNoSlots) {
  Shards both(Spec());
  OpenStep step(both);
  both.cpu.Remove(both.cpu.version(), data::Span(Keys{1})), both.gpu.Drop({1});
  step.Commit();
  both.gpu.q.Wait();
  CHECK(both.gpu.Layout().empty());
  CHECK_THROWS(kFailedPrecondition, both.gpu.Raise());
  both.Compare();
}

TEST(WritesMakeRoomForTheKeysOfTheShardAlone) {
  Later::lag = 40;
  Shards both(Spec());
  auto& [cpu, gpu, operands] = both;
  data::Stream stream(4);
  for (int step = 0; step < 6; ++step) {
    Keys keys, own;
    const Mask mask(new bool[4000]);
    for (size_t i = 0; i < 4000; ++i) {
      keys.push_back(stream.Below(100'000));
      if ((mask[i] = kvjax::OwnerOf(keys[i], 8) == 3)) own.push_back(keys[i]);
    }
    cpu.Ensure(own);
    gpu.Plan(gpu.q, {kvjax::Op::kLookupOrInsert, &gpu.handle, data::Span(keys), mask.get()});
    gpu.Ensure(keys, mask.get());
    both.Compare();
  }
  CHECK(gpu.Stats().capacity < 8 * cpu.Copy().keys.size());
  uint32_t stale = gpu.handle - 1;
  const Keys one = {1};
  const kvjax::device::PlanOperands late{kvjax::Op::kRemove, &stale, data::Span(one)};
  CHECK_THROWS(kFailedPrecondition, gpu.Plan(gpu.q, late));
}

TEST(AWriteThatWasNotPlannedIsNotLetIn) {
  Shards both(Spec());
  const Keys keys = {1, 2, 3};
  both.gpu.Plan(both.gpu.q, {kvjax::Op::kRemove, &both.gpu.handle, data::Span(keys)});
  uint32_t next = 0;
  both.gpu.Insert(both.gpu.q, Of(kvjax::Op::kLookupOrInsert, &both.gpu.handle, keys, nullptr, {}, &next));
  both.gpu.q.Wait();
  CHECK_THROWS(kFailedPrecondition, both.gpu.Raise());
  both.Compare();
}

}  // namespace device_sharded
