// The CPU backend's part in sharded tables.
#pragma once
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/cpu/backend_bags.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

struct CpuSharded {
  using Exec = xla::ffi::ThreadPool;

  static void Owned(Exec&, const OwnedOperands& o) {
    kvjax::Owned(o.table, o.keys, o.owners.given, o.owners.shards, o.shard, o.owned);
  }
  static void Route(Exec&, const RouteOperands& o) {
    kvjax::Route(o.table, o.keys, o.mask, o.owners.given, o.owners.shards, o.capacity, o.out);
  }
  static void Receive(Exec& pool, Table& t, const ReceiveOperands& o) {
    CheckCanaries(t.spec().name, "apply", o.gradients);
    t.Receive(CpuBags::On(pool), *o.version, o.keys, o.gradients.counts, o.gradients.rows, o.senders,
              *o.round, *o.rounds, o.initial);
  }
  static void PlanStep(Exec& pool, Table& t, const PlanStepOperands& o) {
    ShardSummary out;
    t.PlanStep(CpuBags::On(pool), o, out);
    Put(t, "apply", out, o.summary, o.words);
  }
  static void PutFailure(Exec&, uint64_t* summary, uint32_t number) {
    const uint64_t word = number;
    if (number != 0) std::memcpy(summary, &word, sizeof(word));
  }
  static void Summarize(Exec&, Table& t, const SummaryOperands& o) {
    ShardSummary out;
    t.Summarize(*o.version, out);
    Put(t, "write", out, o.summary, o.words);
  }
  static uint32_t Prepare(Exec& pool, Table& t, const PrepareOperands& o) {
    std::vector<uint64_t> words(o.words);
    std::memcpy(words.data(), o.summaries, o.words * sizeof(uint64_t));
    std::vector<ShardSummary> all;
    const size_t each = o.words / o.shards;
    const auto own = o.shards == 1 ? size_t{0} : static_cast<size_t>(static_cast<uint32_t>(*o.shard));
    if (own >= o.shards || each < ShardSummary::kWords)
      throw OperandError(t.spec().name, Name(o.op), "the summary of this shard", "others");
    for (size_t s = 0; s < o.shards; ++s) all.push_back(ShardSummary::Read(words.data() + s * each, each));
    if (std::any_of(all.begin(), all.end(), [](const ShardSummary& s) { return s.failure != 0; })) {
      return static_cast<uint32_t>(all[own].failure);
    }
    Ask(t.Prepare(CpuBags::On(pool), Name(o.op), *o.version, all, own), o.out);
    return 0;
  }
  static void Continue(Exec& pool, Table& t, const ContinueOperands& o) {
    Ask(t.Continue(CpuBags::On(pool), Name(o.op), *o.version, Tally::Read(o.sum)), o.out);
  }
  static void CommitStep(Exec& pool, Table& t, const CommitStepOperands& o) {
    int64_t used = 0;
    *o.next = t.CommitStep(CpuBags::On(pool), *o.version, o.active, &used);
    std::memcpy(o.used_step, &used, sizeof(used));
  }
  static uint32_t Read(Exec&, const uint32_t* word) { return *word; }

 protected:
  /// See kCanary.
  static void CheckCanaries(std::string_view table, std::string_view op, const GradientSpan& g) {
    if (std::all_of(g.canaries, g.canaries + g.num_canaries,
                    [](uint32_t canary) { return canary == kCanary; }))
      return;
    throw CanaryError(table, op);
  }

 private:
  /// XLA may align the words like any uint32.
  static void Put(const Table& t, std::string_view op, const ShardSummary& summary, uint64_t* to, size_t n) {
    const size_t wanted = ShardSummary::kWords + summary.shared_gradient.size();
    if (n != wanted) {
      const std::string want = "a summary (" + std::to_string(wanted) + ", 2)";
      throw OperandError(t.spec().name, op, want, std::to_string(n) + " words");
    }
    std::vector<uint64_t> words(n);
    summary.Write(words.data(), n);
    std::memcpy(to, words.data(), n * sizeof(uint64_t));
  }
  static void Ask(const std::optional<Tally>& question, const TallyResult& out) {
    *out.more = question.has_value();
    if (question) question->Write(out.tally);
  }
};

}  // namespace kvjax
