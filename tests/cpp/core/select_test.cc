// The choice of several shards against that of one: radix selection, and a table that is cut into pieces.
#include "kvjax/ffi/core/select.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kvjax/ffi/core/route.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_select {

using data::Keys;
using kvjax::Call;
using kvjax::Phase;
using kvjax::Policy;
using kvjax::RowRank;
using kvjax::Selection;
using kvjax::ShardSummary;
using kvjax::Table;
using kvjax::TableSpec;
using kvjax::Tally;

/// The sum of tallies that have travelled as words.
Tally Sum(const std::vector<Tally>& tallies) {
  std::vector<uint32_t> sum(Tally::kWords), words(Tally::kWords);
  for (const Tally& tally : tallies) {
    tally.Write(words.data());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += words[i];
  }
  return Tally::Read(sum.data());
}

/// The n first of ranks that lie on several shards; counts the rounds.
std::vector<RowRank> Choose(const std::vector<std::vector<RowRank>>& shards, uint64_t n, size_t& rounds) {
  std::vector<Selection> selections;
  for (const auto& ranks : shards) selections.emplace_back(ranks, n);
  for (rounds = 1;; ++rounds) {
    std::vector<Tally> tallies;
    for (const Selection& s : selections) tallies.push_back(s.Count());
    const Tally sum = Sum(tallies);
    size_t done = 0;
    for (Selection& s : selections) done += s.Continue(sum);
    CHECK(done == 0 || done == shards.size());
    if (done > 0 || rounds > 20) break;
  }
  std::vector<RowRank> all;
  for (const Selection& s : selections) all.insert(all.end(), s.first().begin(), s.first().end());
  std::sort(all.begin(), all.end());
  return all;
}

bool Same(const std::vector<RowRank>& a, const std::vector<RowRank>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const RowRank& x, const RowRank& y) { return !(x < y) && !(y < x); });
}

TEST(SelectionIsThatOfASort) {
  data::Stream stream(1);
  const std::vector<uint64_t> masks = {0, 1, 0xF0000000000000Full, 0x8000000000000000ull, ~uint64_t{0}};
  for (int trial = 0; trial < 400; ++trial) {
    const size_t shards = 1 + stream.Below(8), total = stream.Below(trial % 10 == 0 ? 5000 : 60);
    const uint64_t mask = masks[stream.Below(masks.size())], base = stream.Next() & ~mask;
    const uint64_t hashes = trial % 3 == 0 ? 0xFFFF : ~uint64_t{0};  // some agree in nearly all bits
    std::vector<std::vector<RowRank>> ranks(shards);
    std::vector<RowRank> all;
    for (size_t i = 0; i < total; ++i) {
      const uint64_t hash = hashes == 0xFFFF ? i : kvjax::Mix(i);
      const RowRank rank{base | (stream.Next() & mask), hash, i};
      all.push_back(rank);
      ranks[stream.Below(shards)].push_back(rank);
    }
    std::sort(all.begin(), all.end());
    for (const uint64_t n :
         {uint64_t{1}, stream.Below(total + 1) + 1, uint64_t{total}, uint64_t{total} + 5}) {
      if (n == 0) continue;
      size_t rounds = 0;
      const auto chosen = Choose(ranks, n, rounds);
      std::vector<RowRank> want(all.begin(),
                                all.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(n, total)));
      CHECK(Same(chosen, want));
      CHECK(rounds <= 1 + 128 / 8);
      if (n >= total) CHECK_EQ(rounds, 1u);
    }
  }
}

TEST(RoundsGrowWithTheBitsThatDiffer) {
  std::vector<std::vector<RowRank>> ranks(2);
  for (uint64_t i = 0; i < 10000; ++i) {  // 200 versions far from 0, 50 rows of each
    ranks[i % 2].push_back({(uint64_t{1} << 63) + 1'000'000 + i % 200, kvjax::Mix(i), i});
  }
  size_t rounds = 0;
  CHECK_EQ(Choose(ranks, 77, rounds).size(), 77u);
  CHECK(rounds <= 4);  // which bits differ, the version, and one or two digits of the hash
}

TEST(HugeCountsAddUp) {
  Tally tally;
  tally.counts[3] = 0xFFFFFFFFull;
  CHECK_EQ(Sum(std::vector<Tally>(5, tally)).counts[3], 5 * 0xFFFFFFFFull);
}

// ---- tables
// ------------------------------------------------------------------------------------------------

struct Shards {
  explicit Shards(const TableSpec& spec, uint32_t n) {
    for (uint32_t s = 0; s < n; ++s) {
      TableSpec own = spec;
      own.shard = s;
      tables.push_back(std::make_unique<Table>(own, std::make_shared<kvjax::HostSlabs>(), 0));
    }
  }

  /// Runs a write that each shard proposes with its keys. Throws what one of them throws, and then none has
  /// changed.
  template <class Write>
  void Run(const Keys& keys, Write write) {
    std::vector<Keys> own(tables.size());
    for (const uint64_t key : keys)
      own[kvjax::OwnerOf(key, static_cast<uint32_t>(tables.size()))].push_back(key);
    std::vector<ShardSummary> summaries(tables.size());
    for (size_t s = 0; s < tables.size(); ++s) {
      CHECK_EQ(write(*tables[s], Call(version, Phase::kPropose), own[s]), 0u);
      CHECK_THROWS(kFailedPrecondition, write(*tables[s], Call(version, Phase::kCommit), own[s]));
      tables[s]->Summarize(version, summaries[s]);
    }
    std::vector<std::optional<Tally>> asked;
    for (size_t s = 0; s < tables.size(); ++s) {
      asked.push_back(tables[s]->Prepare(kvjax::Serial, "test", version, summaries, s));
    }
    while (asked[0]) {
      std::vector<Tally> tallies;
      for (const auto& tally : asked) CHECK(tally.has_value()), tallies.push_back(*tally);
      for (size_t s = 0; s < tables.size(); ++s) {
        asked[s] = tables[s]->Continue(kvjax::Serial, "test", version, Sum(tallies));
      }
    }
    for (size_t s = 0; s < tables.size(); ++s) write(*tables[s], Call(version, Phase::kCommit), own[s]);
    ++version;
  }

  [[nodiscard]] Keys Contents() const {
    Keys keys;
    for (const auto& table : tables) {
      for (const int64_t key : table->Export(version, false).keys) keys.push_back(static_cast<uint64_t>(key));
    }
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  std::vector<std::unique_ptr<Table>> tables;
  uint32_t version = 0;
};

TEST(ShardsKeepTheRowsOfOneTable) {
  data::Stream stream(2);
  const auto on_full = {kvjax::OnFull::kEvict, kvjax::OnFull::kError, kvjax::OnFull::kGrow};
  for (int trial = 0; trial < 60; ++trial) {
    TableSpec spec{.name = "t", .dim = 1};
    spec.max_capacity = 20 + stream.Below(20);
    spec.on_full = *(on_full.begin() + static_cast<ptrdiff_t>(stream.Below(3)));
    if (stream.Below(2) == 0)
      spec.policy = Policy::Parse("a\nleast_recent:3 min_norm:0.5 and\nb\nleast_frequent:2:0");
    Shards one(spec, 1), many(spec, 1 + static_cast<uint32_t>(stream.Below(7)));
    for (int round = 0; round < 12; ++round) {
      Keys keys;
      for (size_t i = 0, n = stream.Below(9); i < n; ++i) keys.push_back(stream.Below(90));
      const uint64_t kind = stream.Below(4);
      const auto write = [&](Table& table, Call call, const Keys& own) -> uint32_t {
        const std::vector<float> rows(own.size() + 1, static_cast<float>(round % 3));
        if (kind == 0) return table.Pin(kvjax::Serial, call, data::Span(own), {});
        if (kind == 1) {
          const Policy policy = Policy::Parse("restrict\nleast_recent:-15");
          return table.Evict(kvjax::Serial, "restrict", call, policy, -1);
        }
        return table.Upsert(kvjax::Serial, call, data::Span(own),
                            reinterpret_cast<const std::byte*>(rows.data()));
      };
      if (kind == 0 && keys.size() > 2) keys.resize(2);
      bool failed[2] = {false, false};
      for (Shards* shards : {&one, &many}) {
        try {
          shards->Run(keys, write);
        } catch (const kvjax::Error& error) {
          CHECK(error.code() == kvjax::ErrorCode::kResourceExhausted);
          failed[shards == &many] = true;
        }
      }
      CHECK_EQ(failed[0], failed[1]);
      CHECK(one.Contents() == many.Contents());
      CHECK(spec.on_full == kvjax::OnFull::kGrow || many.Contents().size() <= spec.max_capacity);
    }
  }
}

}  // namespace core_select
