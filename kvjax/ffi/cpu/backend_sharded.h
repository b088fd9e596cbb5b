// What the CPU backend does for tables that are spread over devices.
#pragma once
#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/cpu/backend_bags.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

struct CpuCalls {
  static Call CallOf(Operand by) { return Call(*by.version, by.phase); }

  /// XLA aligns the words of an int64 like any uint32.
  static int64_t Unaligned(const int64_t* words) {
    int64_t value;
    std::memcpy(&value, words, sizeof(value));
    return value;
  }
  /// Written into every gradient; see core/call.h.
  static void CheckSeals(std::string_view table, std::string_view op, const uint32_t* seals, size_t n) {
    if (std::all_of(seals, seals + n, [](uint32_t seal) { return seal == kSeal; })) return;
    throw SealError(table, op);
  }
};

struct CpuSharded : CpuCalls {
  using Exec = xla::ffi::ThreadPool;

  static void Owned(Exec&, std::string_view table, KeySpan keys, const int32_t* owners, uint32_t shards,
                    uint32_t shard, bool* owned) {
    kvjax::Owned(table, keys, owners, shards, shard, owned);
  }
  static void Route(Exec&, std::string_view table, KeySpan keys, const bool* mask, const int32_t* owners,
                    uint32_t shards, int32_t room, Routed out) {
    kvjax::Route(table, keys, mask, owners, shards, room, out);
  }
  static void Receive(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                      const uint32_t* seals, size_t num_seals, const float* rows, size_t senders,
                      const int32_t* round, const int32_t* rounds, InitialRows initial) {
    CheckSeals(t.spec().name, "apply", seals, num_seals);
    t.Receive(CpuBags::On(pool), *version, keys, counts, rows, senders, *round, *rounds, initial);
  }
  static void PlanStep(Exec& pool, Table& t, const uint32_t* version, const int64_t* step,
                       const SlotLayout& layout, uint64_t* facts, size_t n) {
    ShardFacts out;
    t.PlanStep(CpuBags::On(pool), *version, Unaligned(step), layout, out);
    std::vector<uint64_t> words(n);
    out.Write(words.data(), n);
    std::memcpy(facts, words.data(), n * sizeof(uint64_t));
  }
  static void TellFacts(Exec&, uint64_t* facts, uint32_t number) {
    const uint64_t word = number;
    if (number != 0) std::memcpy(facts, &word, sizeof(word));
  }
  static void Facts(Exec&, Table& t, const uint32_t* version, uint64_t* facts, size_t n) {
    ShardFacts out;
    t.Facts(*version, out);
    std::vector<uint64_t> words(n);
    out.Write(words.data(), n);
    std::memcpy(facts, words.data(), n * sizeof(uint64_t));
  }
  /// The number of the failure that this shard has had before, or 0.
  static uint32_t Prepare(Exec& pool, Table& t, std::string_view op, const uint32_t* version,
                          const uint64_t* facts, size_t n, size_t shards, const int32_t* shard,
                          uint32_t* tally, uint32_t* more) {
    std::vector<uint64_t> words(n);
    std::memcpy(words.data(), facts, n * sizeof(uint64_t));
    std::vector<ShardFacts> all;
    const size_t each = n / shards;
    for (size_t s = 0; s < shards; ++s) all.push_back(ShardFacts::Read(words.data() + s * each, each));
    const auto own = shards == 1 ? size_t{0} : static_cast<size_t>(*shard);
    if (std::any_of(all.begin(), all.end(), [](const ShardFacts& f) { return f.failure != 0; })) {
      return static_cast<uint32_t>(all[own].failure);
    }
    Ask(t.Prepare(CpuBags::On(pool), op, *version, all, own), tally, more);
    return 0;
  }
  static void Hear(Exec& pool, Table& t, std::string_view op, const uint32_t* version, const uint32_t* sum,
                   uint32_t* tally, uint32_t* more) {
    Ask(t.Hear(CpuBags::On(pool), op, *version, Tally::Read(sum)), tally, more);
  }
  static void CommitStep(Exec&, Table& t, const uint32_t* version, uint32_t* next, int32_t* active,
                         int64_t* used_step) {
    int64_t used = 0;
    *next = t.CommitStep(*version, active, &used);
    std::memcpy(used_step, &used, sizeof(used));
  }
  static uint32_t Read(Exec&, const uint32_t* word) { return *word; }
  static void CopyBytes(Exec&, const std::byte* from, size_t n, std::byte* to) {
    if (from != to) std::memcpy(to, from, n);
  }

 private:
  static void Ask(const std::optional<Tally>& question, uint32_t* tally, uint32_t* more) {
    *more = question.has_value();
    if (question) question->Write(tally);
  }
};

}  // namespace kvjax
