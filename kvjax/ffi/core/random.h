// Counter-based random numbers: the value at (seed, key, column) depends on those three alone.
//
// Only + - * / and sqrt in IEEE double, in a fixed order, are used (the build turns floating-point
// contraction off), so the bits are the same on every machine and in the NumPy reference of the tests.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
KVJAX_HD inline std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, uint64_t seed) {
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

/// The middle of one of 2^32 equal parts of (0, 1).
KVJAX_HD inline double OpenUnit(uint32_t word) { return (word + 0.5) * 0x1p-32; }

/// Natural logarithm of x > 0 to about 1e-14, without the platform's libm.
KVJAX_HD inline double PortableLog(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);  // m in [0.5, 1)
  if (m < 0.70710678118654752440) {
    m *= 2.0;
    exponent -= 1;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;  // log m = 2 atanh s, |s| < 0.172
  double sum = 1.0 / 17.0;
  for (int k = 15; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
  return exponent * 0.69314718055994530942 + 2.0 * s * sum;
}

/// Inverse of the standard normal distribution function, relative error about 1e-7.
/// Source: Wichura, algorithm AS 241 (PPND7), Applied Statistics 37 (1988).
KVJAX_HD inline double InverseNormal(double p) {
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  }
  double r = std::sqrt(-PortableLog(q < 0 ? p : 1.0 - p));
  double value;
  if (r <= 5.0) {
    r -= 1.6;
    value = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
            ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  } else {
    r -= 5.0;
    value = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
            ((0.012258202635 * r + 0.24197894225) * r + 1.0);
  }
  return q < 0 ? -value : value;
}

}  // namespace kvjax
