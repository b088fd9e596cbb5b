// Decay: numbers that are halved again and again, in their order, with the same bits everywhere. The
// libraries of host and device differ in the last bit of 2^x, and so would the order of rows whose
// frequencies decay.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// 2^x for -1 < x <= 0, within two units in the last place; exact for 0.
KVJAX_HD inline double Exp2OfFraction(double x) {
  // e^t = 1 + t * (c0 + c1 t + c2 t^2 + ...), with |t| < 0.35, so that the next term does not count. The
  // even and the odd terms are summed side by side.
  constexpr double kLn2 = 0.69314718055994531;
  constexpr double c[] = {
      1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,       1.0 / 5040,
      1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  const bool half = x <= -0.5;
  const double t = (half ? x + 1.0 : x) * kLn2, square = t * t;
  double even = c[12], odd = c[11];
  for (int k = 10; k >= 0; k -= 2) even = c[k] + square * even;
  for (int k = 9; k > 0; k -= 2) odd = c[k] + square * odd;
  return (1.0 + t * (even + t * odd)) * (half ? 0.5 : 1.0);
}

/// Where `number` * 2^-halvings stands among such numbers, 0 for 0. The product itself would be 0 after 1,100
/// halvings, as would be all that are older; here its exponent may go to -2^40, with fewer bits of the
/// fraction below -2,000.
KVJAX_HD inline uint64_t DecayedOrder(uint64_t number, double halvings) {
  if (number == 0) return 0;
  constexpr double kMost = 1099511627776.0;  // 2^40
  constexpr int64_t kExact = 2000, kRest = int64_t{1} << 40;
  const double whole = halvings < kMost ? std::floor(halvings) : kMost;
  const double fraction = halvings < kMost ? halvings - whole : 0.0;
  const auto bits = std::bit_cast<uint64_t>(static_cast<double>(number) * Exp2OfFraction(-fraction));
  const uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  const int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023 - static_cast<int64_t>(whole);
  if (exponent >= -kExact) return static_cast<uint64_t>(exponent + kExact + 100) << 52 | mantissa;
  const int64_t below = -kExact - exponent;  // what follows is less than 2^59, and the others are more
  return static_cast<uint64_t>(below < kRest ? kRest - below + 1 : 1) << 18 | mantissa >> 34;
}

}  // namespace kvjax
