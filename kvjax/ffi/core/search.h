// The search for some keys in a bucket each, in the processor's best instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/avx2.h"
#include "kvjax/ffi/core/buckets.h"

namespace kvjax::search {

/// For each i of the n that `which` lists: rows[i] becomes the row id of keys[i] in buckets[i], or kNoRow.
/// Lists in `passed`, which may be where `which` is or before it, the keys that may stand further on, and
/// fetches the next bucket of each. Returns how many these are.
using InBuckets = size_t (*)(const uint64_t* keys, const Bucket* const* buckets, const uint32_t* which,
                             size_t n, uint32_t* rows, uint32_t* passed);

/// What has been found of key i in a bucket. Arithmetic, or compilers make branches, which nobody can
/// foresee.
[[gnu::always_inline]] inline uint32_t Put(const Bucket* bucket, uint32_t cell, uint32_t missing, uint32_t i,
                                           uint32_t* rows, uint32_t* passed) {
  static_assert(kNoRow == ~0u);
  const uint32_t goes_on = missing & static_cast<uint32_t>(bucket->passed > 0);
  rows[i] = bucket->rows[cell] | (0u - missing);
  __builtin_prefetch(bucket + goes_on);
  *passed = i;
  return goes_on;
}

inline size_t InBucketsBaseline(const uint64_t* keys, const Bucket* const* buckets, const uint32_t* which,
                                size_t n, uint32_t* rows, uint32_t* passed) {
  size_t num_passed = 0;
  for (size_t j = 0; j < n; ++j) {
    const uint32_t i = which[j];
    const Bucket* const bucket = buckets[i];
    const uint32_t cell = bucket->Find(keys[i]);
    num_passed +=
        Put(bucket, cell - (cell == Bucket::kCells), cell == Bucket::kCells, i, rows, passed + num_passed);
  }
  return num_passed;
}

#if defined(__x86_64__)
KVJAX_AVX2 inline size_t InBucketsAvx2(const uint64_t* keys, const Bucket* const* buckets,
                                       const uint32_t* which, size_t n, uint32_t* rows, uint32_t* passed) {
  static_assert(Bucket::kCells == 5);
  size_t num_passed = 0;
  for (size_t j = 0; j < n; ++j) {
    const uint32_t i = which[j];
    const Bucket* const bucket = buckets[i];
    const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket->keys));
    const __m256i equal = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(static_cast<int64_t>(keys[i])));
    const auto cells = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) |
                       uint32_t{bucket->keys[4] == keys[i]} << 4;
    const uint32_t match = _bzhi_u32(cells, bucket->used);  // unused cells hold old keys
    num_passed += Put(bucket, _tzcnt_u32(match | 1u << 4), (match - 1) >> 31, i, rows, passed + num_passed);
  }
  return num_passed;
}
#endif

/// The best that this processor has.
inline InBuckets Best() {
#if defined(__x86_64__)
  if (HasAvx2()) return InBucketsAvx2;
#endif
  return InBucketsBaseline;
}

}  // namespace kvjax::search
