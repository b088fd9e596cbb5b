// Kept rows: copies of rows by their row ids, in memory that is reused.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/pages.h"

namespace kvjax {

/// A row id is added once at most, and never leaves the map: only its record does.
class KeptRows {
 public:
  explicit KeptRows(size_t record_bytes) : record_bytes_(record_bytes) {}

  /// A new record for this row, to be filled. Throws std::bad_alloc and then has changed nothing.
  std::byte* Add(uint32_t row) {
    if (4 * (size_ + 1) > 3 * places_.size()) Grow();
    if (free_.empty()) {
      blocks_.push_back(nullptr);
      const auto first = static_cast<uint32_t>((blocks_.size() - 1) * kBlock);
      try {
        free_.reserve(blocks_.size() * kBlock);
        blocks_.back() = std::make_unique_for_overwrite<std::byte[]>(kBlock * record_bytes_);
      } catch (...) {
        blocks_.pop_back();
        throw;
      }
      for (uint32_t i = kBlock; i-- > 0;) free_.push_back(first + i);
    }
    Place& place = Search(row);
    place = {row, free_.back()};
    free_.pop_back();
    ++size_;
    return At(place.record);
  }
  /// Fetches where a row will be searched for. GCC drops calls of functions that only prefetch.
  [[gnu::always_inline]] void Prefetch(uint32_t row) const {
    if (!places_.empty()) __builtin_prefetch(&places_[Home(row)]);
  }
  /// Its record. It has been added, and not forgotten.
  [[nodiscard]] const std::byte* Find(uint32_t row) const {
    return At(const_cast<KeptRows*>(this)->Search(row).record);
  }
  /// Its record may be used for another row.
  void Forget(uint32_t row) noexcept { free_.push_back(Search(row).record); }

 private:
  static constexpr uint32_t kBlock = 1024;  // records
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Place {
    uint32_t row = kNone, record = kNone;
  };

  [[nodiscard]] std::byte* At(uint32_t record) const {
    return blocks_[record / kBlock].get() + size_t{record % kBlock} * record_bytes_;
  }
  [[nodiscard]] size_t Home(uint32_t row) const {
    return (size_t{row} * 0x9E3779B97F4A7C15ull >> 32) & (places_.size() - 1);
  }
  /// Where the row stands, or may be put.
  Place& Search(uint32_t row) {
    const size_t mask = places_.size() - 1;
    size_t at = Home(row);
    while (places_[at].row != row && places_[at].row != kNone) at = (at + 1) & mask;
    return places_[at];
  }
  void Grow() {
    std::vector<Place, PageAllocator<Place>> places(places_.empty() ? 1024 : 2 * places_.size());
    places.swap(places_);
    for (const Place& place : places) {
      if (place.row != kNone) Search(place.row) = place;
    }
  }

  size_t record_bytes_, size_ = 0;
  std::vector<Place, PageAllocator<Place>> places_;
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
  std::vector<uint32_t> free_;
};

}  // namespace kvjax
