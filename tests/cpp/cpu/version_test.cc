// The version gate: steps of several calls, and calls while the user's code runs.
#include "kvjax/ffi/cpu/version.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_version {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::ErrorCode;
using kvjax::Snapshot;
using kvjax::VersionGate;
using namespace std::chrono_literals;

constexpr size_t kDim = 2;

TEST(LiveReadsDoNotKeepWritersOut) {
  VersionGate gate(0);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!done) {
        const auto lock = gate.Read("t", "lookup", std::nullopt);
        std::this_thread::sleep_for(2ms);  // so that the lock is never free
      }
    });
  }
  std::this_thread::sleep_for(10ms);
  for (uint32_t i = 0; i < 20; ++i) {
    const auto lock = i % 2 == 0 ? gate.Write("t", "upsert", i) : gate.WriteAny("t", "apply");
    gate.Next();
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
}

/// A step of {1, 2, 3}, of which 3 is new, whose rows become `value`: chunk i is its i-th row.
struct Step {
  Live& table;
  float value;
  kvjax::SlotLayout layout = [] {
    kvjax::SlotLayout slots;
    slots.Add("mu", "float32", 4);
    return slots;
  }();
  data::Targets targets = table.Open({1, 2, 3}, {1, 1, 1}, layout);
  uint32_t token = table.token;

  void Gather(size_t i) const {
    Floats row(kDim), mu(1);
    bool fresh;
    table.Gather(kvjax::Serial, token, &targets[i], 1, reinterpret_cast<std::byte*>(row.data()), &fresh,
                 {reinterpret_cast<std::byte*>(mu.data())});
    CHECK(fresh || mu[0] == 1.0f);
  }
  uint32_t Scatter(size_t i) const {
    const Floats mu = {1};
    return table.Scatter(kvjax::Serial, token, &targets[i], 1, data::Bytes(Floats(kDim, value)),
                         {data::Bytes(mu)}, i == 2);
  }
};

TEST(AStepIsNothingToOthersUntilItIsWhole) {
  Live table(kDim);
  table.Put({1, 2}, Floats(2 * kDim, 1.0f));
  const data::State before(table);
  const uint32_t version = table.version();
  const Step step{table, 5.0f};
  for (size_t i = 0; i < 3; ++i) {
    step.Gather(i);
    CHECK_EQ(table.SettledVersion(), version);
    CHECK(
        data::Same(before, data::State(table)));  // also the slots that come with it, the new row and counts
    CHECK_EQ(step.Scatter(i), i == 2 ? version + 1 : step.token);
  }
  CHECK_EQ(table.SettledVersion(), version + 1);
  CHECK(table.Rows({1, 2, 3}) == Floats(3 * kDim, 5.0f));
  CHECK(table.Of(3) == (Live::Info{true, 1, 1}));
  CHECK_THROWS(kFailedPrecondition, step.Scatter(2));
}

TEST(AStepThatDoesNotGoOnWasNothing) {
  Live table(kDim);
  table.Put({1, 2}, Floats(2 * kDim, 1.0f));
  const data::State before(table);
  const Step step{table, 5.0f};
  step.Scatter(0);
  CHECK(data::Same(before, data::State(table)));
  const Step next{table, 7.0f};  // by the same handle
  CHECK_THROWS(kFailedPrecondition, step.Gather(1));
  CHECK_THROWS(kFailedPrecondition, step.Scatter(2));
  for (size_t i = 0; i < 3; ++i) next.Scatter(i);
  CHECK(table.Rows({1, 2, 3}) == Floats(3 * kDim, 7.0f));
}

TEST(AStepTakesNoMoreRowsThanItHas) {
  Live table(kDim);
  Keys many(100);
  for (size_t i = 0; i < many.size(); ++i) many[i] = i;
  table.Begin(many, std::vector<int32_t>(many.size(), 1));  // whose memory is kept
  const Step step{table, 5.0f};
  for (size_t i = 0; i < 2; ++i) step.Scatter(i);
  step.Scatter(1), step.Scatter(1);  // the fourth is the last for which there is space
  CHECK_THROWS(kInvalidArgument, step.Scatter(1));
}

TEST(AnyOtherWriteEndsAStep) {
  const Keys keys = {8, 9};
  const Floats rows(2 * kDim, 3.0f);
  for (const bool fails : {false, true}) {
    kvjax::TableSpec spec = data::Spec(kDim);
    spec.max_capacity = fails ? 3 : 100;
    spec.on_full = kvjax::OnFull::kError;
    Live table(spec);
    table.Put({1, 2}, Floats(2 * kDim, 1.0f));
    const Step step{table, 5.0f};
    if (fails) {
      CHECK_THROWS(kResourceExhausted, table.Put(keys, rows));
    } else {
      table.Put(keys, rows);
    }
    for (size_t i = 0; i < 3; ++i) CHECK_THROWS(kFailedPrecondition, step.Scatter(i));
    CHECK(table.Rows({1, 2}) == Floats(2 * kDim, 1.0f));
    CHECK_EQ(table.Size(table.version()), fails ? 2u : 4u);
  }
}

TEST(OthersWaitForTheUsersCode) {
  for (const bool fails : {false, true}) {
    Live table(kDim);
    table.Put({1, 2}, {1, 1, 2, 2});
    const uint32_t version = table.version();
    std::atomic<bool> inside{false}, done{false};
    table.SetSink([&](const Snapshot&, std::string_view) {
      inside = true;
      CHECK_THROWS(kFailedPrecondition, table.Rows({1}));  // its own thread would wait for ever
      CHECK_THROWS(kFailedPrecondition, table.Ensure({1}));
      std::this_thread::sleep_for(50ms);
      done = true;
      if (fails) throw std::runtime_error("the disk is full");
    });
    std::atomic<int> waited{0}, read{0}, stale{0}, size{0};
    const auto other = [&] {
      while (!inside) std::this_thread::yield();
      try {
        Floats row(kDim);
        bool found;
        const uint64_t key = 2;
        table.Lookup(kvjax::Serial, version, {&key, 1}, nullptr, {}, kvjax::Missing::kTable,
                     reinterpret_cast<std::byte*>(row.data()), &found);
        read += found && row == Floats({2, 2});
      } catch (const kvjax::Error& error) {
        const bool is_stale = std::string_view(error.what()).find("a stale one") != std::string_view::npos;
        stale += error.code() == ErrorCode::kFailedPrecondition && is_stale;
      }
      waited += done;
      size += static_cast<int>(table.Observe([](const kvjax::Contents& c) { return c.store.size(); }));
    };
    std::thread first(other), second(other);
    try {
      table.Evict("low\nmin_norm:2.0");
      CHECK(!fails);
    } catch (const std::runtime_error&) {
      CHECK(fails);
    }
    first.join();
    second.join();
    CHECK_EQ(waited, 2);
    CHECK_EQ(read, fails ? 2 : 0);  // nothing has changed: the handle is the live one still
    CHECK_EQ(stale, fails ? 0 : 2);
    CHECK_EQ(size, fails ? 4 : 2);
    CHECK(table.Rows({2}) == Floats({2, 2}));
  }
}

TEST(CallsThatComeFromTheUsersCodeByAnotherThreadGiveUp) {
  VersionGate gate(3, 50ms);
  const auto lock = gate.Write("t", "evict", 3);
  {
    const VersionGate::CallingOut calling(gate);
    CHECK_THROWS(kFailedPrecondition, gate.ReadAny("t", "stats"));
    std::thread([&] { CHECK_THROWS(kFailedPrecondition, gate.Read("t", "lookup", 3)); }).join();
    std::thread([&] { CHECK_THROWS(kFailedPrecondition, gate.WriteAny("t", "on_evict")); }).join();
  }
}

TEST(CallsThatWaitedForTheTableBeforeTheUsersCodeBeganGiveUpToo) {
  VersionGate gate(3, 50ms);
  const auto lock = gate.Write("t", "evict", 3);
  std::thread handle([&] { CHECK_THROWS(kFailedPrecondition, gate.Read("t", "lookup", 3)); });
  std::thread following([&] { CHECK_THROWS(kFailedPrecondition, gate.Read("t", "lookup", {})); });
  std::thread write([&] { CHECK_THROWS(kFailedPrecondition, gate.WriteAny("t", "on_evict")); });
  std::this_thread::sleep_for(20ms);  // most often enough to be behind WaitForUser
  const VersionGate::CallingOut calling(gate);
  for (std::thread* thread : {&handle, &following, &write}) thread->join();
}

TEST(WhoWaitsTooLongIsToldForWhat) {
  VersionGate gate(3, 1001ms);
  const auto said = [&] {
    try {
      (void)gate.ReadAny("t", "stats");
    } catch (const kvjax::Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const VersionGate::CallingOut calling(gate);
  CHECK(said().find("one from that function, which is a sink, a score function or an engine") !=
        std::string::npos);
  std::string innocent;
  std::thread([&] { innocent = said(); }).join();
  CHECK(innocent.find("a sink, score function or engine of it that has run for 1 s and more") !=
        std::string::npos);
}

}  // namespace cpu_version
