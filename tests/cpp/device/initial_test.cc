// Initial rows written by the lanes of a tile: the bits that core/initial.h gives, and nothing beside the
// row.
#include "kvjax/ffi/device/initial.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/lanes.h"

namespace device_initial {

using kvjax::Initializer;
using kvjax::RowType;
using kvjax::device::InitialView;
using kvjax::device::Threads;

using Bytes = std::vector<std::byte>;
constexpr size_t kMargin = 16;
constexpr std::byte kRubbish{0xA5};

/// The rows of the awkward keys, each with a margin of rubbish on both sides; every third has none.
template <class Q>
std::vector<Bytes> Write(const InitialView& view) {
  const size_t n = data::kAwkward.size();
  std::vector<Bytes> out(n, Bytes(view.row_bytes + 2 * kMargin, kRubbish));
  Q().Tiles(n, [&](typename Q::Tile tile, size_t i) {
    const bool has = i < n && i % 3 != 2;
    view.WriteRows(tile, i < n ? data::kAwkward[i] : 0, static_cast<uint32_t>(i),
                   has ? out[i].data() + kMargin : nullptr);
  });
  return out;
}

void CheckRows(const Initializer& initializer, RowType type, int64_t dim, const Bytes& given) {
  const size_t bytes = static_cast<size_t>(dim) * kvjax::ItemSize(type);
  const InitialView view{.of = initializer,
                         .type = type,
                         .dim = dim,
                         .row_bytes = bytes,
                         .pool = initializer.pool == nullptr ? nullptr : initializer.pool->data(),
                         .pool_rows = initializer.pool == nullptr ? 0 : initializer.pool->size() / dim,
                         .given = given.data(),
                         .given_rows = given.size() / bytes};
  const std::vector<Bytes> one_lane = Write<Threads>(view), eight = Write<device::Lanes>(view);
  for (uint32_t number = 0; number < data::kAwkward.size(); ++number) {
    const uint64_t key = data::kAwkward[number];
    Bytes want(bytes + 2 * kMargin, kRubbish);
    if (number % 3 == 2) {
    } else if (initializer.kind != Initializer::Kind::kGiven) {
      initializer.Generate(key, dim, [&](int64_t column, float value) {
        StoreElement(type, want.data() + kMargin, column, value);
      });
    } else if (number < view.given_rows) {  // nothing is read behind those that have come
      std::memcpy(want.data() + kMargin, given.data() + number * bytes, bytes);
    }
    CHECK(data::SameBytes(one_lane[number], want));
    CHECK(data::SameBytes(eight[number], want));
  }
}

TEST(LanesWriteTheBitsOfTheCpu) {
  data::Stream stream(1);
  for (const int64_t dim : {1, 3, 4, 7, 31, 64}) {
    auto pool = std::make_shared<std::vector<float>>();
    for (int64_t i = 0; i < 11 * dim; ++i) pool->push_back(static_cast<float>(stream.Below(1000)) * 0.37f);
    for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
      Bytes given(5 * static_cast<size_t>(dim) * kvjax::ItemSize(type));
      for (std::byte& byte : given) byte = static_cast<std::byte>(stream.Next());
      for (const Initializer& initializer : data::EachInitializer(pool, stream.Next())) {
        CheckRows(initializer, type, dim, given);
      }
    }
  }
}

/// Copies records of that size from and to addresses of that kind, some of which are missing.
template <class Q>
void CheckCopies(size_t bytes, size_t source, size_t target) {
  constexpr size_t kRecords = 19;
  const size_t stride = bytes + 2 * kMargin + (-bytes & 15);
  struct alignas(16) Sixteen {
    std::byte bytes[16];
  };
  std::vector<Sixteen> from_blocks(kRecords * stride / 16), to_blocks(kRecords * stride / 16);
  auto *const from = from_blocks[0].bytes, *const to = to_blocks[0].bytes;
  data::Stream stream(bytes);
  for (size_t b = 0; b < kRecords * stride; ++b)
    from[b] = static_cast<std::byte>(stream.Next()), to[b] = kRubbish;
  Bytes want(to, to + kRecords * stride);
  const auto has = [](size_t i) { return i < kRecords && i % 5 != 1; };
  const auto has_source = [](size_t i) { return i % 7 != 2; };
  for (size_t i = 0; i < kRecords; ++i) {
    if (!has(i)) continue;
    const auto begin = want.begin() + static_cast<long>(i * stride + target);
    if (has_source(i)) std::copy_n(from + i * stride + source, bytes, begin);
    if (!has_source(i)) std::fill_n(begin, bytes, std::byte{0xFF});
  }
  Q().Tiles(kRecords, [&](typename Q::Tile tile, size_t i) {
    kvjax::device::CopyRecords(tile, has(i) ? to + i * stride + target : nullptr,
                               has_source(i) ? from + i * stride + source : nullptr, bytes, 0xFF);
  });
  CHECK(data::SameBytes(Bytes(to, to + kRecords * stride), want));
}

TEST(CopiesOfAnySizeAndAddress) {
  for (const size_t source : {0, 1, 2, 4, 8}) {
    for (const size_t target : {0, 1, 2, 4, 8}) {
      for (const size_t bytes : {0, 1, 2, 3, 4, 6, 16, 28, 32, 130}) {
        CheckCopies<Threads>(bytes, source, target);
        if (source == 0 || target == 0) CheckCopies<device::Lanes>(bytes, source, target);
      }
    }
  }
}

TEST(RecordsAreWhereDivisionSays) {
  for (const uint32_t per_slab : {1u, 2u, 3u, 7u, 1000u, 131072u, 2097152u}) {
    const kvjax::device::PlaneView view{nullptr, UINT64_MAX / per_slab, per_slab, 0};
    data::Stream stream(per_slab);
    std::vector<uint32_t> rows = {0, 1, 0x7FFFFFFF, 0xFFFFFFFE, per_slab - 1, per_slab, per_slab + 1};
    const uint32_t last = 0xFFFFFFFFu / per_slab * per_slab;
    rows.insert(rows.end(), {last, last - 1});
    for (int i = 0; i < 10000; ++i) rows.push_back(static_cast<uint32_t>(stream.Next()));
    for (const uint32_t row : rows) CHECK_EQ(view.Slab(row), row / per_slab);
  }
}

}  // namespace device_initial
