// Buckets: the array behind a key index; each is a cache line that holds five keys and their row ids.
//
// A key belongs into the bucket that its hash names, its home, or while that is full into the next one that
// is not. Each bucket counts the keys that have passed it, so a search ends where none has, and a key that
// leaves takes its count along: there are no tombstones. Its cell goes to a key that has passed it.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// Row id of a key that has no row.
inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;

/// Empty if it is all zeros, so that fresh pages hold empty buckets.
struct alignas(64) Bucket {
  static constexpr uint32_t kCells = 5;
  uint64_t keys[kCells];
  uint32_t rows[kCells];
  uint32_t used : 3;     // cells, the first ones
  uint32_t passed : 29;  // keys that belong here or before it and stand behind it

  [[nodiscard]] bool full() const { return used == kCells; }
  /// The cell of `key`, or kCells.
  [[nodiscard]] uint32_t Find(uint64_t key) const {
    uint32_t match = 1u << kCells;
#if defined(__SSE2__)
    static_assert(kCells == 5);
    const auto equal = [wanted = _mm_set1_epi64x(static_cast<int64_t>(key))](__m128i two) {
      const __m128i halves = _mm_cmpeq_epi32(two, wanted);
      const __m128i both = _mm_and_si128(halves, _mm_shuffle_epi32(halves, _MM_SHUFFLE(2, 3, 0, 1)));
      return static_cast<uint32_t>(_mm_movemask_pd(_mm_castsi128_pd(both)));
    };
    const auto* const pairs = reinterpret_cast<const __m128i*>(keys);
    match |=
        equal(_mm_load_si128(pairs)) | equal(_mm_load_si128(pairs + 1)) << 2 | uint32_t{keys[4] == key} << 4;
#else
    for (uint32_t c = 0; c < kCells; ++c) match |= uint32_t{keys[c] == key} << c;
#endif
    // Unused cells hold old keys.
    return static_cast<uint32_t>(std::countr_zero(match & (~0u << kCells | ((1u << used) - 1))));
  }
  void Add(uint64_t key, uint32_t row) {
    keys[used] = key;
    rows[used] = row;
    ++used;
  }
  void Remove(uint32_t cell) {
    --used;
    keys[cell] = keys[used];
    rows[cell] = rows[used];
  }
};
static_assert(sizeof(Bucket) == 64);

class Buckets {
 public:
  Buckets() = default;
  /// Throws std::bad_alloc.
  explicit Buckets(size_t n) : size_(n) {
    if (mapped()) {
      buckets_.reset(reinterpret_cast<Bucket*>(MapPages(reserved(), true)));
    } else {
      buckets_.reset(new Bucket[n]());
    }
    buckets_.get_deleter().mapped = mapped() ? reserved() : 0;
  }
  Buckets(Buckets&& other) noexcept
      : longest(std::exchange(other.longest, 0)),
        buckets_(std::move(other.buckets_)),
        size_(std::exchange(other.size_, 0)),
        given_back_(std::exchange(other.given_back_, 0)) {}
  Buckets& operator=(Buckets&& other) noexcept {
    longest = std::exchange(other.longest, 0);
    buckets_ = std::move(other.buckets_);
    size_ = std::exchange(other.size_, 0);
    given_back_ = std::exchange(other.given_back_, 0);
    return *this;
  }

  size_t longest = 0;  // way of a key from its home, in buckets

  [[nodiscard]] size_t size() const { return size_; }
  /// Of memory that is in use, if it is by the first `n` buckets.
  [[nodiscard]] size_t bytes(size_t n) const {
    return mapped() ? std::min(InPages(n * sizeof(Bucket), true), reserved()) - given_back_ : reserved();
  }
  [[nodiscard]] size_t bytes() const { return bytes(size_); }
  [[nodiscard]] Bucket* begin() const { return buckets_.get(); }
  [[nodiscard]] Bucket* end() const { return buckets_.get() + size_; }
  /// In the order of hashes, so that keys move to a larger array from front to back in both.
  [[nodiscard]] size_t HomeOf(uint64_t hash) const { return MulHigh(hash, size_); }

  /// Gives back the memory of the first `n` buckets, from which all keys have moved. Those that have passed
  /// the end stand at the front, in a page that stays.
  void GiveBack(size_t n) noexcept {
    constexpr size_t kFront = kHugePage / sizeof(Bucket);
    const size_t from = kHugePage + given_back_, end = n * sizeof(Bucket) / kHugePage * kHugePage;
    if (!mapped() || end <= from || begin()[kFront - 1].passed > 0) return;
    GiveBackPages(reinterpret_cast<std::byte*>(begin()) + from, end - from);
    given_back_ += end - from;
  }

 private:
  struct Free {
    Free() : mapped(0) {}
    size_t mapped;  // bytes
    void operator()(Bucket* buckets) const {
      if (mapped == 0) {
        delete[] buckets;
      } else {
        UnmapPages(reinterpret_cast<std::byte*>(buckets), mapped);
      }
    }
  };
  [[nodiscard]] size_t reserved() const { return size_ * sizeof(Bucket); }
  [[nodiscard]] bool mapped() const { return reserved() >= 2 * kHugePage; }

  std::unique_ptr<Bucket[], Free> buckets_;
  size_t size_ = 0, given_back_ = 0;  // buckets, bytes
};

}  // namespace kvjax
