// The 16-bit floating-point types of rows, rounded to the nearest value, ties to the even one.
//
// Only normal numbers go through the floating-point unit: XLA's threads may flush subnormal ones to zero.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

KVJAX_HD inline uint16_t ToBFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
KVJAX_HD inline float FromBFloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

/// IEEE 754 binary16: 5 bits of exponent (bias 15) and 10 of fraction, float32 having 8 (bias 127) and 23.
KVJAX_HD inline uint16_t ToFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);  // NaN stays NaN
  } else if (magnitude >= 0x477FF000u) {
    half = 0x7C00u;  // from 65520 on infinity is nearest
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the values are multiples of 2^-24, which is the spacing of floats at 0.5: the sum rounds.
    half = std::bit_cast<uint32_t>(std::fabs(value) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}
KVJAX_HD inline float FromFloat16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                         : std::bit_cast<float>((magnitude << 13) + ((127u - 15u) << 23));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

}  // namespace kvjax
