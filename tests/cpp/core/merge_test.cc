// MergeRows against a plain map of sums.
#include "kvjax/ffi/core/merge.h"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_merge {

struct Merged {
  data::Keys keys;
  data::Floats rows;
  std::vector<int32_t> counts;
  size_t distinct;
};

Merged Merge(const data::Keys& keys, const data::Floats& rows, const std::vector<int32_t>& counts,
             size_t dim) {
  const size_t n = keys.size();
  // Rubbish in the outputs: every element must be written.
  Merged out{data::Keys(n, 0xABAB), data::Floats(n * dim, -7.0f), std::vector<int32_t>(n, -7), 0};
  out.distinct = kvjax::MergeRows(kvjax::Serial, keys.data(), rows.data(), counts.data(), n, dim,
                                  out.keys.data(), out.rows.data(), out.counts.data());
  return out;
}

TEST(NumbersFollowFirstOccurrence) {
  kvjax::KeyNumbering numbering(6);
  CHECK_EQ(numbering.Add(9), 0u);
  CHECK_EQ(numbering.Add(0), 1u);
  CHECK_EQ(numbering.Add(9), 0u);
  CHECK_EQ(numbering.Add(static_cast<uint64_t>(-1)), 2u);
  CHECK_EQ(numbering.Add(0xFFFFFFFFu), 3u);
  CHECK_EQ(numbering.Add(0), 1u);
  CHECK(numbering.keys() == data::Keys({9, 0, static_cast<uint64_t>(-1), 0xFFFFFFFFu}));
}

TEST(KeysThatCollideByTheFrozenHashAreNumberedAndGroupedAsFast) {
  // Else each is compared with all before it.
  const auto [numbered, by_hash] = data::SecondsBySecret([keys = data::Colliding(8'000, /*low=*/true)] {
    kvjax::KeyNumbering numbering(keys.size());
    for (const uint64_t key : keys) numbering.Add(key);
  });
  CHECK(20 * numbered < by_hash);
  const std::vector<int32_t> counts(8'000, 1);
  const auto [grouped, all] = data::SecondsBySecret([&, keys = data::Colliding(8'000, /*low=*/false)] {
    CHECK_EQ(kvjax::KeyGroups(kvjax::Serial, keys.data(), counts.data(), keys.size()).size(), keys.size());
  });
  CHECK(20 * grouped < all);
}

TEST(NothingMergesToNothing) {
  CHECK_EQ(Merge({}, {}, {}, 3).distinct, 0u);
  const Merged padding = Merge({5, 6}, {1, 2}, {0, 0}, 1);
  CHECK_EQ(padding.distinct, 0u);
  CHECK(padding.keys == data::Keys({0, 0}));
  CHECK(padding.rows == data::Floats({0, 0}));
  CHECK(padding.counts == std::vector<int32_t>({0, 0}));
}

TEST(PaddingMayHoldAnythingAnywhere) {
  const float nan = std::bit_cast<float>(0x7FC00000u);
  const Merged m =
      Merge({7, 7, 3, 7, 3, 8}, {1, 10, nan, nan, 2, 20, 3, 30, 4, 40, nan, 0}, {1, 0, 2, 1, 5, 0}, 2);
  CHECK_EQ(m.distinct, 2u);
  CHECK(m.keys == data::Keys({7, 3, 0, 0, 0, 0}));
  CHECK(m.rows == data::Floats({4, 40, 6, 60, 0, 0, 0, 0, 0, 0, 0, 0}));
  CHECK(m.counts == std::vector<int32_t>({2, 7, 0, 0, 0, 0}));
}

TEST(SumsAreInOrderToTheBit) {
  // (1e8 + 1) - 1e8 is 0 in float and 1e8 - 1e8 + 1 is 1: only one order is right.
  const Merged m = Merge({4, 4, 4}, {1e8f, 1.0f, -1e8f}, {1, 1, 1}, 1);
  CHECK_EQ(m.rows[0], 0.0f);
  const Merged other = Merge({4, 4, 4}, {1e8f, -1e8f, 1.0f}, {1, 1, 1}, 1);
  CHECK_EQ(other.rows[0], 1.0f);
  const Merged zero = Merge({4}, {-0.0f}, {1}, 1);  // a single row is copied, not added to +0
  CHECK_EQ(std::bit_cast<uint32_t>(zero.rows[0]), 0x80000000u);
}

/// The rule in plain words: rows 0 to 255 one after the other, then the sum of rows 256 to 511, and so on.
data::Floats SumInBlocks(const data::Floats& rows, size_t dim, const std::vector<size_t>& positions) {
  data::Floats total(dim);
  for (size_t d = 0; d < dim; ++d) {
    for (size_t begin = 0; begin < positions.size(); begin += 256) {
      float sum = rows[positions[begin] * dim + d];
      for (size_t k = begin + 1; k < std::min(positions.size(), begin + 256); ++k)
        sum += rows[positions[k] * dim + d];
      total[d] = begin == 0 ? sum : total[d] + sum;
    }
  }
  return total;
}

void CheckAgainstReference(size_t n, size_t dim, uint64_t universe) {
  data::Stream stream(n * 1000 + universe);
  data::Keys keys, order;
  data::Floats rows;
  std::vector<int32_t> counts;
  std::unordered_map<uint64_t, std::pair<std::vector<size_t>, int32_t>> reference;  // positions, counts
  for (size_t i = 0; i < n; ++i) {
    const uint64_t pick = stream.Below(universe);
    const uint64_t key = pick < data::kAwkward.size() ? data::kAwkward[pick] : pick * 0x10001;
    const auto count = static_cast<int32_t>(stream.Below(4));
    keys.push_back(key);
    counts.push_back(count);
    for (size_t d = 0; d < dim; ++d) rows.push_back(static_cast<float>(stream.Below(1000)) * 0.37f);
    if (count == 0) continue;
    const auto [entry, fresh] = reference.try_emplace(key);
    if (fresh) order.push_back(key);
    entry->second.first.push_back(i);
    entry->second.second += count;
  }
  const Merged m = Merge(keys, rows, counts, dim);
  CHECK_EQ(m.distinct, order.size());
  for (size_t u = 0; u < n; ++u) {
    const bool real = u < order.size();
    CHECK_EQ(m.keys[u], real ? order[u] : 0);
    CHECK_EQ(m.counts[u], real ? reference.at(order[u]).second : 0);
    const data::Floats sum = real ? SumInBlocks(rows, dim, reference.at(order[u]).first) : data::Floats(dim);
    CHECK(std::equal(sum.begin(), sum.end(), m.rows.begin() + static_cast<long>(u * dim)));
  }
}

TEST(RandomBatchesMatchReference) {
  for (size_t dim : {1u, 3u, 64u}) {
    for (size_t n : {1u, 2u, 31u, 1000u}) {
      for (uint64_t universe : {1u, 20u, 700u, 1u << 20}) CheckAgainstReference(n, dim, universe);
    }
  }
}

}  // namespace core_merge
