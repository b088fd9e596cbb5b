// The 16-bit row types: every value and every interval between two neighbours.
#include "kvjax/ffi/core/half.h"

#include <bit>
#include <cmath>
#include <limits>

#include "kvjax/ffi/core/row.h"
#include "tests/cpp/support/check.h"

namespace core_half {

using kvjax::FromFloat16;
using kvjax::RowType;
using kvjax::ToFloat16;

TEST(BFloat16RoundsToNearestEven) {
  const auto round = [](uint32_t bits) { return kvjax::ToBFloat16(std::bit_cast<float>(bits)); };
  CHECK_EQ(round(0x3F808000), 0x3F80);  // a tie goes to the even one
  CHECK_EQ(round(0x3F818000), 0x3F82);
  CHECK_EQ(round(0x3F808001), 0x3F81);
  CHECK_EQ(round(0x3F807FFF), 0x3F80);
  CHECK_EQ(round(0x7F7FFFFF), 0x7F80);  // the largest float becomes infinite
  CHECK_EQ(round(0xFF800000), 0xFF80);
  CHECK_EQ(round(0x7F800001), 0x7FC0);  // NaN stays NaN
  CHECK_EQ(round(0x80000001), 0x8000);
  for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
    CHECK_EQ(kvjax::ToBFloat16(kvjax::FromBFloat16(static_cast<uint16_t>(bits))), bits);
  }
}

TEST(Float16KnownValues) {
  CHECK_EQ(FromFloat16(0x0001), 0x1p-24f);
  CHECK_EQ(FromFloat16(0x03FF), 1023 * 0x1p-24f);
  CHECK_EQ(FromFloat16(0x0400), 0x1p-14f);
  CHECK_EQ(FromFloat16(0x3C00), 1.0f);
  CHECK_EQ(FromFloat16(0xC000), -2.0f);
  CHECK_EQ(FromFloat16(0x7BFF), 65504.0f);
  CHECK_EQ(FromFloat16(0x7C00), std::numeric_limits<float>::infinity());
  CHECK_EQ(FromFloat16(0xFC00), -std::numeric_limits<float>::infinity());
  CHECK(std::isnan(FromFloat16(0x7C01)));
  CHECK(std::isnan(FromFloat16(0xFFFF)));
}

TEST(Float16RoundsToNearestEven) {
  // All finite values are in order, so these cases are all there are: a value itself, and between two
  // neighbours the middle and what lies next to it. The value after the last stands for infinity.
  for (uint16_t sign : {0x0000, 0x8000}) {
    const float one = sign == 0 ? 1.0f : -1.0f;
    for (uint16_t half = 0; half < 0x7C00; ++half) {
      const auto above = static_cast<uint16_t>(half + 1), even = half % 2 == 0 ? half : above;
      const float low = FromFloat16(half), high = above == 0x7C00 ? 65536.0f : FromFloat16(above);
      CHECK(low < high);
      CHECK_EQ(ToFloat16(one * low), sign | half);
      const float middle = low + (high - low) / 2;
      CHECK_EQ(ToFloat16(one * middle), sign | even);
      CHECK_EQ(ToFloat16(one * std::nextafter(middle, low)), sign | half);
      CHECK_EQ(ToFloat16(one * std::nextafter(middle, high)), sign | above);
      CHECK_EQ(ToFloat16(one * std::nextafter(low, high)), sign | half);
      CHECK_EQ(ToFloat16(one * std::nextafter(high, low)), sign | above);
    }
  }
  const float largest = std::numeric_limits<float>::max();
  CHECK_EQ(ToFloat16(-largest), 0xFC00);
  CHECK_EQ(ToFloat16(std::numeric_limits<float>::infinity()), 0x7C00);
  CHECK_EQ(ToFloat16(std::numeric_limits<float>::denorm_min()), 0);
  for (uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u}) {
    CHECK(std::isnan(FromFloat16(ToFloat16(std::bit_cast<float>(bits)))));
    CHECK_EQ(ToFloat16(std::bit_cast<float>(bits)) >> 15, bits >> 31);
  }
}

TEST(ElementsAreLoadedAsTheyWereStored) {
  for (RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    std::byte row[12];
    for (int64_t column : {0, 1, 2}) {
      kvjax::StoreElement(type, row, column, 0.75f - 2.0f * static_cast<float>(column));
    }
    for (int64_t column : {0, 1, 2}) {
      CHECK_EQ(kvjax::LoadElement(type, row, column), 0.75f - 2.0f * static_cast<float>(column));
    }
  }
}

TEST(RowTypesHaveNames) {
  CHECK(kvjax::ParseRowType("float32") == RowType::kFloat32);
  CHECK(kvjax::ParseRowType("bfloat16") == RowType::kBFloat16);
  CHECK(kvjax::ParseRowType("float16") == RowType::kFloat16);
  CHECK_THROWS(kInvalidArgument, kvjax::ParseRowType("float8"));
  CHECK_EQ(kvjax::ItemSize(RowType::kFloat16), 2u);
}

}  // namespace core_half
