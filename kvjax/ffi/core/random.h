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

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), of a
/// counter whose four words are the low halves of 64 bits, or of vectors of such; the high halves mean
/// nothing. multiply(x, factor) is the product of low halves.
template <class Word, class Multiply>
KVJAX_HD inline void Philox(Word& c0, Word& c1, Word& c2, Word& c3, uint64_t seed, Multiply multiply) {
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Word a = multiply(c0, 0xD2511F53u), b = multiply(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ uint64_t{k0};
    c1 = b;
    c2 = (a >> 32) ^ c3 ^ uint64_t{k1};
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

KVJAX_HD inline std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, uint64_t seed) {
  uint64_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  Philox(c0, c1, c2, c3, seed, [](uint64_t x, uint32_t factor) { return (x & 0xFFFF'FFFF) * factor; });
  return {static_cast<uint32_t>(c0), static_cast<uint32_t>(c1), static_cast<uint32_t>(c2),
          static_cast<uint32_t>(c3)};
}

// What follows has no branches but the last, so that loops over elements are vectorized.

/// The middle of one of 2^32 equal parts of (0, 1).
KVJAX_HD inline double OpenUnit(uint32_t word) { return (word + 0.5) * 0x1p-32; }

/// Natural logarithm of a normal number x > 0 to about 1e-14, without the platform's libm.
KVJAX_HD inline double PortableLog(double x) {
  constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1, kHalf = uint64_t{1022} << 52;
  const auto bits = __builtin_bit_cast(uint64_t, x);
  // As the last bits of 2^52: not all sets can turn integers of 64 bits into doubles.
  double exponent = __builtin_bit_cast(double, (bits >> 52) | (uint64_t{1075} << 52)) - (0x1p52 + 1022.0);
  double m = __builtin_bit_cast(double, (bits & kMantissa) | kHalf);  // in [0.5, 1)
  const bool low = m < 0.70710678118654752440;
  m = low ? m * 2.0 : m;
  exponent = low ? exponent - 1.0 : exponent;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;  // log m = 2 atanh s, |s| < 0.172
  double sum = 1.0 / 17.0;
  for (int k = 15; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
  return exponent * 0.69314718055994530942 + 2.0 * s * sum;
}

/// Inverse of the standard normal distribution function from 1e-11 to 1 - 1e-11, relative error about 1e-7:
/// where p is inside of 0.075 to 0.925, and outside. Source: Wichura, algorithm AS 241 (PPND7), Applied
/// Statistics 37 (1988), whose third range no `OpenUnit` reaches.
KVJAX_HD inline bool IsInside(double p) { return std::fabs(p - 0.5) <= 0.425; }

KVJAX_HD inline double InverseNormalInside(double p) {
  const double q = p - 0.5, r = 0.180625 - q * q;
  return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
         (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
}

KVJAX_HD inline double InverseNormalOutside(double p) {
  const bool low = p - 0.5 < 0;
  const double r = std::sqrt(-PortableLog(low ? p : 1.0 - p)) - 1.6;
  const double value = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
                       ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  return low ? -value : value;
}

KVJAX_HD inline double InverseNormal(double p) {
  return IsInside(p) ? InverseNormalInside(p) : InverseNormalOutside(p);
}

}  // namespace kvjax
