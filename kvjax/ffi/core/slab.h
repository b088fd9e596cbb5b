// Rows live in slabs of fixed size that never move; a plane is a growing list of them.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/read_ahead.h"

namespace kvjax {

/// Where slabs come from. A slab is zeroed when it is handed out. Any thread may call at any time.
class SlabAllocator {
 public:
  virtual ~SlabAllocator() = default;
  /// Returns `bytes` zeroed bytes aligned to a page, or throws std::bad_alloc (NoDisk is one) or
  /// kvjax::Error.
  virtual std::byte* Allocate(size_t bytes) = 0;
  /// The same for a slab of which every byte is about to be written.
  virtual std::byte* AllocateFull(size_t bytes) { return Allocate(bytes); }
  /// Gives memory and disk back to the system, not to a pool.
  virtual void Free(std::byte* slab, size_t bytes) noexcept = 0;
  /// What slabs of `reserved` bytes take of memory, or disk, of which the first `used` have been written.
  [[nodiscard]] virtual size_t Taken(size_t /*used*/, size_t reserved) const { return reserved; }
  /// Of slabs in a file, or nullptr.
  [[nodiscard]] virtual ReadAhead* read_ahead() { return nullptr; }
};

/// Slabs in host memory. The system commits a page when it is first written, so a slab that is hardly used
/// costs address space and little else; a slab of one huge page is committed as a whole. So huge pages come
/// to slabs that will be full at once, and to others only once `huge_from` bytes are out, where a table's
/// last, partly used slabs no longer count. With SIZE_MAX there are none.
class HostSlabs final : public SlabAllocator {
 public:
  static constexpr size_t kHugeFrom = size_t{32} << 20;

  explicit HostSlabs(size_t huge_from = kHugeFrom) : huge_from_(huge_from) {}

  std::byte* Allocate(size_t bytes) override { return Map(bytes, bytes_ >= huge_from_); }
  std::byte* AllocateFull(size_t bytes) override { return Map(bytes, huge_from_ < SIZE_MAX); }
  void Free(std::byte* slab, size_t bytes) noexcept override {
    UnmapPages(slab, bytes);
    bytes_ -= bytes;
  }
  [[nodiscard]] size_t Taken(size_t used, size_t reserved) const override {
    return std::min(InPages(used, bytes_ > huge_from_), reserved);
  }

 private:
  std::byte* Map(size_t bytes, bool huge) {
    std::byte* const slab = MapPages(bytes, huge);
    bytes_ += bytes;
    return slab;
  }

  size_t huge_from_;
  std::atomic<size_t> bytes_ = 0;  // a table and the one that is to replace it share their allocator
};

/// Records of `stride` bytes under row ids 0, 1, 2, ... The address of a record never changes.
class Plane {
 public:
  /// stride 0 is a plane that holds nothing.
  Plane(std::shared_ptr<SlabAllocator> allocator, size_t stride)
      : allocator_(std::move(allocator)), stride_(stride) {
    if (stride_ == 0) return;
    per_slab_ = std::max<size_t>(kSlabBytes / stride_, 1);
    inverse_ = UINT64_MAX / per_slab_;
  }
  Plane(Plane&& other) noexcept
      : allocator_(std::move(other.allocator_)),
        stride_(other.stride_),
        per_slab_(other.per_slab_),
        inverse_(other.inverse_),
        slabs_(std::exchange(other.slabs_, {})) {}
  Plane& operator=(Plane other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(stride_, other.stride_);
    std::swap(per_slab_, other.per_slab_);
    std::swap(inverse_, other.inverse_);
    std::swap(slabs_, other.slabs_);
    return *this;
  }
  Plane(const Plane&) = delete;
  ~Plane() {
    for (std::byte* slab : slabs_) allocator_->Free(slab, slab_bytes());
  }

  [[nodiscard]] size_t stride() const { return stride_; }
  /// What it takes with so many records, from the first one on.
  [[nodiscard]] size_t bytes(size_t rows) const {
    return allocator_->Taken(rows / per_slab_ * slab_bytes() + rows % per_slab_ * stride_, bytes());
  }
  /// The same with as many as there is space for.
  [[nodiscard]] size_t bytes() const { return slabs_.size() * slab_bytes(); }
  /// How many that are.
  [[nodiscard]] size_t space() const { return slabs_.size() * per_slab_; }

  /// Reserves space for `rows` records in all, of which those below `filled` are about to be written. What
  /// the allocator throws leaves everything as it was.
  void Reserve(size_t rows, size_t filled = 0) {
    if (stride_ == 0) return;
    const size_t before = space();
    try {
      while (space() < rows) {
        slabs_.reserve(std::bit_ceil(slabs_.size() + 1));  // so that push_back below cannot throw
        const bool full = (slabs_.size() + 1) * per_slab_ <= filled;
        slabs_.push_back(full ? allocator_->AllocateFull(slab_bytes()) : allocator_->Allocate(slab_bytes()));
      }
    } catch (...) {
      Shrink(before);  // or the next call, small as it may be, would find no memory left
      throw;
    }
  }

  /// Frees the slabs that hold nothing but records from `rows` on.
  void Shrink(size_t rows) noexcept {
    if (stride_ == 0) return;
    const size_t keep = rows / per_slab_ + (rows % per_slab_ != 0 ? 1 : 0);
    for (; slabs_.size() > keep; slabs_.pop_back()) allocator_->Free(slabs_.back(), slab_bytes());
  }

  [[nodiscard]] std::byte* At(uint32_t row) const {
    // row / per_slab_ by multiplication, exact for all 32-bit numbers, so that slabs can be full: records to
    // a slab are seldom a power of two.
    const size_t slab = MulHigh(inverse_, uint64_t{row} + 1);
    return slabs_[slab] + (row - slab * per_slab_) * stride_;
  }

  /// Adds the pages of a record, see ReadAhead.
  void AddPages(uint32_t row, std::vector<uintptr_t>& pages) const {
    const auto start = reinterpret_cast<uintptr_t>(At(row)), last = start + stride_ - 1;
    const size_t bytes = PageBytes();
    for (uintptr_t page = start / bytes; page <= last / bytes; ++page) pages.push_back(page);
  }

  // See PrefetchRecord.
  [[gnu::always_inline]] void Prefetch(uint32_t row) const { PrefetchRecord(At(row), stride_); }

 private:
  static constexpr size_t kSlabBytes = kHugePage;
  [[nodiscard]] size_t slab_bytes() const { return std::max(kSlabBytes, InPages(stride_, false)); }

  std::shared_ptr<SlabAllocator> allocator_;
  size_t stride_;
  size_t per_slab_ = 1;
  uint64_t inverse_ = 0;
  std::vector<std::byte*> slabs_;
};

}  // namespace kvjax
