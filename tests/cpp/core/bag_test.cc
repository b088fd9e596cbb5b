// Bags against plain loops, serial and in parallel, and on the device's side against the CPU's,
// to the bit; its gradients as one trilinear form.
#include "kvjax/ffi/core/bag.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "kvjax/ffi/device/bags.h"
#include "kvjax/ffi/threads/threads.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_bag {

using Ids = std::vector<int32_t>;

/// Every chunk of at least `grain` items on a thread of its own.
void Threads(size_t n, size_t grain, const std::function<void(size_t, size_t)>& body) {
  const size_t chunks = std::clamp<size_t>(n / std::max<size_t>(grain, 1), 1, 7);
  std::vector<std::thread> threads;
  for (size_t c = 0; c < chunks; ++c) {
    threads.emplace_back([&, c] { body(n * c / chunks, n * (c + 1) / chunks); });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Batch {
  size_t n, bags, dim;
  Ids ids;
  data::Floats weights, rows, out;
  [[nodiscard]] kvjax::BagShape shape() const { return {n, bags, dim, ids.data()}; }
};

data::Floats Random(data::Stream& stream, size_t size) {
  data::Floats values(size);
  for (float& v : values) v = static_cast<float>(static_cast<int64_t>(stream.Below(2001)) - 1000) / 512.0f;
  return values;
}

/// Ids from -1 to `bags`, both of which are padding.
Batch RandomBatch(size_t n, size_t bags, size_t dim, bool sorted) {
  data::Stream stream(n * 31 + bags * 7 + dim + (sorted ? 1 : 0));
  Batch batch{n, bags, dim, Ids(n), {}, {}, {}};
  for (int32_t& id : batch.ids) id = static_cast<int32_t>(stream.Below(bags + 2)) - 1;
  if (sorted) {
    std::sort(batch.ids.begin(), batch.ids.end());
    for (int32_t& id : batch.ids) id = stream.Below(5) == 0 ? -1 : id;  // padding between and inside the bags
  }
  batch.weights = Random(stream, n);
  batch.rows = Random(stream, n * dim);
  batch.out = Random(stream, bags * dim);
  return batch;
}

data::Floats Sum(const kvjax::ParallelFor& parallel, const Batch& b) {
  data::Floats out(b.bags * b.dim, -7.0f);  // rubbish: every element must be written
  kvjax::SumBags(parallel, b.shape(), b.weights.data(), b.rows.data(), out.data());
  return out;
}

/// Whether two vectors have the same bits.
template <class T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// That the kernels give the bits of the CPU's functions, however the lanes are shared out.
void CheckKernels(const Batch& b) {
  namespace device = kvjax::device;
  const kvjax::BagShape shape = b.shape();
  const size_t bag_size = b.bags * b.dim, row_size = b.n * b.dim;
  data::Floats want_bags(bag_size), want_rows(row_size), want_dot(b.n);
  Ids want_from(bag_size);
  for (const unsigned threads : {1u, 3u}) {
    device::Threads q(threads, 64);
    data::Floats bags(bag_size, -7.0f), rows(row_size, -7.0f),
        dot(b.n, -7.0f);  // rubbish, to be written over
    Ids from(bag_size, -7);
    kvjax::SumBags(kvjax::Serial, shape, b.weights.data(), b.rows.data(), want_bags.data());
    device::SumBags(q, shape, b.weights.data(), b.rows.data(), bags.data());
    CHECK(Same(bags, want_bags));
    kvjax::ExpandBags(kvjax::Serial, shape, b.weights.data(), b.out.data(), want_rows.data());
    device::ExpandBags(q, shape, b.weights.data(), b.out.data(), rows.data());
    CHECK(Same(rows, want_rows));
    kvjax::DotBags(kvjax::Serial, shape, b.rows.data(), b.out.data(), want_dot.data());
    device::DotBags(q, shape, b.rows.data(), b.out.data(), dot.data());
    CHECK(Same(dot, want_dot));
    kvjax::MaxBags(kvjax::Serial, shape, b.rows.data(), want_bags.data(), want_from.data());
    device::MaxBags(q, shape, b.rows.data(), bags.data(), from.data());
    CHECK(Same(bags, want_bags) && Same(from, want_from));
    kvjax::PlaceBags(kvjax::Serial, shape, from.data(), b.out.data(), want_rows.data());
    device::PlaceBags(q, shape, from.data(), b.out.data(), rows.data());
    CHECK(Same(rows, want_rows));
  }
}

void CheckBatch(const Batch& b) {
  CheckKernels(b);
  data::Floats sum(b.bags * b.dim, 0.0f), max(b.bags * b.dim, 0.0f), expanded(b.n * b.dim, 0.0f),
      dot(b.n, 0.0f);
  Ids from(b.bags * b.dim, -1);
  for (size_t i = 0; i < b.n; ++i) {
    if (b.ids[i] < 0 || static_cast<size_t>(b.ids[i]) >= b.bags) continue;
    for (size_t d = 0; d < b.dim; ++d) {
      const size_t o = static_cast<size_t>(b.ids[i]) * b.dim + d, r = i * b.dim + d;
      sum[o] += b.weights[i] * b.rows[r];
      if (from[o] < 0 || b.rows[r] > max[o]) max[o] = b.rows[r], from[o] = static_cast<int32_t>(i);
      expanded[r] = b.weights[i] * b.out[o];
      dot[i] += b.rows[r] * b.out[o];
    }
  }
  data::Floats placed(b.n * b.dim, 0.0f);
  for (size_t o = 0; o < from.size(); ++o) {
    if (from[o] >= 0) placed[static_cast<size_t>(from[o]) * b.dim + o % b.dim] = b.out[o];
  }
  for (const kvjax::ParallelFor& parallel :
       {kvjax::ParallelFor(kvjax::Serial), kvjax::ParallelFor(Threads)}) {
    CHECK(Sum(parallel, b) == sum);  // to the bit
    data::Floats got_max(sum.size(), -7.0f), got_rows(expanded.size(), -7.0f), got_dot(b.n, -7.0f);
    Ids got_from(from.size(), -7);
    kvjax::MaxBags(parallel, b.shape(), b.rows.data(), got_max.data(), got_from.data());
    CHECK(got_max == max && got_from == from);
    kvjax::ExpandBags(parallel, b.shape(), b.weights.data(), b.out.data(), got_rows.data());
    CHECK(got_rows == expanded);
    kvjax::PlaceBags(parallel, b.shape(), from.data(), b.out.data(), got_rows.data());
    CHECK(got_rows == placed);
    kvjax::DotBags(parallel, b.shape(), b.rows.data(), b.out.data(), got_dot.data());
    for (size_t i = 0; i < b.n; ++i) {
      CHECK(std::abs(got_dot[i] - dot[i]) <= 1e-4f * static_cast<float>(b.dim));  // lanes: another order
    }
  }
}

TEST(RandomBatchesMatchPlainLoops) {
  for (size_t n : {0u, 1u, 17u, 5000u}) {
    for (size_t bags : {0u, 1u, 3u, 900u}) {
      for (size_t dim : {1u, 3u, 8u, 21u}) {
        for (bool sorted : {false, true}) CheckBatch(RandomBatch(n, bags, dim, sorted));
      }
    }
  }
}

TEST(AscendingBagsAreCutBetweenBags) {
  //             0   1  2   3  4  5   6  7
  const Ids ids{-1, 0, 0, -1, 0, 2, 9, 2};
  const kvjax::BagShape shape{ids.size(), 3, 1, ids.data()};
  CHECK(kvjax::IsAscending(shape));
  const size_t want[] = {0, 1, 5, 5, 5, 5, 8, 8, 8};
  for (size_t i = 0; i <= ids.size(); ++i) CHECK_EQ(kvjax::NextBag(shape, i), want[i]);
  const Ids falling{1, 0};
  CHECK(!kvjax::IsAscending({2, 2, 1, falling.data()}));
}

TEST(OneBagOfAllRowsIsOneThreads) {
  Batch b = RandomBatch(50000, 1, 4, true);
  std::fill(b.ids.begin(), b.ids.end(), 0);
  CheckBatch(b);
}

TEST(RowsAreAddedInOrder) {
  // (1e8 + 1) - 1e8 is 0 in float and 1e8 - 1e8 + 1 is 1.
  Batch b{3, 1, 1, {0, 0, 0}, {1, 1, 1}, {1e8f, 1.0f, -1e8f}, {}};
  CHECK_EQ(Sum(Threads, b)[0], 0.0f);
  b.rows = {1e8f, -1e8f, 1.0f};
  CHECK_EQ(Sum(Threads, b)[0], 1.0f);
}

TEST(PaddingMayHoldAnything) {
  const float nan = std::bit_cast<float>(0x7FC00000u);
  const Batch b{4, 2, 1, {1, INT32_MIN, INT32_MAX, 2}, {2, nan, nan, nan}, {3, nan, nan, nan}, {5, 6}};
  CheckKernels(b);
  CHECK(Sum(kvjax::Serial, b) == data::Floats({0, 6}));
}

TEST(TheMaximumOfInfinitiesAndNan) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::bit_cast<float>(0x7FC00000u);
  const Ids ids{0, 0, 1, 1, 1, 2, 2};
  const data::Floats rows{-inf, -inf, 1, nan, 2, nan, 5};
  CheckKernels({7, 3, 1, ids, data::Floats(7, 1.0f), rows, {1, 2, 3}});
  data::Floats out(3);
  Ids from(3);
  kvjax::MaxBags(kvjax::Serial, {7, 3, 1, ids.data()}, rows.data(), out.data(), from.data());
  CHECK_EQ(out[0], -inf);
  CHECK(out[1] != out[1] && out[2] != out[2]);
  CHECK(from == Ids({0, 3, 5}));
}

TEST(LengthsBecomeIds) {
  Ids ids(6, -7);
  const Ids lengths{2, 0, 3};
  kvjax::IdsOfLengths("t", lengths.data(), 3, 6, ids.data());
  CHECK(ids == Ids({0, 0, 2, 2, 2, -1}));
  CHECK_THROWS(kInvalidArgument, kvjax::IdsOfLengths("t", lengths.data(), 3, 4, ids.data()));
  const Ids negative{1, -1}, huge{INT32_MAX, INT32_MAX};
  CHECK_THROWS(kInvalidArgument, kvjax::IdsOfLengths("t", negative.data(), 2, 6, ids.data()));
  CHECK_THROWS(kInvalidArgument, kvjax::IdsOfLengths("t", huge.data(), 2, 6, ids.data()));
  kvjax::IdsOfLengths("t", nullptr, 0, 0, nullptr);
}

/// The ids on the device, and what is reported to the host.
struct Reported {
  Ids ids;
  kvjax::device::Report report;
};
Reported OnDevice(const Ids& lengths, size_t n) {
  Reported reported{Ids(n, -7), {}};
  kvjax::device::Threads q(3, 2);
  uint32_t refusing = 0;
  const kvjax::device::CallView call{nullptr, &reported.report, nullptr, 0, false, &refusing};
  kvjax::device::IdsOfLengths(q, call, lengths.data(), lengths.size(), n, reported.ids.data());
  return reported;
}

TEST(LengthsBecomeIdsOnTheDevice) {
  data::Stream stream(3);
  for (const size_t bags : {0u, 1u, 2u, 3u, 40u}) {
    for (const size_t n : {0u, 1u, 7u, 100u}) {
      Ids lengths(bags), want(n);
      size_t left = n;  // empty bags first, in between and last, and keys left over
      for (int32_t& length : lengths) {
        length = stream.Below(2) == 0 ? 0 : static_cast<int32_t>(stream.Below(left + 1));
        left -= static_cast<size_t>(length);
      }
      kvjax::IdsOfLengths("t", lengths.data(), bags, n, want.data());
      const Reported reported = OnDevice(lengths, n);
      CHECK(reported.ids == want && reported.report.refusal == 0);
    }
  }
}

TEST(TheFirstLengthThatDoesNotFitIsReported) {
  using kvjax::device::Refusal;
  const auto check = [](const Ids& lengths, Refusal why, uint32_t got, uint32_t want) {
    const Reported reported = OnDevice(lengths, 6);
    CHECK(reported.ids == Ids(6, -1));
    CHECK(reported.report.refusal == static_cast<uint32_t>(why));
    CHECK_EQ(reported.report.got, got);
    CHECK_EQ(reported.report.want, want);
  };
  check({1, -3, 9, -1}, Refusal::kLength, static_cast<uint32_t>(-3), 1);
  check({1, 2, 4, -1}, Refusal::kLengths, 2, 6);
  check({INT32_MAX, INT32_MAX, 3}, Refusal::kLengths, 0, 6);  // which is 1 in 32 bits
  check({2, INT32_MAX, INT32_MAX, 1}, Refusal::kLengths, 1, 6);
}

}  // namespace core_bag
