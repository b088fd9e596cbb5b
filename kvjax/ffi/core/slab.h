// Rows live in slabs of fixed size that never move; a plane is a growing list of them.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvjax {

/// Where slabs come from. A slab is zeroed when it is handed out.
class SlabAllocator {
 public:
  virtual ~SlabAllocator() = default;
  /// Returns `bytes` zeroed bytes aligned to a page. Throws std::bad_alloc.
  virtual std::byte* Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* slab, size_t bytes) noexcept = 0;
};

/// Slabs in host memory. The system commits a page when it is first written, so a slab that is
/// hardly used costs address space and little else.
class HostSlabs final : public SlabAllocator {
 public:
  std::byte* Allocate(size_t bytes) override {
    void* slab = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slab == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(slab);
  }
  void Free(std::byte* slab, size_t bytes) noexcept override { munmap(slab, bytes); }
};

/// Records of `stride` bytes under row ids 0, 1, 2, ... The address of a record never changes.
class Plane {
 public:
  /// stride 0 is a plane that holds nothing.
  Plane(std::shared_ptr<SlabAllocator> allocator, size_t stride)
      : allocator_(std::move(allocator)), stride_(stride) {
    if (stride_ > 0) shift_ = std::bit_width(std::max<size_t>(kSlabBytes / stride_, 1)) - 1;
  }
  Plane(Plane&& other) noexcept
      : allocator_(std::move(other.allocator_)),
        stride_(other.stride_),
        shift_(other.shift_),
        slabs_(std::exchange(other.slabs_, {})) {}
  Plane& operator=(Plane other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(stride_, other.stride_);
    std::swap(shift_, other.shift_);
    std::swap(slabs_, other.slabs_);
    return *this;
  }
  Plane(const Plane&) = delete;
  ~Plane() {
    for (std::byte* slab : slabs_) allocator_->Free(slab, slab_bytes());
  }

  [[nodiscard]] size_t stride() const { return stride_; }
  [[nodiscard]] size_t bytes() const { return slabs_.size() * slab_bytes(); }

  /// Makes room for `rows` records in all. Throws std::bad_alloc; slabs gained before that are kept.
  void Reserve(size_t rows) {
    if (stride_ == 0) return;
    while (slabs_.size() << shift_ < rows) {
      slabs_.reserve(std::bit_ceil(slabs_.size() + 1));  // so that push_back below cannot throw
      slabs_.push_back(allocator_->Allocate(slab_bytes()));
    }
  }

  /// Frees the slabs behind those that the first `rows` records need.
  void Shrink(size_t rows) noexcept {
    while (!slabs_.empty() && (slabs_.size() - 1) << shift_ >= rows) {
      allocator_->Free(slabs_.back(), slab_bytes());
      slabs_.pop_back();
    }
  }

  [[nodiscard]] std::byte* At(uint32_t row) const {
    return slabs_[row >> shift_] + (row & ((size_t{1} << shift_) - 1)) * stride_;
  }

  void Prefetch(uint32_t row) const {
    const std::byte* record = At(row);
    for (size_t i = 0; i < std::min<size_t>(stride_, 1024); i += 64) __builtin_prefetch(record + i);
  }

 private:
  static constexpr size_t kSlabBytes = size_t{1} << 21;  // one huge page
  [[nodiscard]] size_t slab_bytes() const {
    return std::max(kSlabBytes, (stride_ << shift_) + (-(stride_ << shift_) & 4095));
  }

  std::shared_ptr<SlabAllocator> allocator_;
  size_t stride_;
  int shift_ = 0;
  std::vector<std::byte*> slabs_;
};

}  // namespace kvjax
