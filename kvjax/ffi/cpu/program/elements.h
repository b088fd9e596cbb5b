// Elements of initial rows for one instruction set: included by interpret.h, whose rules hold here.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvjax/ffi/core/distribution.h"

namespace kvjax::program {
namespace {

#if defined(__AVX2__)
using Counters [[gnu::vector_size(32)]] = uint64_t;
#else
using Counters [[gnu::vector_size(16)]] = uint64_t;
#endif
constexpr int64_t kCounters = sizeof(Counters) / sizeof(uint64_t);
constexpr int64_t kTogether = 16;  // elements, from as many counters as it takes
constexpr int64_t kMost = 64;      // elements of which those that are far out are gathered
constexpr int64_t kFar = 8;        // of these, at a time

/// The products of low halves, for which GCC finds no instruction by itself.
[[gnu::always_inline]] inline Counters Multiply(Counters x, uint32_t factor) {
  const Counters factors = Counters{} + factor;
#if defined(__AVX2__)
  return (Counters)_mm256_mul_epu32((__m256i)x, (__m256i)factors);
#elif defined(__SSE2__)
  return (Counters)_mm_mul_epu32((__m128i)x, (__m128i)factors);
#else
  return (x & 0xFFFF'FFFF) * factors;
#endif
}

/// The random bits of kTogether elements of a key's row, from a column on.
[[gnu::always_inline]] inline void RandomWords(uint64_t seed, uint64_t key, int64_t column, uint32_t* words) {
  for (int64_t quad = 0; 4 * quad < kTogether; quad += kCounters) {
    Counters c0 = Counters{} + key, c1 = Counters{} + (key >> 32), c2 = {}, c3 = {};
    for (int64_t i = 0; i < kCounters; ++i) c2[i] = static_cast<uint64_t>(column / 4 + quad + i);
    Philox(c0, c1, c2, c3, seed,
           [](Counters x, uint32_t factor) __attribute__((always_inline)) { return Multiply(x, factor); });
    const Counters first = (c0 & 0xFFFF'FFFF) | (c1 << 32), second = (c2 & 0xFFFF'FFFF) | (c3 << 32);
    for (int64_t i = 0; i < kCounters; ++i) {
      const uint64_t four[2] = {first[i], second[i]};
      __builtin_memcpy(words + 4 * (quad + i), four, sizeof(four));
    }
  }
}

/// Normal elements from n words, a multiple of kTogether; those that are far out, about one in seven, are
/// gathered and take another formula.
[[gnu::always_inline]] inline void NormalElements(const Distribution& of, const uint32_t* words, int64_t n,
                                                  float* made) {
  double p[kMost + 1], far[kFar];
  uint32_t which[kMost + kFar];
  p[kMost] = 0.5;  // for what is gathered beyond those that there are
  for (int64_t begin = 0; begin < n; begin += kTogether) {
    for (int64_t i = begin; i < begin + kTogether; ++i) {
      p[i] = of.Quantile(words[i]);
      made[i] = static_cast<float>(of.a + of.b * InverseNormalInside(p[i]));
    }
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    which[count] = static_cast<uint32_t>(i);
    count += !IsInside(p[i]);
  }
  for (int64_t i = 0; i < kFar; ++i) which[count + i] = kMost;
  for (int64_t begin = 0; begin < count; begin += kFar) {
    for (int64_t i = 0; i < kFar; ++i) far[i] = p[which[begin + i]];
    for (int64_t i = 0; i < kFar; ++i) far[i] = of.a + of.b * InverseNormalOutside(far[i]);
    for (int64_t i = 0; i < kFar; ++i) made[which[begin + i]] = static_cast<float>(far[i]);
  }
}

[[maybe_unused]] void Elements(const Distribution& distribution, uint64_t seed, uint64_t key, int64_t begin,
                               int64_t end, float* to) {
  const Distribution of = distribution;  // which no store changes
  if (of.kind == Distribution::Kind::kConstant) {
    const float value = of.Element(0);
    for (int64_t i = 0; i < end - begin; ++i) to[i] = value;
    return;
  }
  for (int64_t column = begin / 4 * 4; column < end; column += kMost) {
    alignas(64) uint32_t words[kMost];
    alignas(64) float made[kMost + 1];
    const int64_t last = end - column < kMost ? end - column : kMost;
    int64_t n = 0;
    for (; n < last; n += kTogether) RandomWords(seed, key, column + n, words + n);
    if (of.kind == Distribution::Kind::kUniform) {
      for (int64_t i = 0; i < n; ++i) made[i] = static_cast<float>(of.a + (of.b - of.a) * OpenUnit(words[i]));
    } else {
      NormalElements(of, words, n, made);
    }
    for (int64_t i = column < begin ? begin - column : 0; i < last; ++i) to[column + i - begin] = made[i];
  }
}

}  // namespace
}  // namespace kvjax::program
