// Space for a change: the choice of the rows that are evicted for it, or because a policy says so.
//
// A sharded table makes the choice that an unsharded one would make. Where that takes numbers of all shards,
// each counts (Count), the counts are added up, and each continues with the sum (Continue), until all know
// enough; they know it at the same time. An unsharded table needs to ask nobody.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/sorted.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/store.h"
#include "kvjax/ffi/cpu/change.h"
#include "kvjax/ffi/cpu/shortlist.h"

namespace kvjax {

/// Rows of all shards: those that there are, those to come, and how many of these belong to shards before
/// this.
struct Totals {
  uint64_t size = 0;
  uint64_t entering = 0;
  uint64_t before = 0;
};

class SpaceMaker {
 public:
  /// What the choice is made from; all of it must outlive this.
  struct Source {
    const TableSpec& spec;
    const RowStore& store;
    const Admission& admission;
    const ScoreFunction& score;
    Shortlists& shortlists;
  };

  /// For `change`, which belongs to the op that errors name. `alone`: there are no other shards.
  SpaceMaker(Source from, std::string_view op, Change& change, Totals totals, int64_t step, bool alone)
      : from_(from), op_(op), change_(&change), totals_(totals), step_(step), alone_(alone) {}

  /// Begins to choose the rows to evict before the change can be made: by the table's policy if its time has
  /// come (`due`), and as many as the capacity asks for. Rows of the change stay. Returns whether all is
  /// known.
  bool Make(const ParallelFor& parallel, bool due) {
    const TableSpec& spec = from_.spec;
    excess_ = spec.max_capacity > 0 && after() > spec.max_capacity ? after() - spec.max_capacity : 0;
    const bool evicts = excess_ > 0 && spec.on_full == OnFull::kEvict;
    if (excess_ == 0 && !due) return true;
    if (!evicts && !due) return Settle(parallel);
    needed_ = evicts ? excess_ : 0;
    return spec.policy.empty() ? Settle(parallel) : Begin(parallel, spec.policy);
  }

  /// Begins to choose what `policy` evicts by hand.
  bool Evict(const ParallelFor& parallel, const Policy& policy) { return Begin(parallel, policy); }

  /// What this shard adds to the sum that it needs.
  [[nodiscard]] Tally Count() const {
    if (ranking_ < policy_.rankings()) return selection_.Count();
    Tally tally;
    tally.counts[0] = leaving_;
    return tally;
  }

  /// Continues with the sum. Returns whether all is known.
  bool Continue(const ParallelFor& parallel, const Tally& sum) {
    if (ranking_ == policy_.rankings()) {
      chosen_ = sum.counts[0];
      return Settle(parallel);
    }
    if (!selection_.Continue(sum)) return false;
    Rank(selection_.first(), selection_.total());
    return Advance(parallel);
  }

 private:
  using Rows = Shortlists::Rows;
  static constexpr size_t kGrain = 2048;  // rows: below this, waking a second thread costs more than it saves

  bool Begin(const ParallelFor& parallel, const Policy& policy) {
    policy_ = policy;
    rows_ = Candidates(parallel);
    if (policy_.scored()) {
      std::sort(rows_.begin(), rows_.end(), [](const Candidate& x, const Candidate& y) {
        return PlaceByBucket(x.key) < PlaceByBucket(y.key);
      });
    }
    return Advance(parallel);
  }

  /// Takes the rankings of the policy, as far as no other shard has to be asked, and then makes the
  /// choice.
  bool Advance(const ParallelFor& parallel) {
    const Policy::View view = Seen(parallel);
    while (ranking_ < policy_.rankings()) {
      const uint64_t n = policy_.Wanted(ranking_, needed_, totals_.size);
      std::vector<RowRank> first;
      if (n > 0) first = policy_.First(view, rows_, ranking_, n);
      if (n > 0 && !alone_) {
        selection_ = Selection(std::move(first), n);
        return false;
      }
      Rank(first, first.size());
    }
    Choose(view);
    if (excess_ == 0 || last_) return true;
    if (!alone_) return false;  // how many rows have all shards chosen?
    chosen_ = leaving_;
    return Settle(parallel);
  }

  /// The next ranking has chosen `first`, out of so many.
  void Rank(const std::vector<RowRank>& first, uint64_t total) {
    if (last_ && total < needed_) {
      throw FullError(from_.spec.name, op_, from_.spec.max_capacity, after(), chosen_ + total);
    }
    std::vector<uint8_t>& mask = ranked_.emplace_back(rows_.size());
    for (const RowRank& rank : first) mask[rank.i] = 1;
    ++ranking_;
  }

  /// All shards together have chosen `chosen_` rows: what if that is too few?
  bool Settle(const ParallelFor& parallel) {
    if (chosen_ >= excess_) return true;
    const uint64_t missing = excess_ - chosen_;
    switch (from_.spec.on_full) {
      case OnFull::kGrow: {
        const uint64_t over = std::min(missing, totals_.entering);
        change_->over_capacity =
            std::min<uint64_t>(over - std::min(over, totals_.before), change_->entering());
        return true;
      }
      case OnFull::kError:
        throw FullError(from_.spec.name, op_, from_.spec.max_capacity, after());
      case OnFull::kEvict:
        break;
    }
    policy_ = Policy::Last();
    needed_ = missing;
    ranking_ = 0;
    ranked_.clear();
    last_ = true;
    rows_ = Candidates(parallel);
    return Advance(parallel);
  }

  /// How many rows there would be if none were evicted.
  [[nodiscard]] uint64_t after() const { return totals_.size + totals_.entering; }

  /// Rows that may be evicted: all, or as many as the policy needs to choose what it would choose of all.
  [[nodiscard]] Rows Candidates(const ParallelFor& parallel) const {
    const KeyNumbering stay = Staying();
    const auto free = [&](const Candidate& row) { return row.header.pinned == 0 && !stay.Has(row.row); };
    const bool among_first = policy_.among_first();
    std::optional<Rows> first;
    if (among_first) first = First(parallel, free);
    if (first) return *std::move(first);
    Rows rows = AllRows(parallel);
    if (among_first) {
      std::erase_if(rows, [](const Candidate& row) { return row.header.pinned != 0; });
      from_.shortlists.Fill(
          from_.store.size(), policy_, rows, [&](const Rule& rule) { return Wanted(rule); }, step_);
      first = First(parallel, free);  // rather than to rank and to test all rows
      if (first) return *std::move(first);
    }
    std::erase_if(rows, [&](const Candidate& row) { return !free(row); });
    return rows;
  }

  /// Those that the shortlists know. Nothing if they do not reach far enough.
  template <class Free>
  [[nodiscard]] std::optional<Rows> First(const ParallelFor& parallel, Free free) const {
    if (const Rule* only = policy_.only()) return First(parallel, *only, free);  // a list has each row once
    Rows all;
    for (const Policy::Alternative& alternative : policy_.alternatives()) {
      std::vector<std::optional<Rows>> truths;  // the rows for which they hold, and maybe others
      for (const auto& [rule, name, number] : alternative.words) {
        if (rule.operands() == 0) {
          truths.push_back(First(parallel, rule, free));
          if (!rule.ranks()) continue;
          if (!truths.back()) return std::nullopt;
          all.insert(all.end(), truths.back()->begin(), truths.back()->end());
        } else if (rule.operands() == 1) {
          truths.back().reset();
        } else {
          std::optional<Rows> last = std::move(truths.back());
          truths.pop_back();
          Join(rule, truths.back(), std::move(last));
        }
      }
      if (!truths.back()) return std::nullopt;
      all.insert(all.end(), truths.back()->begin(), truths.back()->end());
    }
    std::sort(all.begin(), all.end(), [](const Candidate& x, const Candidate& y) { return x.row < y.row; });
    const auto same = [](const Candidate& x, const Candidate& y) { return x.row == y.row; };
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
    return all;
  }
  template <class Free>
  [[nodiscard]] std::optional<Rows> First(const ParallelFor& parallel, const Rule& rule, Free free) const {
    if (!rule.by_age() && !rule.by_frequency()) return std::nullopt;
    return from_.shortlists.First(parallel, from_.store, rule, Wanted(rule), step_, free);
  }
  /// Rows for which both hold, or one of them, and maybe others.
  static void Join(const Rule& rule, std::optional<Rows>& rows, std::optional<Rows> others) {
    if (rule.kind == Rule::Kind::kAnd) {
      if (!rows || (others && others->size() < rows->size())) rows = std::move(others);
    } else if (rows && others) {
      rows->insert(rows->end(), others->begin(), others->end());
    } else {
      rows.reset();
    }
  }
  [[nodiscard]] size_t Wanted(const Rule& rule) const {
    return rule.ranks() ? static_cast<size_t>(rule.Wanted(needed_, totals_.size)) : 0;
  }

  /// Rows that stay because they are shared or of the change, or have been chosen.
  [[nodiscard]] KeyNumbering Staying() const {
    const RowStore& store = from_.store;
    size_t n = 1 + change_->found.rows.size();
    for (const auto& [reason, rows] : change_->leaving) n += rows.size();
    KeyNumbering stays(n);
    if (from_.admission.shares()) {  // the row of many keys
      const uint32_t shared = store.index().Find(from_.admission.spec().shared_key);
      if (shared != kNoRow) stays.Add(shared);
    }
    for (const uint32_t row : change_->found.rows) {
      if (row != kNoRow) stays.Add(row);
    }
    for (const auto& [reason, rows] : change_->leaving) {
      for (const KeyRow& leaving : rows) stays.Add(leaving.row);
    }
    return stays;
  }

  [[nodiscard]] Policy::View Seen(const ParallelFor& parallel) const {
    return {from_.store, from_.spec.type, from_.spec.dim, step_, from_.score, parallel};
  }

  [[nodiscard]] Rows AllRows(const ParallelFor& parallel) const {
    const RowStore& store = from_.store;
    Rows rows;
    rows.reserve(store.size());
    store.index().ForEach([&](uint64_t key, uint32_t row) { rows.push_back({key, row, {}}); });
    parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
      constexpr size_t kAhead = 16;
      for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < end) store.PrefetchHeader(rows[i + kAhead].row);
        rows[i].header = store.Header(rows[i].row);
      }
    });
    return rows;
  }

  /// Moves the rows that the policy chooses to those that leave.
  void Choose(const Policy::View& view) {
    const std::vector<uint32_t> choice = policy_.Choose(view, rows_, ranked_);
    const size_t first = change_->leaving.size();
    for (size_t a = 0; a < policy_.size(); ++a)
      change_->leaving.emplace_back(policy_.reason(a), std::vector<KeyRow>());
    size_t kept = 0;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (choice[i] == 0) {
        rows_[kept++] = rows_[i];
      } else {
        change_->leaving[first + choice[i] - 1].second.push_back({rows_[i].key, rows_[i].row});
      }
    }
    leaving_ += rows_.size() - kept;
    rows_.resize(kept);
  }

  Source from_;
  std::string_view op_;
  Change* change_;
  Totals totals_;
  int64_t step_;  // ages are counted from here
  bool alone_;
  uint64_t excess_ = 0;   // rows beyond the capacity, if none were evicted
  uint64_t needed_ = 0;   // rows that the policy shall make space for
  uint64_t chosen_ = 0;   // by all shards
  uint64_t leaving_ = 0;  // from this one
  bool last_ = false;     // whether the policy is the one that is asked last, for what is still missing
  Rows rows_;
  Policy policy_;
  size_t ranking_ = 0;                        // of the policy, which is being decided
  std::vector<std::vector<uint8_t>> ranked_;  // which of the rows those before have chosen
  Selection selection_;
};

}  // namespace kvjax
