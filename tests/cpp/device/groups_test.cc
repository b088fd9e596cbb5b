// Groups of equal keys, and the sums of their rows, with many lanes: against plain loops.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <vector>

#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/threads/threads.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/lanes.h"

namespace device_groups {

using data::Floats;
using data::Keys;
using kvjax::device::Segments;
using kvjax::device::Threads;
using kvjax::device::Valid;

/// n keys out of `universe`, the first of which are awkward; 0 for distinct ones.
Keys RandomKeys(data::Stream& stream, size_t n, uint64_t universe) {
  Keys keys;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t pick = universe == 0 ? i : stream.Below(universe);
    keys.push_back(pick < data::kAwkward.size() ? data::kAwkward[pick] : pick * 0x10001);
  }
  return keys;
}

/// Everything that Valid can ask.
struct Choice {
  Choice(data::Stream& stream, size_t n, bool all) : mask(new bool[n + 1]), counts(n + 1), rows(n + 1) {
    for (size_t i = 0; i < n; ++i) {
      mask[i] = all || stream.Below(4) != 0;
      counts[i] = all ? 1 : static_cast<int32_t>(stream.Below(4)) - 1;
      rows[i] = all || stream.Below(4) != 0 ? 0xFFFFFFFFu : 5;
    }
  }
  /// By the bits of `which`.
  [[nodiscard]] Valid valid(int which) const {
    return {.mask = (which & 1) != 0 ? mask.get() : nullptr,
            .counts = (which & 2) != 0 ? counts.data() : nullptr,
            .rows = (which & 4) != 0 ? rows.data() : nullptr};
  }
  std::unique_ptr<bool[]> mask;
  std::vector<int32_t> counts;
  std::vector<uint32_t> rows;
};

void CheckGroups(Threads& q, const Keys& keys, Valid valid) {
  const size_t n = keys.size();
  std::map<uint64_t, std::vector<uint32_t>> positions;
  std::vector<uint64_t> order;
  for (uint32_t i = 0; i < n; ++i) {
    if (!valid(i)) continue;
    if (positions[keys[i]].empty()) order.push_back(keys[i]);
    positions[keys[i]].push_back(i);
  }
  std::vector<uint32_t> first(n + 1, 77), is_first(n + 1, 77), alone(n + 1, 77);
  GroupKeys(q, keys.data(), valid, n, first.data(), is_first.data());
  GroupKeys(q, keys.data(), valid, n, alone.data());
  for (uint32_t i = 0; i < n; ++i) {
    CHECK_EQ(first[i], valid(i) ? positions[keys[i]].front() : i);
    CHECK_EQ(is_first[i], valid(i) && first[i] == i ? 1u : 0u);
  }
  CHECK(alone == first);
  CHECK_EQ(first[n], 77u);
  CHECK_EQ(is_first[n], 77u);

  const Segments<Threads> segments(q, keys.data(), valid, n);
  const auto of = segments.view();
  CHECK_EQ(*of.distinct, order.size());
  for (size_t u = 0; u < std::min<size_t>(*of.distinct, order.size()); ++u) {
    const auto& want = positions[order[u]];
    CHECK_EQ(of.end[u] - of.begin[u], want.size());
    CHECK(std::equal(want.begin(), want.end(), of.positions + of.begin[u]));
    CHECK(std::all_of(of.numbers + of.begin[u], of.numbers + of.end[u], [&](auto x) { return x == u; }));
  }
}

TEST(GroupsAreThoseOfAPlainLoop) {
  data::Stream stream(1);
  for (const size_t n : {0, 1, 2, 3, 64, 1000, 1025}) {
    for (const uint64_t universe : {0, 1, 2, 30, 700}) {
      for (const size_t grain : {1, 16}) {
        Threads q(4, grain);
        const Keys keys = RandomKeys(stream, n, universe);
        const Choice all(stream, n, true), some(stream, n, false);
        CheckGroups(q, keys, {});
        CheckGroups(q, keys, all.valid(7));
        for (int which = 1; which < 8; ++which) CheckGroups(q, keys, some.valid(which));
      }
    }
  }
}

TEST(NothingIsMeant) {
  Threads q(4, 1);
  const std::vector<int32_t> counts(20, 0);
  const auto mask = std::make_unique<bool[]>(20);
  CheckGroups(q, Keys(20, 5), {.counts = counts.data()});
  CheckGroups(q, Keys(20, 5), {.mask = mask.get()});
}

TEST(AllLanesHaveOneKey) {
  for (int round = 0; round < 50; ++round) {
    Threads q(4, 1 + static_cast<size_t>(round) % 4);
    const size_t n = 400;
    const Keys keys(n, data::kAwkward[static_cast<size_t>(round) % data::kAwkward.size()]);
    std::vector<uint32_t> first(n);
    GroupKeys(q, keys.data(), {}, n, first.data());
    CHECK(first == std::vector<uint32_t>(n, 0));
  }
}

struct Merged {
  explicit Merged(size_t n, size_t dim) : keys(n + 1, 0xABAB), rows(n * dim + 1, -7.0f), counts(n + 1, -7) {}
  Keys keys;
  Floats rows;
  std::vector<int32_t> counts;
};

template <class Q>
void CheckMerge(Q& q, const Keys& keys, const Floats& rows, const std::vector<int32_t>& counts, size_t dim) {
  const size_t n = keys.size();
  Merged want(n, dim), got(n, dim);
  kvjax::MergeRows(kvjax::Serial, keys.data(), rows.data(), counts.data(), n, dim, want.keys.data(),
                   want.rows.data(), want.counts.data());
  MergeGradients(q, keys.data(), rows.data(), counts.data(), n, dim, got.keys.data(), got.rows.data(),
                 got.counts.data());
  CHECK(got.keys == want.keys);
  CHECK(got.counts == want.counts);
  CHECK(std::memcmp(got.rows.data(), want.rows.data(), want.rows.size() * sizeof(float)) == 0);
}

TEST(MergedGradientsHaveTheBitsOfTheCpu) {
  data::Stream stream(2);
  for (const size_t n : {0, 1, 2, 31, 1000}) {
    for (const uint64_t universe : {0, 1, 5, 300}) {
      for (const size_t dim : {1, 3, 16}) {
        Threads q(4, 1 + stream.Below(16));
        const Keys keys = RandomKeys(stream, n, universe);
        Floats rows;
        std::vector<int32_t> counts;
        for (size_t j = 0; j < n * dim; ++j) {  // of many magnitudes, so that only one order has these bits
          const float x = static_cast<float>(stream.Below(1 << 20)) - (1 << 19);
          rows.push_back(std::ldexp(x, static_cast<int>(stream.Below(40)) - 40));
        }
        for (size_t i = 0; i < n; ++i) {
          counts.push_back(stream.Below(9) == 0 ? INT32_MAX : static_cast<int32_t>(stream.Below(4)));
        }
        CheckMerge(q, keys, rows, counts, dim);
        CheckMerge(q, keys, rows, std::vector<int32_t>(n, 0), dim);
        CheckMerge(q, keys, rows, std::vector<int32_t>(n, 1), dim);
      }
    }
  }
}

TEST(BlocksHaveTheBitsOfTheCpu) {
  // Keys with so many rows each, mixed.
  const std::vector<size_t> times = {1, 255, 256, 257, 2, 511, 512, 513, 1, 900};
  data::Stream stream(3);
  Keys keys;
  for (size_t u = 0; u < times.size(); ++u) keys.insert(keys.end(), times[u], u * 77);
  for (size_t i = keys.size(); i > 1; --i) std::swap(keys[i - 1], keys[stream.Below(i)]);
  for (const size_t dim : {1, 3, 4, 40}) {
    Floats rows;
    for (size_t j = 0; j < keys.size() * dim; ++j) {
      rows.push_back(
          std::ldexp(static_cast<float>(stream.Below(1 << 20)), static_cast<int>(stream.Below(40)) - 40));
    }
    std::vector<int32_t> counts;
    for (size_t i = 0; i < keys.size(); ++i) counts.push_back(static_cast<int32_t>(stream.Below(9)));
    Threads threads(4, 16);
    device::Lanes lanes;
    CheckMerge(threads, keys, rows, counts, dim);
    CheckMerge(threads, keys, rows, std::vector<int32_t>(keys.size(), INT32_MAX / 700), dim);
    if (dim == 3 || dim == 4) CheckMerge(lanes, keys, rows, counts, dim);
  }
}

TEST(PaddingMayHoldAnythingAndOneRowIsCopied) {
  Threads q(4, 1);
  const float nan = std::nanf("");
  CheckMerge(q, {7, 7, 3, 7, 3, 8}, {1, 10, nan, nan, 2, 20, 3, 30, 4, 40, nan, 0}, {1, 0, 2, 1, 5, -3}, 2);
  CheckMerge(q, {4, 5}, {-0.0f, 0.0f}, {1, 1}, 1);
}

}  // namespace device_groups
