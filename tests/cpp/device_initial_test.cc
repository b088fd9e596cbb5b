// Initial rows written by the lanes of a tile: the bits that core/initial.h gives, and nothing beside the
// row.
#include <cstring>
#include <memory>
#include <vector>

#include "kvjax/ffi/cuda/initial.h"
#include "tests/cpp/check.h"
#include "tests/cpp/data.h"

namespace {

using kvjax::Initializer;
using kvjax::RowType;
using kvjax::device::InitialView;

/// One lane of `kLanes`; those of a tile are run one after the other.
template <int kLanes>
struct Lane {
  static constexpr int size() { return kLanes; }
  [[nodiscard]] int rank() const { return number; }
  int number;
};

using Bytes = std::vector<std::byte>;
constexpr size_t kMargin = 16;
constexpr std::byte kRubbish{0xA5};

/// The row with a margin of rubbish on both sides.
template <int kLanes>
Bytes Write(const InitialView& view, uint64_t key, uint32_t number) {
  Bytes out(view.row_bytes + 2 * kMargin, kRubbish);
  for (int lane = 0; lane < kLanes; ++lane) view.Write(Lane<kLanes>{lane}, key, number, out.data() + kMargin);
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
  uint32_t number = 0;
  for (const uint64_t key : data::kAwkward) {
    Bytes want(bytes + 2 * kMargin, kRubbish);
    if (initializer.kind != Initializer::Kind::kGiven) {
      initializer.Generate(key, dim, [&](int64_t column, float value) {
        StoreElement(type, want.data() + kMargin, column, value);
      });
    } else if (number < view.given_rows) {  // nothing is read behind those that have come
      std::memcpy(want.data() + kMargin, given.data() + number * bytes, bytes);
    }
    CHECK(data::SameBytes(Write<1>(view, key, number), want));
    CHECK(data::SameBytes(Write<8>(view, key, number), want));
    ++number;
  }
}

TEST(LanesWriteTheBitsOfTheCpu) {
  using Kind = Initializer::Kind;
  data::Stream stream(1);
  for (const int64_t dim : {1, 3, 4, 7, 31, 64}) {
    auto pool = std::make_shared<std::vector<float>>();
    for (int64_t i = 0; i < 11 * dim; ++i) pool->push_back(static_cast<float>(stream.Below(1000)) * 0.37f);
    for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
      Bytes given(5 * static_cast<size_t>(dim) * kvjax::ItemSize(type));
      for (std::byte& byte : given) byte = static_cast<std::byte>(stream.Next());
      for (const Kind kind : {Kind::kConstant, Kind::kUniform, Kind::kNormal, Kind::kTruncatedNormal,
                              Kind::kPool, Kind::kGiven}) {
        for (const uint64_t seed : {uint64_t{0}, ~uint64_t{0}, stream.Next()}) {
          CheckRows({{kind, -0.75, 1.5, seed}, kind == Kind::kPool ? pool : nullptr}, type, dim, given);
        }
      }
    }
  }
}

TEST(CopiesOfAnySizeAndAddress) {
  Bytes from(200), to(200);
  data::Stream stream(2);
  for (std::byte& byte : from) byte = static_cast<std::byte>(stream.Next());
  for (const size_t source : {0, 1, 2, 4, 6, 8, 16, 20}) {
    for (const size_t target : {0, 1, 2, 4, 12, 16}) {
      for (const size_t bytes : {0, 1, 2, 3, 4, 6, 12, 16, 28, 64, 130}) {
        std::fill(to.begin(), to.end(), kRubbish);
        Bytes want = to;
        std::copy_n(from.begin() + static_cast<long>(source), bytes,
                    want.begin() + static_cast<long>(target));
        for (int lane = 0; lane < 8; ++lane) {
          kvjax::device::CopyRecord(Lane<8>{lane}, to.data() + target, from.data() + source, bytes);
        }
        CHECK(data::SameBytes(to, want));
        std::fill_n(want.begin() + static_cast<long>(target), bytes, std::byte{0xFF});
        for (int lane = 0; lane < 8; ++lane) {
          kvjax::device::FillRecord(Lane<8>{lane}, to.data() + target, 0xFF, bytes);
        }
        CHECK(data::SameBytes(to, want));
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

}  // namespace
