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

namespace {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::ErrorCode;
using kvjax::Snapshot;
using kvjax::VersionGate;
using namespace std::chrono_literals;

constexpr size_t kDim = 2;

uint32_t BeginStep(VersionGate& gate) {
  const auto lock = gate.Write("t", "apply", gate.version());
  return gate.BeginStep();
}

TEST(AStepThatEndsIsSettled) {
  VersionGate gate(0xFFFFFFFFu);  // and versions wrap around
  CHECK_EQ(gate.Settled(1h), 0xFFFFFFFFu);
  CHECK_EQ(BeginStep(gate), 0u);
  gate.EndStep();
  CHECK_EQ(gate.Settled(0ms), 0u);
}

TEST(AStepThatDoesNotGoOnIsLeftBehind) {
  VersionGate gate(7);
  const auto since = std::chrono::steady_clock::now();
  CHECK_EQ(BeginStep(gate), 8u);
  CHECK_EQ(gate.Settled(50ms), 9u);
  CHECK(std::chrono::steady_clock::now() - since >= 45ms);
  CHECK_EQ(gate.Settled(1h), 9u);  // once
  CHECK_THROWS(kFailedPrecondition, gate.Read("t", "apply", 8));
  CHECK_THROWS(kFailedPrecondition, gate.Write("t", "apply", 8));
  CHECK_EQ(gate.Read("t", "apply", 9).owns_lock(), true);
  CHECK_EQ(BeginStep(gate), 10u);  // the next one is waited for again
  CHECK_EQ(gate.Settled(50ms), 11u);
}

TEST(AStepThatGoesOnIsWaitedFor) {
  VersionGate gate(7);
  BeginStep(gate);
  std::atomic<bool> ended{false};
  std::thread step([&] {
    for (int i = 0; i < 30; ++i) {
      std::this_thread::sleep_for(50ms);
      gate.Touch();
    }
    ended = true;
    gate.EndStep();
  });
  CHECK_EQ(gate.Settled(1s), 8u);  // after more than a second
  CHECK(ended);
  step.join();
}

TEST(NoStepSlipsInWhileOthersAsk) {
  VersionGate gate(1);
  std::atomic<uint32_t> ended{1};
  std::atomic<bool> done{false};
  std::atomic<int> open{0};
  std::thread other([&] {
    while (!done) {
      const uint32_t version = gate.Settled(1h);
      open += version > ended;
    }
  });
  const auto spin = [](std::chrono::microseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  for (int step = 0; step < 20'000; ++step) {
    spin(20us);  // mostly there is no step, and the other thread asks without a pause
    const uint32_t version = BeginStep(gate);
    spin(2us);
    ended = version;
    gate.EndStep();
  }
  done = true;
  other.join();
  CHECK_EQ(open, 0);
}

/// A step of {1, 2, 3}, whose rows become `value`: chunk i is its i-th row.
struct Step {
  Live& table;
  float value;
  Keys keys = {1, 2, 3};
  data::Targets targets = table.Begin(keys, {1, 1, 1});
  uint32_t version = table.version();

  void Gather(size_t i) const {
    Floats row(kDim);
    bool fresh;
    table.Gather(kvjax::Serial, version, &targets[i], 1, reinterpret_cast<std::byte*>(row.data()), &fresh,
                 {});
  }
  void Scatter(size_t i) const {
    table.Scatter(kvjax::Serial, version, &targets[i], 1, data::Bytes(Floats(kDim, value)), {}, i == 2);
  }
};

TEST(OthersSeeAStepOnceItIsWhole) {
  Live table(kDim);
  table.Put({1, 2, 3}, Floats(3 * kDim, 1.0f));
  const Step step{table, 5.0f};
  std::atomic<bool> settled{false};
  uint32_t version = 0;
  Floats rows;
  std::thread other([&] {
    version = table.SettledVersion();
    settled = true;
    rows = table.Rows({1, 2, 3});
  });
  for (size_t i = 0; i < 3; ++i) {
    step.Gather(i);
    std::this_thread::sleep_for(20ms);
    CHECK(!settled);
    step.Scatter(i);
  }
  other.join();
  CHECK(settled);
  CHECK_EQ(version, step.version);
  CHECK(rows == Floats(3 * kDim, 5.0f));
}

TEST(AnAbandonedStepCannotGoOn) {
  Live table(kDim);
  table.Put({1, 2, 3}, Floats(3 * kDim, 1.0f));
  const Step step{table, 5.0f};
  step.Scatter(0);
  CHECK_EQ(table.SettledVersion(), step.version + 1);  // after 5 seconds
  CHECK_THROWS(kFailedPrecondition, step.Gather(1));
  CHECK_THROWS(kFailedPrecondition, step.Scatter(1));
  CHECK_THROWS(kFailedPrecondition, step.Scatter(2));
  CHECK(table.Rows({1, 2, 3}) == Floats({5, 5, 1, 1, 1, 1}));
  const Step next{table, 7.0f};
  for (size_t i = 0; i < 3; ++i) next.Scatter(i);
  CHECK_EQ(table.SettledVersion(), next.version);
  CHECK(table.Rows({1, 2, 3}) == Floats(3 * kDim, 7.0f));
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
  CHECK(said().find("one from the sink or score function that it has called") != std::string::npos);
  std::string innocent;
  std::thread([&] { innocent = said(); }).join();
  CHECK(innocent.find("a sink or score function of it that has run for 1 s and more") != std::string::npos);
}

}  // namespace
