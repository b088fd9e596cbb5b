// Random numbers against published vectors and the platform's libm; initial rows and their moments.
#include "kvjax/ffi/core/initial.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numbers>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_initial {

using data::Elements;
using kvjax::Initializer;
using Kind = kvjax::Distribution::Kind;
using Words = std::array<uint32_t, 4>;

TEST(PhiloxKnownAnswers) {
  // Random123, tests/kat_vectors, "philox4x32 10"; a seed is the two key words, the low one first.
  CHECK(kvjax::Philox({0, 0, 0, 0}, 0) == Words({0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK(kvjax::Philox({~0u, ~0u, ~0u, ~0u}, ~0ull) ==
        Words({0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK(kvjax::Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822) ==
        Words({0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(OpenUnitIsInsideTheInterval) {
  CHECK_EQ(kvjax::OpenUnit(0), 0x1p-33);
  CHECK_EQ(kvjax::OpenUnit(~0u), 1 - 0x1p-33);
  CHECK_EQ(kvjax::OpenUnit(0x80000000u), 0.5 + 0x1p-33);
}

TEST(PortableLogIsTheLogarithm) {
  data::Stream stream(1);
  CHECK_EQ(kvjax::PortableLog(1.0), 0.0);
  for (int i = 0; i < 200'000; ++i) {
    const double u = kvjax::OpenUnit(static_cast<uint32_t>(stream.Next()));
    const double x = i % 3 == 0 ? u : i % 3 == 1 ? std::ldexp(u, -900) : 1.0 + (u - 0.5) * 1e-3;
    const double expected = std::log(x);
    CHECK(std::fabs(kvjax::PortableLog(x) - expected) <= 2e-14 * std::fabs(expected) + 1e-18);
  }
}

double NormalCdf(double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); }

TEST(InverseNormalInvertsTheDistribution) {
  data::Stream stream(2);
  double previous = -100;
  for (double p : {0x1p-33, 1e-9, 1e-6, 1e-3, 0.0749, 0.0751, 0.3, 0.5, 0.7, 0.9249, 0.9251, 0.999}) {
    const double z = kvjax::InverseNormal(p);
    CHECK(z > previous);
    previous = z;
  }
  CHECK_EQ(kvjax::InverseNormal(0.5), 0.0);
  for (int i = 0; i < 200'000; ++i) {
    const double u = kvjax::OpenUnit(static_cast<uint32_t>(stream.Next()));
    const double p = i % 2 == 0 ? u : std::pow(10.0, -9.9 * u);  // half of them far out
    const double z = kvjax::InverseNormal(p);
    // The error of z, from the distribution and its density, in units of z.
    const double density = std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi);
    CHECK(std::fabs((NormalCdf(z) - p) / density) <= 3e-7 * std::max(std::fabs(z), 1e-3));
  }
  for (uint32_t word : {0u, 1u, 12345u, 0x1000'0000u}) {  // the two tails mirror each other exactly
    CHECK_EQ(kvjax::InverseNormal(kvjax::OpenUnit(word)), -kvjax::InverseNormal(kvjax::OpenUnit(~word)));
  }
}

data::Floats Row(const Initializer& initializer, uint64_t key, int64_t dim) {
  data::Floats row(static_cast<size_t>(dim), -1e30f);
  initializer.Generate(key, dim,
                       [&](int64_t column, float value) { row[static_cast<size_t>(column)] = value; });
  return row;
}

TEST(RowsDependOnSeedKeyAndColumnAlone) {
  const Initializer normal = Elements(Kind::kNormal, 0.0, 1.0, 3);
  for (uint64_t key : data::kAwkward) {
    const data::Floats row = Row(normal, key, 65);
    for (int64_t dim : {1, 3, 4, 8, 64}) {
      CHECK(Row(normal, key, dim) == data::Floats(row.begin(), row.begin() + dim));
    }
    const Words words =
        kvjax::Philox({static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), 16, 0}, 3);
    CHECK_EQ(row[64], normal.Element(64, words[0]));
    CHECK(row != Row(Elements(Kind::kNormal, 0.0, 1.0, 4), key, 65));
    CHECK(row != Row(Elements(Kind::kNormal, 0.0, 1.0, 3ull << 32), key, 65));
    CHECK(row != Row(normal, key + 1, 65));
  }
  CHECK(Row(Elements(Kind::kConstant, 0.1, 9.0, 3), 77, 3) == data::Floats(3, 0.1f));
}

TEST(SegmentsAreColumnsOfRowsThatAreAllLikeThem) {
  constexpr int64_t kDim = 21;
  Initializer segments;
  segments.seed = 3;
  const std::array<int64_t, 4> ends = {1, 6, 8, kDim};
  const std::array<kvjax::Distribution, 4> each = {{{Kind::kConstant, 0.5},
                                                    {Kind::kNormal, 0.0, 1.0},
                                                    {Kind::kUniform, -1.0, 3.0},
                                                    {Kind::kTruncatedNormal, 2.0, 0.5}}};
  for (size_t i = 0; i < ends.size(); ++i) segments.Set(i, {ends[i], each[i]});
  for (uint64_t key : data::kAwkward) {
    const data::Floats row = Row(segments, key, kDim);
    for (size_t i = 0; i < ends.size(); ++i) {
      const data::Floats whole = Row(Elements(each[i].kind, each[i].a, each[i].b, 3), key, kDim);
      for (int64_t column = i == 0 ? 0 : ends[i - 1]; column < ends[i]; ++column) {
        CHECK_EQ(row[static_cast<size_t>(column)], whole[static_cast<size_t>(column)]);
      }
    }
  }
}

struct Moments {
  double mean = 0, deviation = 0, low = 1e30, high = -1e30;
};

Moments Measure(const Initializer& initializer) {
  Moments m;
  double sum = 0, squares = 0;
  constexpr int kKeys = 20'000, kDim = 8;
  for (uint64_t key = 0; key < kKeys; ++key) {
    initializer.Generate(key, kDim, [&](int64_t, float value) {
      sum += value;
      squares += double{value} * value;
      m.low = std::min<double>(m.low, value);
      m.high = std::max<double>(m.high, value);
    });
  }
  m.mean = sum / (kKeys * kDim);
  m.deviation = std::sqrt(squares / (kKeys * kDim) - m.mean * m.mean);
  return m;
}

void CheckNear(double got, double want, double tolerance) { CHECK(std::fabs(got - want) <= tolerance); }

TEST(MomentsAreRight) {
  // 160,000 samples: the mean is within 5 standard errors, which are deviation / 400.
  const Moments uniform = Measure(Elements(Kind::kUniform, -1.0, 3.0, 5));
  CheckNear(uniform.mean, 1.0, 0.015);
  CheckNear(uniform.deviation, 4 / std::sqrt(12.0), 0.01);
  CHECK(uniform.low >= -1.0 && uniform.low < -0.999);
  CHECK(uniform.high <= 3.0 && uniform.high > 2.999);
  const Moments normal = Measure(Elements(Kind::kNormal, 2.0, 0.5, 6));
  CheckNear(normal.mean, 2.0, 0.00625);
  CheckNear(normal.deviation, 0.5, 0.005);
  CHECK(normal.high > 2.0 + 0.5 * 4 && normal.high < 2.0 + 0.5 * 6);
  const Moments truncated = Measure(Elements(Kind::kTruncatedNormal, 2.0, 0.5, 7));
  CheckNear(truncated.mean, 2.0, 0.0055);
  CheckNear(truncated.deviation, 0.5 * 0.87962566103423978, 0.004);
  CHECK(truncated.low > 1.0 - 1e-6 && truncated.low < 1.01);
  CHECK(truncated.high < 3.0 + 1e-6 && truncated.high > 2.99);
}

TEST(KeysChooseARowOfThePool) {
  const auto values = std::make_shared<const std::vector<float>>(std::vector<float>{0, 1, 10, 11, 20, 21});
  Initializer pool;
  pool.kind = Initializer::Kind::kPool;
  pool.pool = values;
  std::array<int, 3> chosen{};
  for (uint64_t key = 0; key < 30'000; ++key) {
    const data::Floats row = Row(pool, key, 2);
    CHECK_EQ(row[0] + 1, row[1]);
    CHECK_EQ(row[0], 10.0f * static_cast<float>(Initializer::PoolIndex(key, 3)));
    ++chosen[Initializer::PoolIndex(key, 3)];
  }
  for (int count : chosen) CheckNear(count, 10'000, 5 * 82);  // the deviation of a binomial count is 82
  CHECK_EQ(Initializer::PoolIndex(0, 3), 0u);                 // Mix(0) is 0
  for (uint64_t key : data::kAwkward) CHECK_EQ(Initializer::PoolIndex(key, 1), 0u);
  pool.seed = 4;
  CHECK(Row(pool, 7, 6) == *values);
}

TEST(KindsHaveNames) {
  CHECK(kvjax::ParseDistribution("constant") == Kind::kConstant);
  CHECK(kvjax::ParseDistribution("uniform") == Kind::kUniform);
  CHECK(kvjax::ParseDistribution("normal") == Kind::kNormal);
  CHECK(kvjax::ParseDistribution("truncated_normal") == Kind::kTruncatedNormal);
  CHECK_THROWS(kInvalidArgument, kvjax::ParseDistribution("Normal"));
  CHECK(Initializer::ParseKind("elements") == Initializer::Kind::kElements);
  CHECK(Initializer::ParseKind("pool") == Initializer::Kind::kPool);
  CHECK(Initializer::ParseKind("given") == Initializer::Kind::kGiven);
  CHECK_THROWS(kInvalidArgument, Initializer::ParseKind("Pool"));
}

}  // namespace core_initial
