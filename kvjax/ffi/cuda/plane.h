// Records of one size under row ids, in slabs of device memory that never move.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/cuda/memory.h"

namespace kvjax::device {

/// What a plane looks like to a kernel.
struct PlaneView {
  std::byte* const* slabs;
  uint64_t inverse;
  uint32_t per_slab;
  uint32_t stride;

  [[nodiscard]] KVJAX_HD std::byte* At(uint32_t row) const {
    const uint64_t slab = Slab(row);
    return slabs[slab] + (row - slab * per_slab) * stride;
  }
  /// row / per_slab by multiplication, exact for all 32-bit numbers.
  [[nodiscard]] KVJAX_HD uint64_t Slab(uint32_t row) const { return MulHigh(inverse, uint64_t{row} + 1); }
};

/// The lanes of a tile copy `bytes` together, in pieces as wide as the addresses allow.
template <class Piece, class Tile>
KVJAX_HD void CopyPieces(const Tile& tile, std::byte* to, const std::byte* from, size_t bytes) {
  auto* target = reinterpret_cast<Piece*>(to);
  const auto* source = reinterpret_cast<const Piece*>(from);
  for (size_t i = tile.rank(); i < bytes / sizeof(Piece); i += tile.size()) target[i] = source[i];
}
template <class Tile>
KVJAX_HD void CopyRecord(const Tile& tile, void* target, const void* source, size_t bytes) {
  struct alignas(16) Sixteen {
    uint64_t words[2];
  };
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  const size_t ends = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes;
  if (ends % 16 == 0) {
    CopyPieces<Sixteen>(tile, to, from, bytes);
  } else if (ends % 4 == 0) {
    CopyPieces<uint32_t>(tile, to, from, bytes);
  } else if (ends % 2 == 0) {
    CopyPieces<uint16_t>(tile, to, from, bytes);
  } else {
    CopyPieces<uint8_t>(tile, to, from, bytes);
  }
}
template <class Tile>
KVJAX_HD void FillRecord(const Tile& tile, std::byte* target, uint8_t byte, size_t bytes) {
  auto* const to = reinterpret_cast<uint8_t*>(target);
  for (size_t i = tile.rank(); i < bytes; i += tile.size()) to[i] = byte;
}

template <class Q>
class Plane {
 public:
  static constexpr size_t kSlabBytes = size_t{2} << 20;

  Plane() = default;
  /// stride 0 is a plane that holds nothing.
  explicit Plane(size_t stride)
      : stride_(stride), per_slab_(std::max<size_t>(kSlabBytes / std::max<size_t>(stride, 1), 1)) {}

  [[nodiscard]] size_t bytes() const { return slabs_.size() * slab_bytes(); }
  [[nodiscard]] PlaneView view() const {
    return {places_.data(), UINT64_MAX / per_slab_, static_cast<uint32_t>(per_slab_),
            static_cast<uint32_t>(stride_)};
  }

  /// Makes room for `rows` records in all. Throws std::bad_alloc and leaves everything as it was.
  void Reserve(Q& q, size_t rows) {
    if (stride_ == 0 || slabs_.size() * per_slab_ >= rows) return;
    const size_t before = slabs_.size();
    try {
      while (slabs_.size() * per_slab_ < rows) slabs_.emplace_back(q, slab_bytes());
      std::vector<std::byte*> addresses;
      for (const auto& slab : slabs_) addresses.push_back(slab.data());
      if (places_.size() < slabs_.size()) {
        Array<Q, std::byte*> places(q, 2 * slabs_.size());
        std::swap(places_, places);
        places.Retire(q);
      }
      q.Copy(places_.data(), addresses.data(), addresses.size() * sizeof(std::byte*));
    } catch (...) {
      for (; slabs_.size() > before; slabs_.pop_back()) slabs_.back().Retire(q);
      throw;
    }
  }
  void Retire(Q& q) noexcept {
    for (; !slabs_.empty(); slabs_.pop_back()) slabs_.back().Retire(q);
    places_.Retire(q);
  }

 private:
  [[nodiscard]] size_t slab_bytes() const { return std::max(kSlabBytes, stride_ + (-stride_ & 255)); }

  size_t stride_ = 0;
  size_t per_slab_ = 1;
  std::vector<Array<Q, std::byte>> slabs_;
  Array<Q, std::byte*> places_;  // of the slabs, in device memory
};

}  // namespace kvjax::device
