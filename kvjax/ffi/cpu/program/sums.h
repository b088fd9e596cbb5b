// Sums of rows for one instruction set: included by interpret.h, whose rules hold here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvjax::program {
namespace {

// As wide as the set's own: GCC takes wider ones apart through memory.
#if defined(__AVX512F__)
constexpr size_t kBytes = 64;
#elif defined(__AVX__)
constexpr size_t kBytes = 32;
#else
constexpr size_t kBytes = 16;
#endif
using Lanes [[gnu::vector_size(kBytes)]] = float;
constexpr size_t kWidth = sizeof(Lanes) / sizeof(float);
constexpr size_t kMostPieces = 8;  // whose sums, and a row, the registers of any set can hold

/// Sums kCount pieces of rows that are anywhere in memory, from `at` on; the last one ends where the row
/// does, and may have elements of the one before, whose sums are the same.
template <size_t kCount>
[[gnu::always_inline]] inline void SumPieces(float* to, const float* rows, const uint32_t* which,
                                             size_t count, size_t dim, size_t at) {
  constexpr size_t kAhead = 8, kLine = 64 / sizeof(float);
  const size_t last = at + kCount * kWidth <= dim ? at + (kCount - 1) * kWidth : dim - kWidth;
  const auto place = [&](size_t piece) { return piece + 1 < kCount ? at + piece * kWidth : last; };
  Lanes sum[kCount], row;
  for (size_t p = 0; p < kCount; ++p)
    __builtin_memcpy(&sum[p], rows + which[0] * dim + place(p), sizeof(row));
  for (size_t i = 1; i < count; ++i) {
    const float* const next = rows + which[i + kAhead < count ? i + kAhead : i] * dim;
    for (size_t p = 0; p < kCount; p += kLine / kWidth) __builtin_prefetch(next + place(p));
    __builtin_prefetch(next + last);
    for (size_t p = 0; p < kCount; ++p) {
      __builtin_memcpy(&row, rows + which[i] * dim + place(p), sizeof(row));
      sum[p] += row;
    }
  }
  for (size_t p = 0; p < kCount; ++p) __builtin_memcpy(to + place(p), &sum[p], sizeof(row));
}

/// As many pieces as are `left` of the row, up to kCount.
template <size_t kCount>
[[gnu::always_inline]] inline void SumSome(float* to, const float* rows, const uint32_t* which, size_t count,
                                           size_t dim, size_t at) {
  if constexpr (kCount > 1) {
    if (dim - at <= (kCount - 1) * kWidth) return SumSome<kCount - 1>(to, rows, which, count, dim, at);
  }
  SumPieces<kCount>(to, rows, which, count, dim, at);
}

void Sum(float* to, const float* rows, const uint32_t* which, size_t count, size_t dim) {
  for (size_t i = 0; dim < kWidth && i < count; ++i) {
    const float* const row = rows + which[i] * dim;
    for (size_t d = 0; d < dim; ++d) to[d] = i == 0 ? row[d] : to[d] + row[d];
  }
  for (size_t at = 0; dim >= kWidth && at < dim; at += kMostPieces * kWidth)
    SumSome<kMostPieces>(to, rows, which, count, dim, at);
}

}  // namespace
}  // namespace kvjax::program
