// Copies of records: their size is known only at run time, but is the same for all records of a loop.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvjax {

/// Calls f(bytes), with the sizes that rows mostly have as constants, for which the compiler writes copies
/// out.
template <class F>
void WithSize(size_t bytes, F f) {
  switch (bytes) {
    case 4:
      return f(std::integral_constant<size_t, 4>());
    case 32:
      return f(std::integral_constant<size_t, 32>());
    case 64:
      return f(std::integral_constant<size_t, 64>());
    case 128:
      return f(std::integral_constant<size_t, 128>());
    case 256:
      return f(std::integral_constant<size_t, 256>());
    case 512:
      return f(std::integral_constant<size_t, 512>());
    default:
      return f(bytes);
  }
}

/// Fetches the cache lines of a record, of a long one the first: the processor sees by itself that it goes
/// on.
// GCC drops calls of functions that only prefetch, so this and all that only calls it have to be inlined.
[[gnu::always_inline]] inline void PrefetchRecord(const std::byte* record, size_t bytes) {
  constexpr size_t kMost = 1024;
  for (size_t i = 0; i < (bytes < kMost ? bytes : kMost); i += 64) __builtin_prefetch(record + i);
}

/// memcpy chooses its way by the size in each call. Here the branches are those of the loop, which the
/// processor foresees, and the pieces have sizes that the compiler knows.
[[gnu::always_inline]] inline void CopyRecord(std::byte* to, const std::byte* from, size_t bytes) {
  size_t at = 0;
  const auto copy = [&]<size_t kPiece>() {
    std::memcpy(to + at, from + at, kPiece);
    at += kPiece;
  };
  while (bytes - at >= 64) copy.template operator()<64>();
  if ((bytes & 32) != 0) copy.template operator()<32>();
  if ((bytes & 16) != 0) copy.template operator()<16>();
  if ((bytes & 8) != 0) copy.template operator()<8>();
  if ((bytes & 4) != 0) copy.template operator()<4>();
  if ((bytes & 2) != 0) copy.template operator()<2>();
  if ((bytes & 1) != 0) copy.template operator()<1>();
}

/// The same into an array that is written from front to back, and is larger than a cache: fetches what will
/// be written soon. Otherwise the processor has to wait for lines that it is about to overwrite.
[[gnu::always_inline]] inline void AppendRecord(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kAhead = 2048;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(to + kAhead + i, 1);
  CopyRecord(to, from, bytes);
}

/// Bytes from which an array is too large for the caches to have it when it is read next.
inline constexpr size_t kStreamFrom = size_t{16} << 20;

/// Whether records can go to an array past the caches: they are whole lines there.
inline bool CanStream([[maybe_unused]] const std::byte* to, [[maybe_unused]] size_t bytes) {
#if defined(__SSE2__)
  return bytes > 0 && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
#else
  return false;
#endif
}

/// Copies a record of lines past the caches, into an array that is larger than they are. What is written in
/// no order is otherwise read first, and waited for.
[[gnu::always_inline]] inline void StreamLines(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  const auto* in = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  for (size_t i = 0; i < bytes / sizeof(__m128i); i += 4) {
    const __m128i line[] = {_mm_loadu_si128(in + i), _mm_loadu_si128(in + i + 1), _mm_loadu_si128(in + i + 2),
                            _mm_loadu_si128(in + i + 3)};
    for (size_t j = 0; j < 4; ++j) _mm_stream_si128(out + i + j, line[j]);
  }
#else
  CopyRecord(to, from, bytes);
#endif
}

/// Before other threads hear of what was streamed.
inline void EndStreams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace kvjax
