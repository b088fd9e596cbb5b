// Marks and intrinsics for functions that run on the host and on the device.
//
// nvcc compiles a function for the device only if it is marked so; other compilers know no such marks.
#pragma once
#include <bit>
#include <cstdint>

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

namespace kvjax {

/// The high 64 bits of a * b.
KVJAX_HD inline uint64_t MulHigh(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

/// How many bits a number above zero has.
KVJAX_HD inline int BitWidth(uint64_t word) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(static_cast<long long>(word));
#else
  return std::bit_width(word);
#endif
}

}  // namespace kvjax
