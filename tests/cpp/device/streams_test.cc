// Calls on several streams, and calls of the host beside them: they follow each other where they have to, and
// nothing waits for a stream that is none of its business, as one of another device in the middle of a
// collective.
#include <cstddef>

// Every word that kernels write for the host goes over the bus.
inline size_t on_bus = 0;
#define KVJAX_ON_BUS() ++on_bus

#include "kvjax/ffi/device/backend_bags.h"
#include "tests/cpp/support/later.h"

namespace {

using data::Keys;
using device::Of;
using kvjax::Op;
using later::Chain;
using later::Later;

void Insert(Chain& gpu, Later& q, const Keys& keys) {
  const Keys& kept = gpu.Keep(keys);
  gpu.Write([&](auto* by, auto* next) {
    gpu.table.Insert(q, Of(Op::kLookupOrInsert, by, kept, nullptr, {}, next));
  });
}

TEST(CallsOnTwoStreamsFollowEachOther) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    data::Live cpu(data::Spec(3), std::make_shared<kvjax::HostSlabs>(), 1);
    Chain gpu(data::Spec(3));
    Later other(2);
    data::Stream stream(seed);
    gpu.q.Wait();
    for (int step = 0; step < 60; ++step) {
      Later::lag = stream.Below(400);
      Later& q = stream.Below(2) == 0 ? gpu.q : other;
      Keys keys;
      for (size_t i = stream.Below(40); i > 0; --i) keys.push_back(stream.Below(300));
      if (stream.Below(3) != 0) {
        Insert(gpu, q, keys);
        cpu.Ensure(keys);
      } else {
        const Keys& kept = gpu.Keep(keys);
        gpu.Write(
            [&](auto* by, auto* next) { gpu.table.Remove(q, Of(Op::kRemove, by, kept, nullptr, {}, next)); });
        cpu.Drop(keys);
      }
      if (stream.Below(10) == 0) CHECK_EQ(gpu.table.Stats().size, cpu.Stats().size);
    }
    other.Wait();
    const uint32_t live = gpu.Now();
    CHECK_EQ(live, cpu.version());
    CHECK(data::Same(gpu.table.Export(live, true), cpu.Copy()));
  }
}

TEST(NothingWaitsForAnotherStream) {
  bool ran = false;
  const Later busy(9);
  Later::lag = 1000;
  busy.Ask([&] { ran = true; });
  {
    Chain gpu(data::Spec(3));
    Insert(gpu, gpu.q, {1, 2, 3});
    const uint32_t live = gpu.Now();
    CHECK_EQ(gpu.table.Size(live), 3u);
    CHECK_EQ(gpu.table.Stats().size, 3u);
    gpu.table.Settle();
    CHECK_EQ(gpu.table.SettledVersion(), live);
    gpu.table.Reserve(live, 5000);
    const kvjax::Snapshot rows = gpu.table.Export(live, true);
    CHECK_EQ(gpu.table.CommitLoad(data::Ready(gpu.table, live, data::View(rows))), live + 1);
    kvjax::device::DeviceTable<Later> second(data::Spec(5), 1);
  }
  CHECK(!ran);
  busy.Wait();
}

TEST(ATableIsDroppedOnceItsOwnCallsAreDone) {
  Later::lag = 100000;
  const Later q(1);
  uint32_t* const words = static_cast<uint32_t*>(Later::Allocate(2 * sizeof(uint32_t)));
  words[0] = 1, words[1] = 0;
  Keys keys = {1, 2, 3};
  {
    Later on(1);
    kvjax::device::DeviceTable<Later> table(data::Spec(3), 1);
    table.Insert(on, Of(Op::kLookupOrInsert, words, keys, nullptr, {}, words + 1));
    CHECK(words[1] != 2);  // the stream has not come so far
  }
  CHECK_EQ(words[1], 2u);
  Later::Release(words);
}

TEST(KernelsThatReportToATableKeepIt) {
  // A call of no table, whose refusal is reported to this one, which is dropped before the kernel runs.
  Later::lag = 100000;
  Later q(1);
  uint32_t* const canary = static_cast<uint32_t*>(Later::Allocate(sizeof(uint32_t)));
  *canary = 7;
  {
    kvjax::device::DeviceTable<Later> table(data::Spec(3), 1);
    const kvjax::device::OwnReport<Later> report(q, &table, Op::kValueAndGrad);
    const kvjax::device::CallView call = report.call();
    q.Once([=] {
      call.Refuse(kvjax::device::Refusal::kUses, 1, 2);
      *canary = 8;
    });
    report.Raise();
  }
  CHECK_EQ(*canary, 8u);
  Later::Release(canary);
}

TEST(WhatACallGivesUpGoesBackInItsOrder) {
  // Memory for a table that is cleared is made, and then there is none for the rest: the stream is to use the
  // first before it is given back.
  Later::lag = 100000;
  kvjax::TableSpec spec = data::Spec(1 << 12);
  Chain gpu(spec);
  Insert(gpu, gpu.q, {1, 2, 3});
  gpu.table.Reserve(gpu.Now(), 3000);
  size_t failures = 0;
  for (size_t nth = 1; nth < 100; ++nth) {
    uint32_t* const next = gpu.Word();
    Later::FailAllocation(nth);
    try {
      gpu.table.Clear(gpu.q, {.version = gpu.handle, .next = next});
      gpu.handle = next;
      break;
    } catch (const std::bad_alloc&) {
      ++failures;
    }
  }
  Later::FailAllocation(0);
  CHECK(failures > 2);
  CHECK_EQ(gpu.table.Size(gpu.Now()), 0u);
}

TEST(AMillionBadLanesAreAFewWordsForTheHost) {
  Later::lag = 0;
  constexpr size_t n = 1000000;
  Chain gpu(data::Spec(1));
  struct Step {
    Keys keys = Keys(n, 5);
    std::vector<int32_t> counts = std::vector<int32_t>(n, -1);
    data::Floats rows = data::Floats(n);
    int64_t at = -1;
  };
  Step& s = gpu.Keep(Step());
  const size_t before = on_bus;
  uint32_t* const old = gpu.handle;
  gpu.Write([&](auto* by, auto* next) {
    gpu.table.WriteStep(gpu.q, {.step = {.version = by,
                                         .keys = data::Span(s.keys),
                                         .gradients = {s.counts.data(), s.rows.data()},
                                         .step = &s.at},
                                .values = data::Bytes(s.rows),
                                .next = next});
  });
  CHECK(on_bus - before < 20);
  gpu.handle = old;
  CHECK_THROWS(kInvalidArgument, gpu.Now());
  Insert(gpu, gpu.q, {1});  // and the next refusal is reported again
  const Keys& keys = gpu.Keep(Keys{2});
  gpu.table.Insert(gpu.q, Of(Op::kLookupOrInsert, old, keys, nullptr, {}, gpu.Word()));
  CHECK_THROWS(kFailedPrecondition, gpu.table.Raise());
  gpu.table.Raise();  // once
  CHECK_EQ(gpu.table.Size(gpu.Now()), 1u);
}

}  // namespace
