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
constexpr int64_t kRun = 16;  // columns, from as many counters as it takes
constexpr int kRuns = 4;      // that are made together, of one row or of several
constexpr int64_t kFar = 8;   // elements far out, at a time

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

/// The random bits of a run of a key's row, from a column on.
[[gnu::always_inline]] inline void RandomWords(uint64_t seed, uint64_t key, int64_t column, uint32_t* words) {
  for (int64_t quad = 0; 4 * quad < kRun; quad += kCounters) {
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

/// Normal elements of some runs; those that are far out, about one in seven, are gathered and take another
/// formula.
[[gnu::always_inline]] inline void NormalElements(const Distribution& of, const uint32_t* words, int runs,
                                                  float* made) {
  constexpr int64_t kAll = kRuns * kRun;
  double p[kAll + 1], far[kFar];
  uint32_t which[kAll + kFar];
  p[kAll] = 0.5;  // for what is gathered beyond those that there are
  const int64_t n = runs * kRun;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    for (int64_t i = begin; i < begin + kRun; ++i) {
      p[i] = of.Quantile(words[i]);
      made[i] = static_cast<float>(of.a + of.b * InverseNormalInside(p[i]));
    }
  }
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    which[count] = static_cast<uint32_t>(i);
    count += !IsInside(p[i]);
  }
  for (int64_t i = 0; i < kFar; ++i) which[count + i] = kAll;
  for (int64_t begin = 0; begin < count; begin += kFar) {
    for (int64_t i = 0; i < kFar; ++i) far[i] = p[which[begin + i]];
    for (int64_t i = 0; i < kFar; ++i) far[i] = of.a + of.b * InverseNormalOutside(far[i]);
    for (int64_t i = 0; i < kFar; ++i) made[which[begin + i]] = static_cast<float>(far[i]);
  }
}

[[maybe_unused]] void Elements(const Distribution& distribution, uint64_t seed, size_t n,
                               const uint64_t* keys, float* const* rows, int64_t begin, int64_t end) {
  const Distribution of = distribution;  // which no store changes
  alignas(64) uint32_t words[kRuns * kRun];
  alignas(64) float made[kRuns * kRun + 1];
  struct {
    float* row;
    int64_t column;
  } pending[kRuns];
  int count = 0;
  const auto make = [&]() __attribute__((always_inline)) {
    if (of.kind == Distribution::Kind::kUniform) {
      for (int64_t i = 0; i < count * kRun; ++i) {
        made[i] = static_cast<float>(of.a + (of.b - of.a) * OpenUnit(words[i]));
      }
    } else {
      NormalElements(of, words, count, made);
    }
    for (int run = 0; run < count; ++run) {
      const auto [row, column] = pending[run];
      const float* const from = made + run * kRun;
      if (column >= begin && column + kRun <= end) {
        __builtin_memcpy(row + (column - begin), from, kRun * sizeof(float));
        continue;
      }
      for (int64_t i = column < begin ? begin - column : 0; i < kRun && column + i < end; ++i) {
        row[column + i - begin] = from[i];
      }
    }
    count = 0;
  };
  for (size_t i = 0; i < n; ++i) {
    if (of.kind == Distribution::Kind::kConstant) {
      const float value = of.Element(0);
      for (int64_t c = 0; c < end - begin; ++c) rows[i][c] = value;
      continue;
    }
    for (int64_t column = begin / 4 * 4; column < end; column += kRun) {
      RandomWords(seed, keys[i], column, words + count * kRun);
      pending[count++] = {rows[i], column};
      if (count == kRuns) make();
    }
  }
  if (count > 0) make();
}

}  // namespace
}  // namespace kvjax::program
