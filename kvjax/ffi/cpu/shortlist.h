// The shortlist: the rows of a full table that were written least recently, so that it need not look at all
// of its rows in every step.
//
// A write gives its rows the table's last step, which does not fall. So what is not on the list stays behind
// those that are and have not been written since, and the choice is the same as from all rows.
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
  /// The rows of the list that still come before all others, with their headers of now.
  [[nodiscard]] std::vector<Candidate> Rows(const ParallelFor& parallel, const RowStore& store) const {
    std::vector<Candidate> rows(keys_.size());
    parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
      const auto found = [&](size_t, uint32_t row) {
        if (row != kNoRow) store.PrefetchHeader(row);
        return row;
      };
      const auto use = [&](size_t i, uint32_t row) {
        rows[begin + i] = {keys_[begin + i], row, row == kNoRow ? RowHeader{} : store.Header(row)};
      };
      store.index().FindEach(keys_.data() + begin, end - begin, found, use);
    });
    std::erase_if(rows, [&](const Candidate& r) { return r.row == kNoRow || last_ < Rank(r); });
    return rows;
  }

  /// Lists those of `all` rows that come first, enough for some steps that need `needed` each.
  void Fill(const std::vector<Candidate>& all, size_t needed, int64_t last_step) {
    Clear();
    const size_t n = std::max(kSteps * needed, kFewest);
    if (n > all.size() / 2) return;
    std::vector<RowRank> ranks(all.size());
    for (size_t i = 0; i < all.size(); ++i) ranks[i] = Rank(all[i]), ranks[i].i = i;
    std::nth_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(n - 1), ranks.end());
    // What is written later may tie with rows of the last step.
    if (all[ranks[n - 1].i].header.version >= last_step) return;
    last_ = ranks[n - 1];
    keys_.reserve(n);
    for (size_t i = 0; i < n; ++i) keys_.push_back(all[ranks[i].i].key);
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

  std::vector<uint64_t> keys_;
  RowRank last_{};
};

}  // namespace kvjax
