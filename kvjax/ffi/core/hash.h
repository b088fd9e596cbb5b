// Hashes, which are part of the checkpoint format: tests/project/test_golden.py freezes their values.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// Mixes the 64 bits of a key; a bijection, so distinct keys have distinct hashes.
/// Source: the finaliser of splitmix64 (Steele, Lea, Flood 2014; constants: Stafford's variant 13).
KVJAX_HD constexpr uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// A bijection of the keys for every salt. Mix alone fixes 0, so the mixed salt is added first.
KVJAX_HD constexpr uint64_t Salted(uint64_t key, uint64_t salt) {
  return Mix(key + Mix(salt) + 0x9E3779B97F4A7C15ull);
}

/// Virtual buckets are the unit of sharding and of checkpoints (their number is part of the format).
inline constexpr uint32_t kNumBuckets = 1u << 16;

/// The low bits choose the bucket.
KVJAX_HD constexpr uint32_t BucketOf(uint64_t key) {
  return static_cast<uint32_t>(Mix(key)) & (kNumBuckets - 1);
}

namespace xxh64 {
inline constexpr uint64_t kP1 = 0x9E3779B185EBCA87ull, kP2 = 0xC2B2AE3D27D4EB4Full,
                          kP3 = 0x165667B19E3779F9ull, kP4 = 0x85EBCA77C2B2AE63ull,
                          kP5 = 0x27D4EB2F165667C5ull;

template <class T>
T Load(const unsigned char* p) {
  static_assert(std::endian::native == std::endian::little, "kvjax supports little-endian machines");
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

inline uint64_t Round(uint64_t acc, uint64_t input) { return std::rotl(acc + input * kP2, 31) * kP1; }
}  // namespace xxh64

/// 64-bit hash of bytes: XXH64 (Collet, xxHash specification 0.1.1), equal to the `xxhash` package's.
inline uint64_t HashBytes(const void* data, size_t size, uint64_t seed) {
  using namespace xxh64;
  const auto* p = static_cast<const unsigned char*>(data);
  const unsigned char* const end = p + size;
  uint64_t h;
  if (size >= 32) {
    uint64_t lane[4] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1};
    for (; end - p >= 32; p += 32) {
      for (int i = 0; i < 4; ++i) lane[i] = Round(lane[i], Load<uint64_t>(p + 8 * i));
    }
    h = std::rotl(lane[0], 1) + std::rotl(lane[1], 7) + std::rotl(lane[2], 12) + std::rotl(lane[3], 18);
    for (uint64_t v : lane) h = (h ^ Round(0, v)) * kP1 + kP4;
  } else {
    h = seed + kP5;
  }
  h += size;
  for (; end - p >= 8; p += 8) h = std::rotl(h ^ Round(0, Load<uint64_t>(p)), 27) * kP1 + kP4;
  if (end - p >= 4) {
    h = std::rotl(h ^ (Load<uint32_t>(p) * kP1), 23) * kP2 + kP3;
    p += 4;
  }
  for (; p < end; ++p) h = std::rotl(h ^ (*p * kP5), 11) * kP1;
  h ^= h >> 33;
  h *= kP2;
  h ^= h >> 29;
  h *= kP3;
  return h ^ (h >> 32);
}

}  // namespace kvjax
