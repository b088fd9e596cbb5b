// Decay: numbers that are halved again and again, in their order, which is the same at every step and has the
// same bits everywhere: the libraries of host and device differ in the last bit of a logarithm.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// The order of numbers as that of integers.
KVJAX_HD inline uint64_t OrderOf(double x) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  const auto bits = std::bit_cast<uint64_t>(x == 0.0 ? 0.0 : x);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

/// The logarithm to base 2 of a number above 0, within 2^-39: of its upper 41 bits, so that a larger number
/// never has a smaller one.
KVJAX_HD inline double Log2(uint64_t number) {
  const auto bits = std::bit_cast<uint64_t>(static_cast<double>(number));
  int exponent = static_cast<int>(bits >> 52) - 1023;
  auto x = std::bit_cast<double>((bits & 0x000FFFFFFFFFF000ull) | 0x3FF0000000000000ull);
  if (x > 1.4142135623730951) x *= 0.5, ++exponent;
  // ln((1 + t) / (1 - t)) = 2 (t + t^3 / 3 + t^5 / 5 + ...), with |t| < 0.1716
  const double t = (x - 1.0) / (x + 1.0), square = t * t;
  double sum = 0.0;
  for (int k = 21; k > 0; k -= 2) sum = 1.0 / k + square * sum;
  return exponent + 2.8853900817779268 * t * sum;  // 2 / ln 2
}

/// Where `number`, which is halved for each half-life since `version`, stands among such numbers; 0 for 0.
/// Logarithms are compared in units of 2^-24, so that the same numbers are the same whatever was halved. A
/// half-life below a 64th of a step makes no other order than that, in which one step is more than any
/// number, and would leave the numbers of one step fewer bits, or none.
KVJAX_HD inline uint64_t DecayedOrder(uint64_t number, int64_t version, double half_life) {
  if (number == 0) return 0;
  const auto units = [](double x) { return std::floor(x * 0x1p24 + 0.5); };
  const double halvings = static_cast<double>(version) / (half_life < 0x1p-6 ? 0x1p-6 : half_life);
  return OrderOf(units(Log2(number)) + units(halvings));
}

}  // namespace kvjax
