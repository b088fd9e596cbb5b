// Stochastic rounding: to one of the two neighbours in a type of 16 bits, in the mean to the value itself.
// kvjax/_training/rounding.py computes the same.
#pragma once
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

KVJAX_HD inline uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

/// From which the random bits of a row in a step are made.
KVJAX_HD inline uint32_t RandomState(uint64_t seed, int64_t step, uint64_t key) {
  uint32_t state = 0;
  const uint64_t facts[] = {seed, static_cast<uint64_t>(step), key};
  for (const uint64_t from : facts) {
    state = Mix32((state ^ static_cast<uint32_t>(from)) + 0x9E3779B9u);
    state = Mix32((state ^ static_cast<uint32_t>(from >> 32)) + 0x9E3779B9u);
  }
  return state;
}

/// An element of that row, as a float32 that the type holds: float16 or else bfloat16.
template <bool kHalf>
KVJAX_HD inline float RoundedAtRandom(uint32_t state, uint32_t column, float x) {
  constexpr uint32_t kTail = (1u << (kHalf ? 13 : 16)) - 1;
  constexpr float kLargest = kHalf ? 65504.0f : 0x1.FEp127f;
  const float magnitude = __builtin_fabsf(x);
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t random = Mix32(Mix32(state ^ Mix32(column + 1)) + bits);
  auto rounded = __builtin_bit_cast(float, (bits + (random & kTail)) & ~kTail);
  if constexpr (kHalf) {  // subnormal ones of the type are multiples of the smallest
    const float multiple = magnitude / 0x1p-24f, low = __builtin_floorf(multiple);
    const float up = static_cast<float>(random >> 8) * 0x1p-24f < multiple - low ? 1.0f : 0.0f;
    const float small = __builtin_copysignf((low + up) * 0x1p-24f, x);
    rounded = magnitude < 0x1p-14f ? small : rounded;
  }
  return magnitude <= kLargest ? rounded : x;
}

}  // namespace kvjax
