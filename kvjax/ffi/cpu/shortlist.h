// The shortlist: the rows of a full table that were written least recently and are not pinned, so that it
// need not look at all of its rows in every step.
//
// A write gives its rows the table's last step, which does not fall. So what is not on the list stays behind
// those that are and have not been written since, these keep their order, and the choice is the same as from
// all rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

class Shortlist {
 public:
  /// The first n rows that are `free`, in their order, with their headers of now; fewer if the list has no
  /// more. Forgets rows that no longer come before all others.
  template <class Free>
  [[nodiscard]] std::vector<Candidate> First(const ParallelFor& parallel, const RowStore& store, size_t n,
                                             Free free) {
    std::vector<Candidate> first, seen, some;
    size_t end = keys_.size();
    while (first.size() < n && end > 0) {
      some.resize(std::min(end, std::max(n - first.size(), kGrain)));
      end -= some.size();
      Find(parallel, store, keys_.data() + end, some);
      for (size_t i = some.size(); i-- > 0;) {
        const Candidate& r = some[i];
        if (r.row == kNoRow || last_ < Rank(r)) continue;
        seen.push_back(r);
        if (first.size() < n && free(r)) first.push_back(r);
      }
    }
    keys_.resize(end);
    for (size_t i = seen.size(); i-- > 0;) keys_.push_back(seen[i].key);  // the step may come to nothing
    return first;
  }

  /// How many rows to list of `all`, enough for some steps that need `needed` each; 0 for none.
  [[nodiscard]] static size_t Wanted(size_t all, size_t needed) {
    const size_t n = std::max(kSteps * needed, kFewest);
    return n > all / 2 ? 0 : n;
  }

  /// Lists `first`, which are those of `all` rows that come first.
  void Fill(const std::vector<Candidate>& all, std::vector<RowRank> first, int64_t last_step) {
    Clear();
    std::sort(first.rbegin(), first.rend());
    // What is written later may tie with rows of the last step.
    if (first.empty() || all[first[0].i].header.version >= last_step) return;
    last_ = first[0];
    keys_.reserve(first.size());
    for (const RowRank& rank : first) keys_.push_back(all[rank.i].key);
  }

  /// A row is no longer pinned. The list may have left it out, and then is of no use if the row comes before
  /// its end.
  void Unpinned(const Candidate& row) {
    if (!(last_ < Rank(row))) Clear();
  }

  /// Forgets the rows: others may come before them now.
  void Clear() { keys_.clear(); }

  [[nodiscard]] bool empty() const { return keys_.empty(); }

 private:
  static constexpr size_t kGrain = 2048, kSteps = 16, kFewest = 1024;

  /// As Policy::Last() ranks.
  static RowRank Rank(const Candidate& row) {
    static constexpr Rule kRecent{.kind = Rule::Kind::kRecent};
    return {kRecent.Order(row.header, 0, 0.0), Mix(row.key), 0};
  }

  /// The rows of as many keys as `to` has space for.
  static void Find(const ParallelFor& parallel, const RowStore& store, const uint64_t* keys,
                   std::vector<Candidate>& to) {
    parallel(to.size(), kGrain, [&](size_t begin, size_t end) {
      const auto found = [&](size_t, uint32_t row) {
        if (row != kNoRow) store.PrefetchHeader(row);
        return row;
      };
      const auto use = [&](size_t i, uint32_t row) {
        to[begin + i] = {keys[begin + i], row, row == kNoRow ? RowHeader{} : store.Header(row)};
      };
      store.index().FindEach(keys + begin, end - begin, found, use);
    });
  }

  std::vector<uint64_t> keys_;  // the first row is the last one here
  RowRank last_{};
};

}  // namespace kvjax
