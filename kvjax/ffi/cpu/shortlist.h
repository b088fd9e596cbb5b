// Shortlists: the rows of a table that come first in an order, so that evictions need not look at all rows.
//
// Only a write changes where a row stands, and it never moves the row forward. So what a list has left out
// stays behind its end, and a row that comes in before the end is added. What is chosen from a list is what
// would be chosen from all rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/rule.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// The rows that come first in one order.
class Shortlist {
 public:
  using Rows = std::vector<Candidate>;

  /// `rule` ranks rows, or bounds what the order is by.
  explicit Shortlist(const Rule& rule)
      : ranking_{.kind = rule.by_age() ? Rule::Kind::kRecent : Rule::Kind::kFrequent,
                 .half_life = rule.half_life} {}

  /// Whether it has the order that the rule needs.
  [[nodiscard]] bool Suits(const Rule& rule) const {
    return rule.by_age() == ranking_.by_age() && rule.half_life == ranking_.half_life;
  }
  [[nodiscard]] const Rule& ranking() const { return ranking_; }
  [[nodiscard]] size_t size() const { return sorted_.size() + late_.size(); }

  /// How many of the rows that are not pinned to list: enough for some evictions of n, and so many that the
  /// table is seldom searched. None if they are more than half of the table.
  [[nodiscard]] static size_t Length(size_t table, size_t free, size_t n) {
    const size_t length = std::min(free, std::max(kEvictions * std::min(n, free), free / kShare));
    return length > table / 2 ? 0 : length;
  }

  /// Lists the rows that come first, enough for evictions of n. all: those of a table of so many that are not
  /// pinned.
  void Fill(size_t table, const Rows& all, size_t n) {
    Clear();
    const size_t length = Length(table, all.size(), n);
    if (length == 0) return;
    std::vector<RowRank> first = FirstOf(all.size(), length, [&](size_t i) {
      return RowRank{ranking_.Order(all[i].header), Mix(all[i].key), i};
    });
    std::sort(first.rbegin(), first.rend());
    sorted_.reserve(first.size());
    for (const auto& [order, hash, i] : first) sorted_.push_back({order, hash, all[i].key});
    most_late_ = sorted_.size();
    end_ = sorted_.front();
  }

  /// A row that was not there, or was pinned.
  void Add(const Candidate& row) noexcept {
    if (size() == 0 || end_ < PlaceOf(row)) return;
    if (late_.size() >= most_late_) return Clear();  // rows come and go, and none is evicted
    try {
      AddLate(PlaceOf(row));
    } catch (...) {
      Clear();
    }
  }

  /// Whether it has all rows for which `rule` holds, a bound: else a search would look at all of it in vain.
  [[nodiscard]] bool Covers(const Rule& rule, int64_t step) const {
    return size() > 0 && rule.End(step) <= end_.order;
  }

  /// Forgets the rows: others may come before them now.
  void Clear() noexcept { sorted_.clear(), late_.clear(); }

  /// Of the rows before the first that is not `wanted`, which is asked about a row and those so far, the ones
  /// that are `free`, in order and with their headers of now. Nothing if the list ends before such a row.
  /// expected: about how many they are.
  template <class Wanted, class Free>
  [[nodiscard]] std::optional<Rows> First(const ParallelFor& parallel, const RowStore& store, size_t expected,
                                          Wanted wanted, Free free) {
    if (size() <= expected) return std::nullopt;
    try {
      Rows first;
      std::vector<Place> seen, rest;
      for (size_t n = expected + kGrain; rest.empty(); n *= 2) {
        if (size() == 0) return Clear(), std::nullopt;
        auto [places, rows] = Take(parallel, store, std::min(n, size()));
        for (size_t i = 0; i < rows.size(); ++i) {
          if (!rest.empty()) {
            rest.push_back(places[i]);
          } else if (!late_.empty() && late_.front() < places[i]) {
            AddLate(places[i]);  // after another that has moved
          } else if (!seen.empty() && seen.back().key == places[i].key) {
            continue;  // it has been added twice
          } else if (!wanted(rows[i], std::as_const(first))) {
            rest.push_back(places[i]);
          } else {
            seen.push_back(places[i]);
            if (free(rows[i])) first.push_back(rows[i]);
          }
        }
      }
      // All of them stay: what wants them may come to nothing.
      sorted_.insert(sorted_.end(), rest.rbegin(), rest.rend());
      sorted_.insert(sorted_.end(), seen.rbegin(), seen.rend());
      return first;
    } catch (...) {
      Clear();
      throw;
    }
  }

 private:
  struct Place {
    uint64_t order, hash, key;
    bool operator<(const Place& other) const {
      return order != other.order ? order < other.order : hash < other.hash;
    }
    bool operator>(const Place& other) const { return other < *this; }
  };
  static constexpr size_t kGrain = 64, kEvictions = 16, kShare = 16;

  [[nodiscard]] Place PlaceOf(const Candidate& row) const {
    return {ranking_.Order(row.header), Mix(row.key), row.key};
  }

  void AddLate(const Place& place) {
    late_.push_back(place);
    std::push_heap(late_.begin(), late_.end(), std::greater<>());
  }
  Place Pop() {
    Place first;
    if (late_.empty() || (!sorted_.empty() && sorted_.back() < late_.front())) {
      first = sorted_.back(), sorted_.pop_back();
    } else {
      first = late_.front();
      std::pop_heap(late_.begin(), late_.end(), std::greater<>());
      late_.pop_back();
    }
    return first;
  }

  /// Takes out the next n; returns those that stand where they stood. Others that are still before the end
  /// are put back where they stand now.
  std::pair<std::vector<Place>, Rows> Take(const ParallelFor& parallel, const RowStore& store, size_t n) {
    std::vector<Place> places(n);
    std::vector<uint64_t> keys(n);
    for (size_t i = 0; i < n; ++i) places[i] = Pop(), keys[i] = places[i].key;
    Rows rows(n);
    parallel(n, kFindGrain, [&](size_t begin, size_t end) {
      const auto found = [&](size_t, uint32_t row) {
        if (row != kNoRow) store.PrefetchHeader(row);
        return row;
      };
      const auto use = [&](size_t i, uint32_t row) {
        const size_t at = begin + i;
        rows[at] = {keys[at], row, row == kNoRow ? RowHeader{} : store.Header(row)};
      };
      store.index().FindEach(keys.data() + begin, end - begin, found, use);
    });
    size_t kept = 0;
    for (size_t i = 0; i < n; ++i) {
      if (rows[i].row == kNoRow || rows[i].header.pinned != 0) continue;  // Add tells when it is free again
      const Place now = PlaceOf(rows[i]);
      if (now.order == places[i].order) {
        places[kept] = places[i], rows[kept++] = rows[i];
      } else if (places[i] < now && !(end_ < now)) {  // a row before its place has left, and been added anew
        AddLate(now);
      }
    }
    places.resize(kept), rows.resize(kept);
    return {std::move(places), std::move(rows)};
  }
  static constexpr size_t kFindGrain = 2048;

  Rule ranking_;
  std::vector<Place> sorted_;  // the first row is the last one here
  std::vector<Place> late_;    // a heap of what was added, and of what has moved
  size_t most_late_ = 0;
  Place end_{};  // every row before it is listed
};

/// Those of a table, by the orders that its evictions need.
class Shortlists {
 public:
  using Rows = Shortlist::Rows;

  /// See Shortlist::First: those of which `rule`, at this step, takes the first n, or which it holds for.
  template <class Free>
  [[nodiscard]] std::optional<Rows> First(const ParallelFor& parallel, const RowStore& store,
                                          const Rule& rule, size_t n, int64_t step, Free free) {
    const auto found = Find(lists_, rule);
    if (found == lists_.end()) return std::nullopt;
    Shortlist& list = *found;
    if (!rule.ranks()) {
      if (!list.Covers(rule, step)) return std::nullopt;
      const auto held = [&](const Candidate& row, const Rows&) { return rule.Holds(row.header, step, 0.0); };
      return list.First(parallel, store, 0, held, free);
    }
    if (n == 0) return Rows();
    return list.First(
        parallel, store, n, [&](const Candidate&, const Rows& first) { return first.size() < n; }, free);
  }

  /// Lists what `policy` needs of all rows of such a table that are not pinned. wanted(rule): how many a
  /// ranking takes.
  template <class Wanted>
  void Fill(size_t table, const Policy& policy, const Rows& all, Wanted wanted, int64_t step) {
    std::vector<Shortlist> lists;
    std::vector<size_t> most;  // that one word takes of each
    for (const Policy::Alternative& alternative : policy.alternatives()) {
      for (const auto& [rule, name, number] : alternative.words) {
        if (!rule.by_age() && !rule.by_frequency()) continue;
        const auto holds = [&](const Candidate& row) { return rule.Holds(row.header, step, 0.0); };
        const auto held = [&] { return static_cast<size_t>(std::count_if(all.begin(), all.end(), holds)); };
        const auto at = static_cast<size_t>(Find(lists, rule) - lists.begin());
        if (at == lists.size()) lists.emplace_back(rule), most.push_back(0);
        most[at] = std::max(most[at], rule.ranks() ? wanted(rule) : held());
      }
    }
    for (size_t i = 0; i < lists.size(); ++i) lists[i].Fill(table, all, most[i]);
    // Of bounds that are too broad for a list: the list that other policies have of that order stays.
    std::erase_if(lists, [](const Shortlist& list) { return list.size() == 0; });
    lists.reserve(lists.size() + lists_.size());
    for (Shortlist& list : lists_) {
      if (lists.size() < kMost && list.size() > 0 && Find(lists, list.ranking()) == lists.end())
        lists.push_back(std::move(list));
    }
    lists_ = std::move(lists);
  }

  /// See Shortlist.
  void Add(const Candidate& row) noexcept {
    for (Shortlist& list : lists_) list.Add(row);
  }
  void Clear() noexcept {
    for (Shortlist& list : lists_) list.Clear();
  }
  [[nodiscard]] bool empty() const {
    return std::all_of(lists_.begin(), lists_.end(), [](const Shortlist& list) { return list.size() == 0; });
  }

 private:
  static std::vector<Shortlist>::iterator Find(std::vector<Shortlist>& lists, const Rule& rule) {
    return std::find_if(lists.begin(), lists.end(), [&](const Shortlist& list) { return list.Suits(rule); });
  }
  // A table may evict by several policies in turn: its own, the one that is asked last, and those of calls.
  static constexpr size_t kMost = 8;

  std::vector<Shortlist> lists_;  // those of the policy that was last listed come first
};

}  // namespace kvjax
