// Decayed numbers against the library's logarithm.
#include "kvjax/ffi/core/decay.h"

#include <cmath>
#include <cstdint>

#include "kvjax/ffi/core/row.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_decay {

TEST(LogarithmsAreNearAndDoNotFall) {
  data::Stream stream(4);
  for (int i = 0; i < 300'000; ++i) {
    const uint64_t number = 1 + (stream.Next() >> stream.Below(64)) / 2;
    const double got = kvjax::Log2(number);
    CHECK(std::abs(got - std::log2(static_cast<double>(number))) < 0x1p-39);
    CHECK(got <= kvjax::Log2(number + 1) && got <= kvjax::Log2(number + number / 7));
  }
  for (int e = 0; e < 64; ++e) CHECK_EQ(kvjax::Log2(uint64_t{1} << e), e);
}

TEST(DecayedNumbersAreInOrderHoweverOldTheyAre) {
  data::Stream stream(5);
  for (int i = 0; i < 300'000; ++i) {
    const uint64_t one = 1 + stream.Below(1000), other = 1 + (stream.Next() >> stream.Below(64)) / 2;
    const double half_life = std::ldexp(1.0 + static_cast<double>(stream.Below(1000)) / 999,
                                        static_cast<int>(stream.Below(20)) - 4);
    const auto version = static_cast<int64_t>(stream.Below(uint64_t{1} << stream.Below(41))) - 1000;
    const int64_t later = version + static_cast<int64_t>(stream.Below(100) * stream.Below(100));
    const auto ahead = static_cast<long double>(later - version) / static_cast<long double>(half_life);
    const long double difference =
        std::log2(static_cast<long double>(other)) + ahead - std::log2(static_cast<long double>(one));
    if (std::abs(difference) < 1e-3) continue;  // as close as they may be where the half-lives are many
    CHECK_EQ(kvjax::DecayedOrder(one, version, half_life) < kvjax::DecayedOrder(other, later, half_life),
             difference > 0);
  }
  for (const int64_t version : {int64_t{-5}, int64_t{0}, int64_t{1} << 31, int64_t{1} << 50}) {
    CHECK_EQ(kvjax::DecayedOrder(6, version, 3.0), kvjax::DecayedOrder(3, version + 3, 3.0));
  }
}

TEST(HalfLivesThatAreTinyBesideStepsOrderByStepsAndThenByNumbers) {
  for (const double half_life : {1.0 / 64, 0.01, 1e-6, 1e-30, 5e-324}) {
    for (const int64_t version : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1'700'000'000}}) {
      const auto order = [&](uint64_t number, int64_t later) {
        return kvjax::DecayedOrder(number, version + later, half_life);
      };
      CHECK(order(1, 0) < order(2, 0) && order(20'000, 0) < order(20'001, 0));
      CHECK(order(kvjax::kMaxFrequency, 0) < order(1, 1));
    }
  }
}

}  // namespace core_decay
