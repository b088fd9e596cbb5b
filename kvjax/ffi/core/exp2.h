// Exp2: 2^x with the same bits everywhere. The libraries of host and device differ in the last one, and so
// would the order of rows whose frequencies decay.
#pragma once
#include <bit>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// 2^n for n of the normal numbers.
KVJAX_HD inline double PowerOfTwo(int n) {
  return std::bit_cast<double>(static_cast<uint64_t>(n + 1023) << 52);
}

/// 2^x for x <= 0, within two units in the last place; exact where x is an integer.
KVJAX_HD inline double Exp2(double x) {
  if (!(x > -1100.0)) return 0.0;  // far below the least number
  // e^t = 1 + t * (c0 + c1 t + c2 t^2 + ...), with |t| < 0.35, so that the next term does not count. The
  // even and the odd terms are summed side by side.
  constexpr double kLn2 = 0.69314718055994531;
  constexpr double c[] = {
      1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,       1.0 / 5040,
      1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  const int whole = static_cast<int>(x - 0.5);
  const double t = (x - whole) * kLn2, square = t * t;
  double even = c[12], odd = c[11];
  for (int k = 10; k >= 0; k -= 2) even = c[k] + square * even;
  for (int k = 9; k > 0; k -= 2) odd = c[k] + square * odd;
  const double sum = 1.0 + t * (even + t * odd);
  const int half = whole / 2;  // in two steps, as the result may be less than the normal numbers are
  return sum * PowerOfTwo(half) * PowerOfTwo(whole - half);
}

}  // namespace kvjax
