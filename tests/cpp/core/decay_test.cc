// Decayed numbers against the library's logarithm and power.
#include "kvjax/ffi/core/decay.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_decay {

TEST(PowersOfTwoAreWithinTwoUnits) {
  data::Stream stream(4);
  for (int i = 0; i < 300'000; ++i) {
    const double x = -std::ldexp(static_cast<double>(stream.Next() >> 11), -53);
    const auto got = std::bit_cast<int64_t>(kvjax::Exp2OfFraction(x)),
               want = std::bit_cast<int64_t>(std::exp2(x));
    CHECK(std::abs(got - want) <= 2);
  }
  CHECK_EQ(kvjax::Exp2OfFraction(0.0), 1.0);
}

TEST(DecayedNumbersAreInOrderHoweverOldTheyAre) {
  data::Stream stream(5);
  const auto log = [](uint64_t number, double halvings) {
    return std::log2(static_cast<long double>(number)) - static_cast<long double>(halvings);
  };
  for (int i = 0; i < 300'000; ++i) {
    const uint64_t one = 1 + stream.Below(1000), other = 1 + (stream.Next() >> stream.Below(64)) / 2;
    const double most = std::ldexp(1.0, static_cast<int>(stream.Below(41)) - 2);
    const double old = std::ldexp(static_cast<double>(stream.Next() >> 11), -53) * most;
    const double older = old + static_cast<double>(stream.Below(100)) / 3;
    const long double first = log(one, old), second = log(other, older);
    if (std::abs(first - second) < 1e-4) continue;  // as close as they may be where fewer bits are kept
    CHECK_EQ(kvjax::DecayedOrder(one, old) < kvjax::DecayedOrder(other, older), first < second);
  }
  for (const double old : {0.0, 1999.0, 2000.0, 2063.0, 2064.0, 1e6, 1e12}) {
    CHECK_EQ(kvjax::DecayedOrder(4, old + 1), kvjax::DecayedOrder(2, old));
    CHECK(kvjax::DecayedOrder(1, old + 1) < kvjax::DecayedOrder(1, old));
  }
  CHECK_EQ(kvjax::DecayedOrder(0, 0.0), uint64_t{0});
  CHECK(kvjax::DecayedOrder(1, INFINITY) > 0);
  CHECK(kvjax::DecayedOrder(1, INFINITY) <= kvjax::DecayedOrder(1, 1e13));
}

}  // namespace core_decay
