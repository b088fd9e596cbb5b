// Marks and intrinsics for functions that run on the host and on the device.
//
// nvcc compiles a function for the device only if it is marked so; other compilers know no such marks.
#pragma once
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#define KVJAX_HD __host__ __device__
#else
#ifndef KVJAX_HD  // or as its includer says
#define KVJAX_HD
#endif
#endif

/// Of a loop that is to stay one on a device: its code has to be short. And of a function whose
/// call would take registers from it.
#ifdef __CUDA_ARCH__
#define KVJAX_ROLLED _Pragma("unroll 1")
#define KVJAX_INLINE __forceinline__
#else
#define KVJAX_ROLLED
#define KVJAX_INLINE
#endif

/// Of a loop whose turns do not depend on each other, so that the compiler need not find out. Clang asks at
/// run time.
#if defined(__GNUC__) && !defined(__clang__)
#define KVJAX_INDEPENDENT _Pragma("GCC ivdep")
#else
#define KVJAX_INDEPENDENT
#endif

namespace kvjax {

/// The high 64 bits of a * b.
KVJAX_HD inline uint64_t MulHigh(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

/// The greater of two numbers, or the smaller; the first NaN, if there is one. By their bits: where subnormal
/// numbers are zero, what a comparison of floats, or a maximum, makes of one depends on the instruction that
/// a compiler takes.
template <bool kGreater, class T>
KVJAX_HD inline T Extreme(T a, T b) {
  using Word = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  constexpr Word kMagnitude = std::numeric_limits<Word>::max();
  constexpr Word kInfinity = __builtin_bit_cast(Word, std::numeric_limits<T>::infinity());
  const auto x = __builtin_bit_cast(Word, a), y = __builtin_bit_cast(Word, b);
  const Word place_x = x ^ (x >> (8 * sizeof(T) - 1) & kMagnitude);
  const Word place_y = y ^ (y >> (8 * sizeof(T) - 1) & kMagnitude);
  const bool before = kGreater ? place_x > place_y : place_x < place_y;
  const int first = int{(x & kMagnitude) > kInfinity} | (int{(y & kMagnitude) <= kInfinity} & int{before});
  return __builtin_bit_cast(T, first != 0 ? x : y);
}

/// How many zeros there are below the lowest bit of a word above zero.
KVJAX_HD inline uint32_t CountTrailingZeros(uint32_t word) {
#ifdef __CUDA_ARCH__
  return static_cast<uint32_t>(__ffs(static_cast<int>(word))) - 1;
#else
  return static_cast<uint32_t>(std::countr_zero(word));
#endif
}

/// How many bits a number has from its highest on.
KVJAX_HD inline uint32_t BitWidth(uint64_t number) {
#ifdef __CUDA_ARCH__
  return 64 - static_cast<uint32_t>(__clzll(static_cast<long long>(number)));
#else
  return static_cast<uint32_t>(std::bit_width(number));
#endif
}

// A number of 64 bits that is aligned like one of 32: two words, the low one first.
KVJAX_HD inline uint64_t GetWords(const uint32_t* words) { return uint64_t{words[1]} << 32 | words[0]; }
KVJAX_HD inline void PutWords(uint32_t* words, uint64_t number) {
  words[0] = static_cast<uint32_t>(number);
  words[1] = static_cast<uint32_t>(number >> 32);
}

}  // namespace kvjax
