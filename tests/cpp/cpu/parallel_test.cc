// Calls large enough that several threads share them: the same results as on one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/cpu/program/subnormal.h"
#include "kvjax/ffi/cpu/table.h"
#include "kvjax/ffi/cpu/workers.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/no_threads.h"

namespace cpu_parallel {

using data::Floats;
using data::Keys;
using data::Live;

constexpr size_t kDim = 4, kBatch = 20'000;

/// As many threads, whatever the machine has.
void OnFour(size_t n, size_t grain, const std::function<void(size_t, size_t)>& body) {
  std::vector<std::jthread> helpers;
  kvjax::Share(4, [&](auto work) { helpers.emplace_back(std::move(work)); }, n, grain, body);
}

TEST(EveryItemIsWorkedOnOnce) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{99}, size_t{10'001}}) {
    std::vector<std::atomic<int>> visits(n);
    OnFour(n, 10, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) ++visits[i];
    });
    for (const auto& v : visits) CHECK_EQ(v.load(), 1);
  }
}

TEST(WhatAThreadThrowsTheCallerThrows) {
  bool thrown = false;
  try {
    OnFour(1000, 1, [](size_t begin, size_t) {
      if (begin >= 500) throw std::runtime_error("second half");
    });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
}

TEST(WithoutThreadsTheCallerDoesAll) {
  size_t done = 0;
  const auto refuse = [](const auto&) {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  };
  kvjax::Share(4, refuse, 1000, 1, [&](size_t begin, size_t end) { done += end - begin; });
  CHECK_EQ(done, 1000u);
}

TEST(WorkersServeCallsThatComeTogetherAndAfterAPause) {
  std::vector<std::jthread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([c] {
      for (int call = 0; call < 200; ++call) {
        std::vector<int> visits(1'000);
        kvjax::Workers::Own().Run(4, visits.size(), 10, [&](size_t begin, size_t end) {
          for (size_t i = begin; i < end; ++i) ++visits[i];
        });
        for (const int v : visits) CHECK_EQ(v, 1);
        if (call % 50 == c)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // they sleep meanwhile
      }
    });
  }
}

TEST(WorkersHelpWhereNoMoreCanBeMade) {
  auto& workers = *new kvjax::Workers();  // which live as long as the process
  const auto helped = [&](size_t threads) {
    std::atomic<bool> other{false};
    const auto me = std::this_thread::get_id();
    for (int call = 0; call < 1'000 && !other; ++call) {
      std::atomic<int> done{0};
      workers.Run(threads, 100, 1, [&](size_t begin, size_t end) {
        if (std::this_thread::get_id() != me) other = true;
        done += static_cast<int>(end - begin);
        std::this_thread::sleep_for(std::chrono::microseconds(10));
      });
      CHECK_EQ(done.load(), 100);
    }
    return other.load();
  };
  {
    const NoThreads none;
    CHECK(!helped(2));
  }
  CHECK(helped(2));
  const NoThreads no_more;
  CHECK(helped(3));
}

/// Whether workers help within a thousand calls, and find subnormal numbers to be as `zero` says.
void WorkersHelp(bool zero) {
  std::atomic<bool> helped{false}, other{false};
  const auto me = std::this_thread::get_id();
  for (int call = 0; call < 1'000 && !helped; ++call) {
    kvjax::Workers::Own().Run(2, 100, 1, [&](size_t, size_t) {
      if (std::this_thread::get_id() != me) helped = true;
      volatile float small = 1e-40F;
      small = small * 1.0F;
      if ((small == 0.0F) != zero) other = true;
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    });
  }
  CHECK(helped);
  CHECK(!other);
}

TEST(WorkersTakeSubnormalNumbersAsTheCallerDoes) {
  WorkersHelp(false);
  const kvjax::program::NoSubnormals scope;
  WorkersHelp(true);
}

TEST(GroupsAreThoseOfOnePassInTheOrderOfTheBatch) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{3'000}, 5 * kBatch}) {
    for (const uint64_t distinct : {uint64_t{1}, uint64_t{500}, uint64_t{4 * kBatch}}) {
      data::Stream stream(n + distinct);
      Keys keys(n);
      std::vector<int32_t> counts(n);
      for (size_t i = 0; i < n; ++i) {
        keys[i] = kvjax::Mix(stream.Below(distinct));
        counts[i] = stream.Below(50) == 0 ? INT32_MAX : static_cast<int32_t>(stream.Below(4)) - 1;
      }
      kvjax::KeyNumbering numbering(n);
      std::vector<std::vector<uint32_t>> rows;
      std::vector<int64_t> sums;
      for (size_t i = 0; i < n; ++i) {
        if (counts[i] <= 0) continue;
        const uint32_t g = numbering.Add(keys[i]);
        if (g == rows.size()) rows.emplace_back(), sums.emplace_back();
        rows[g].push_back(static_cast<uint32_t>(i));
        sums[g] = std::min<int64_t>(sums[g] + counts[i], INT32_MAX);
      }
      std::vector<uint32_t> ids(n);  // in no order
      for (size_t i = 0; i < n; ++i) ids[i] = counts[i] > 0 ? 7 * (numbering.Add(keys[i]) ^ 5) : 0;
      const auto check = [&](const kvjax::KeyGroups& groups) {
        CHECK_EQ(groups.size(), rows.size());
        CHECK(std::equal(groups.keys().begin(), groups.keys().end(), numbering.keys().begin()));
        for (size_t g = 0; g < groups.size(); ++g) {
          CHECK_EQ(int64_t{groups.counts()[g]}, sums[g]);
          CHECK_EQ(groups.first(g), rows[g][0]);
          CHECK(std::ranges::equal(groups.rows(g), rows[g]));
        }
      };
      check({kvjax::Serial, keys.data(), counts.data(), n});
      check({OnFour, keys.data(), counts.data(), n});
      check({keys.data(), counts.data(), n, ids.data(), 7 * (rows.size() + 6)});
    }
  }
}

/// Half of the keys twice or more often, so that it matters which row is written last.
Keys Repeated(data::Stream& stream) {
  Keys keys;
  for (size_t i = 0; i < kBatch; ++i) keys.push_back(stream.Below(kBatch));
  return keys;
}

void TheLastOneWins(size_t dim) {
  data::Stream stream(3);
  Live table(static_cast<int64_t>(dim));
  table.Ensure(Repeated(stream));
  for (const bool assign : {false, true}) {
    const Keys keys = Repeated(stream);
    const Floats before = table.Rows(keys);
    Floats values(kBatch * dim);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i + 1) % 999'983);
    const auto bytes = reinterpret_cast<const std::byte*>(values.data());
    const uint32_t version = table.version();
    assign ? table.Assign(OnFour, version, data::Span(keys), bytes)
           : table.Upsert(OnFour, version, data::Span(keys), bytes);
    std::vector<size_t> last(kBatch);
    for (size_t i = 0; i < kBatch; ++i) last[keys[i]] = i;
    Floats rows(kBatch * dim);
    const auto found = std::make_unique<bool[]>(kBatch);
    table.Lookup(OnFour, table.version(), data::Span(keys), nullptr, {}, kvjax::Missing::kTable,
                 reinterpret_cast<std::byte*>(rows.data()), found.get());
    for (size_t i = 0; i < kBatch; ++i) {
      CHECK(found[i] || assign);  // which makes no rows
      const float* const row = found[i] ? &values[last[keys[i]] * dim] : &before[i * dim];
      CHECK(std::equal(row, row + dim, &rows[i * dim]));
    }
  }
}

TEST(OfEqualKeysTheLastOneWins) { TheLastOneWins(kDim); }
TEST(OfEqualKeysTheLastOneWinsPastTheCaches) { TheLastOneWins(kvjax::kStreamFrom / kBatch / 64 * 16 + 16); }

TEST(AnExportIsWhatItsLoadHas) {
  data::Stream stream(4);
  Live table(kDim), copy(kDim);
  Keys keys;
  for (size_t i = 0; i < kBatch; ++i) keys.push_back(stream.Next());
  Floats values(kBatch * kDim);
  for (float& v : values) v = static_cast<float>(stream.Below(1 << 20));
  table.Upsert(OnFour, table.version(), data::Span(keys), reinterpret_cast<const std::byte*>(values.data()));
  const kvjax::Snapshot out = table.Export(table.version(), true);
  CHECK_EQ(out.keys.size(), kBatch);
  copy.CommitLoad(data::Ready(copy, copy.version(), data::View(out)));
  CHECK(data::Same(out, copy.Export(copy.version(), true)));
  CHECK(copy.Rows(keys) == table.Rows(keys));
}

}  // namespace cpu_parallel
