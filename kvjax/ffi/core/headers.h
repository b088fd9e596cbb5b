// Headers of rows: eight bytes each, and eight more of every row once a number does not fit.
//
// A header's two numbers lie in two planes, their low and their high halves. Frequencies below 2^30 and
// steps, or seconds, from 0 to 2^32 - 1 have no high halves, so the second plane is made only for a table
// that meets others. That takes memory: a write asks for it while it may still fail (Widen), and no number is
// ever cut.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/slab.h"

namespace kvjax {

class Headers {
 public:
  explicit Headers(const std::shared_ptr<SlabAllocator>& allocator)
      : allocator_(allocator), low_(allocator, sizeof(Half)), high_(allocator, 0) {}
  Headers(Headers&& other) noexcept
      : allocator_(std::move(other.allocator_)),
        low_(std::move(other.low_)),
        high_(std::move(other.high_)),
        near_(other.near_.exchange(false)) {}
  Headers& operator=(Headers&& other) noexcept {
    allocator_ = std::move(other.allocator_);
    low_ = std::move(other.low_);
    high_ = std::move(other.high_);
    near_ = other.near_.exchange(false);
    return *this;
  }

  [[nodiscard]] RowHeader Get(uint32_t row) const {
    const Half low = *At(low_, row), high = wide() ? *At(high_, row) : Half{};
    return {.frequency = uint64_t{high.frequency} << kFrequencyBits | (low.frequency & kMaxLow),
            .pinned = low.frequency >> kFrequencyBits & 1,
            .has_slots = low.frequency >> (kFrequencyBits + 1),
            .version = static_cast<int64_t>(uint64_t{high.version} << 32 | low.version)};
  }
  /// What Widen has been asked for; rows may be set side by side.
  void Set(uint32_t row, const RowHeader& header) noexcept {
    const uint64_t frequency = header.frequency;
    const auto version = static_cast<uint64_t>(header.version);
    const auto flags = static_cast<uint32_t>(header.pinned | header.has_slots << 1);
    *At(low_, row) = {static_cast<uint32_t>(frequency & kMaxLow) | flags << kFrequencyBits,
                      static_cast<uint32_t>(version)};
    if (wide()) {
      const Half high{static_cast<uint32_t>(frequency >> kFrequencyBits),
                      static_cast<uint32_t>(version >> 32)};
      Half& now = *At(high_, row);  // a page that only has zeros is not written, so it takes no memory
      if (now.frequency != high.frequency || now.version != high.version) now = high;
    } else if (frequency >= kNear) {
      near_.store(true, std::memory_order_relaxed);
    }
  }

  /// Counts an update of a row. Widen has been asked for it.
  void Count(uint32_t row, uint64_t occurrences, int64_t version) noexcept {
    if (wide()) {
      RowHeader header = Get(row);
      header.frequency = std::min(header.frequency + occurrences, kMaxFrequency);
      header.version = version;
      return Set(row, header);
    }
    Half& low = *At(low_, row);
    low.frequency += static_cast<uint32_t>(occurrences);  // there is space, so the flags stay
    low.version = static_cast<uint32_t>(version);
    if ((low.frequency & kNear) != 0) near_.store(true, std::memory_order_relaxed);
  }

  /// Makes space for the high halves if a write needs them that adds up to `occurrences` to a frequency, and
  /// that has or gives steps such as this one. Throws std::bad_alloc and then has changed nothing.
  void Widen(uint64_t occurrences, int64_t version) {
    const bool fits = occurrences < kNear && !near_ && version >= 0 && version <= int64_t{UINT32_MAX};
    if (wide() || fits) return;
    Plane high(allocator_, sizeof(Half));
    high.Reserve(low_.space());
    high_ = std::move(high);
  }
  [[nodiscard]] bool wide() const { return high_.stride() > 0; }

  // ---- as of a plane ------------------------------------------------------------------------------------

  [[nodiscard]] size_t bytes(size_t rows) const {
    return low_.bytes(rows) + (wide() ? high_.bytes(rows) : 0);
  }
  void Reserve(size_t rows, size_t filled = 0) {
    low_.Reserve(rows, filled);
    high_.Reserve(rows);
  }
  void Shrink(size_t rows) noexcept {
    low_.Shrink(rows);
    high_.Shrink(rows);
  }
  void AddPages(uint32_t row, std::vector<uintptr_t>& pages) const {
    low_.AddPages(row, pages);
    if (wide()) high_.AddPages(row, pages);
  }
  [[gnu::always_inline]] void Prefetch(uint32_t row) const {
    __builtin_prefetch(low_.At(row));
    if (wide()) __builtin_prefetch(high_.At(row));
  }

 private:
  /// Of both numbers; the upper two bits of the low half's frequency are the flags.
  struct Half {
    uint32_t frequency = 0, version = 0;
  };
  static constexpr int kFrequencyBits = 30;
  static constexpr uint32_t kMaxLow = (1u << kFrequencyBits) - 1;
  // A frequency up to which the next write may add as much: it finds out by its own occurrences alone.
  static constexpr uint64_t kNear = uint64_t{1} << (kFrequencyBits - 1);
  static_assert(kMaxFrequency >> kFrequencyBits <= UINT32_MAX);

  [[nodiscard]] static Half* At(const Plane& plane, uint32_t row) {
    return std::launder(reinterpret_cast<Half*>(plane.At(row)));
  }

  std::shared_ptr<SlabAllocator> allocator_;
  Plane low_, high_;                // of the same stride, so space for as many rows
  std::atomic<bool> near_ = false;  // whether a frequency has come near its end, or lies beyond
};

}  // namespace kvjax
