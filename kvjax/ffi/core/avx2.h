// Whether the processor has AVX2, for the few functions of the core that are written for it too.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>

/// Before such a function. It may call no other one that is compiled for any processor.
#define KVJAX_AVX2 [[gnu::target("avx2,bmi,bmi2")]]
#endif

namespace kvjax {

inline bool HasAvx2() {
#if defined(__x86_64__)
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  return has;
#else
  return false;
#endif
}

}  // namespace kvjax
