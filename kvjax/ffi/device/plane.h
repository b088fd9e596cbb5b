// Records of one size under row ids, in slabs: those of the first rows in device memory, all others in pinned
// host memory, which kernels reach in the same way.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// Bytes from a record to the next: records that are not small lie at multiples of what a lane moves at once.
constexpr size_t RecordStride(size_t bytes) {
  const size_t unit = bytes < 64 ? 4 : 16;
  return (bytes + unit - 1) / unit * unit;
}

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

/// The widest piece that one lane moves at once.
struct alignas(16) Sixteen {
  uint64_t words[2];
};

/// See CopyRecords. A record is `pieces` pieces, and all pieces of all records are dealt out to the lanes one
/// after the other: so lanes are busy also where records are small, and neighbours touch neighbouring memory.
template <class Piece, class Tile>
KVJAX_HD void CopyPieces(const Tile& tile, std::byte* to, const std::byte* from, uint32_t pieces,
                         uint8_t fill) {
  constexpr uint32_t kAtOnce = 4;  // loads of a lane that are on their way before it stores the first
  const uint32_t all = tile.size() * pieces;
  Piece filled;
  memset(&filled, fill, sizeof(Piece));
  for (uint32_t begin = 0; begin < all; begin += kAtOnce * tile.size()) {
    Piece loaded[kAtOnce];
    Piece* target[kAtOnce];
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t at = begin + k * tile.size() + tile.rank();
      const uint32_t record = at < all ? at / pieces : 0, piece = at - record * pieces;
      const auto* const source = reinterpret_cast<const Piece*>(tile.Shuffle(from, record));
      target[k] = reinterpret_cast<Piece*>(tile.Shuffle(to, record));
      loaded[k] = filled;
      if (at >= all) target[k] = nullptr;
      if (target[k] == nullptr) continue;
      target[k] += piece;
      if (source != nullptr) loaded[k] = source[piece];
    }
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (target[k] != nullptr) *target[k] = loaded[k];
    }
  }
}

/// Each lane of a tile names a record of `bytes`, and together they copy them all, in pieces as wide as the
/// addresses allow. A lane whose `to` is nullptr has none; one whose `from` is nullptr has it filled.
template <class Tile>
KVJAX_HD void CopyRecords(const Tile& tile, std::byte* to, const std::byte* from, size_t bytes,
                          uint8_t fill = 0) {
  if (tile.Count(to != nullptr) == 0) return;
  const size_t ends = to == nullptr ? 0 : reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from);
  const auto size = static_cast<uint32_t>(bytes);
  if (tile.Count((ends | bytes) % 16 != 0) == 0) {
    CopyPieces<Sixteen>(tile, to, from, size / 16, fill);
  } else if (tile.Count((ends | bytes) % 8 != 0) == 0) {
    CopyPieces<uint64_t>(tile, to, from, size / 8, fill);
  } else if (tile.Count((ends | bytes) % 4 != 0) == 0) {
    CopyPieces<uint32_t>(tile, to, from, size / 4, fill);
  } else if (tile.Count((ends | bytes) % 2 != 0) == 0) {
    CopyPieces<uint16_t>(tile, to, from, size / 2, fill);
  } else {
    CopyPieces<uint8_t>(tile, to, from, size, fill);
  }
}

template <class Q>
class Plane {
 public:
  static constexpr size_t kSlabBytes = size_t{2} << 20;

  Plane() = default;
  /// stride 0 is a plane that holds nothing.
  explicit Plane(size_t stride, size_t slab_bytes = kSlabBytes)
      : stride_(stride),
        slab_bytes_((std::max(slab_bytes, stride) + 255) / 256 * 256),
        per_slab_(std::max<size_t>(slab_bytes / std::max<size_t>(stride, 1), 1)) {}

  [[nodiscard]] size_t stride() const { return stride_; }
  [[nodiscard]] size_t bytes() const { return slabs_.size() * slab_bytes_; }
  [[nodiscard]] size_t pinned_bytes() const {
    const auto pinned = [](const Slab& slab) { return slab.block->memory() == Memory::kPinned; };
    return static_cast<size_t>(std::count_if(slabs_.begin(), slabs_.end(), pinned)) * slab_bytes_;
  }
  /// What so many records take.
  [[nodiscard]] size_t BytesFor(size_t rows) const {
    return stride_ == 0 ? 0 : (rows + per_slab_ - 1) / per_slab_ * slab_bytes_;
  }
  /// Records of rows below this are in device memory.
  [[nodiscard]] size_t device_rows() const { return device_rows_; }
  [[nodiscard]] PlaneView view() const {
    return {starts_.data(), UINT64_MAX / per_slab_, static_cast<uint32_t>(per_slab_),
            static_cast<uint32_t>(stride_)};
  }

  /// Reserves space for `rows` records in all. Throws std::bad_alloc and leaves everything as it was.
  void Reserve(Q& q, size_t rows) {
    if (stride_ == 0 || slabs_.size() * per_slab_ >= rows) return;
    const size_t before = slabs_.size();
    try {
      for (const size_t wanted = (rows + per_slab_ - 1) / per_slab_; slabs_.size() < wanted;) {
        // Each piece of pinned memory is a mapping of the process, which may have some ten thousands: so it
        // is an eighth of what there is at least. On a device with a limit slabs may have to leave one by
        // one.
        const Memory memory = MemoryOf(slabs_.size(), device_rows_);
        const size_t all = wanted - slabs_.size();
        const size_t pieces = memory == Memory::kPinned ? std::max(all, slabs_.size() / 8)
                              : limited()               ? 1
                                                        : all;
        const auto more = Make(q, pieces, memory);
        slabs_.insert(slabs_.end(), more.begin(), more.end());
      }
      const auto addresses = Addresses();
      if (starts_.size() < slabs_.size()) {
        Array<Q, std::byte*> more(q, 2 * slabs_.size());
        q.Copy(more.data(), starts_.data(), before * sizeof(std::byte*));
        std::swap(starts_, more);
        more.Retire(q);
      }
      WriteFromHost(q, starts_.data() + before, addresses.data() + before, addresses.size() - before);
    } catch (...) {
      for (; slabs_.size() > before; slabs_.pop_back()) slabs_.back().Retire(q);
      throw;
    }
  }
  /// Moves slabs, so that those of the first `rows` rows and no others are in device memory. Throws
  /// std::bad_alloc and leaves everything as it was.
  void Place(Q& q, size_t rows) {
    std::vector<size_t> which;
    for (size_t i = 0; i < slabs_.size(); ++i) {
      if (MemoryOf(i, rows) != slabs_[i].block->memory()) which.push_back(i);
    }
    std::vector<Slab> moved;  // all in one direction
    while (moved.size() < which.size()) {
      const Memory memory = MemoryOf(which[0], rows);
      const auto more = Make(q, memory == Memory::kPinned ? which.size() : 1, memory);
      moved.insert(moved.end(), more.begin(), more.end());
    }
    auto addresses = Addresses();
    for (size_t m = 0; m < which.size(); ++m) {
      q.Copy(moved[m].data, addresses[which[m]], slab_bytes_);
      addresses[which[m]] = moved[m].data;
    }
    if (!which.empty()) WriteFromHost(q, starts_.data(), addresses.data(), addresses.size());
    device_rows_ = rows;
    for (size_t m = 0; m < which.size(); ++m) std::swap(slabs_[which[m]], moved[m]);
    for (Slab& old : moved) old.Retire(q);
  }
  void Retire(Q& q) noexcept {
    for (; !slabs_.empty(); slabs_.pop_back()) slabs_.back().Retire(q);
    starts_.Retire(q);
  }

 private:
  /// A part of a piece of memory, which is freed with the last of its slabs.
  struct Slab {
    std::shared_ptr<Array<Q, std::byte>> block;
    std::byte* data;

    void Retire(Q& q) noexcept {
      if (block.use_count() == 1) block->Retire(q);
      block.reset();
    }
  };

  /// Whether not all records may be on the device.
  [[nodiscard]] bool limited() const { return device_rows_ <= UINT32_MAX; }
  [[nodiscard]] Memory MemoryOf(size_t slab, size_t device_rows) const {
    return slab * per_slab_ < device_rows ? Memory::kDevice : Memory::kPinned;
  }
  [[nodiscard]] std::vector<std::byte*> Addresses() const {
    std::vector<std::byte*> addresses;
    for (const Slab& slab : slabs_) addresses.push_back(slab.data);
    return addresses;
  }
  std::vector<Slab> Make(Q& q, size_t n, Memory memory) const {
    const auto block = std::make_shared<Array<Q, std::byte>>(q, n * slab_bytes_, memory);
    std::vector<Slab> slabs;
    for (size_t i = 0; i < n; ++i) slabs.push_back({block, block->data() + i * slab_bytes_});
    return slabs;
  }

  size_t stride_ = 0;
  size_t slab_bytes_ = 0;
  size_t per_slab_ = 1;
  size_t device_rows_ = SIZE_MAX;
  std::vector<Slab> slabs_;
  Array<Q, std::byte*> starts_;  // of the slabs, in device memory
};

/// Copies records of the given rows out: (n, bytes) at `offset` of the record.
template <class Q>
void CopyOut(Q& q, PlaneView plane, size_t offset, size_t bytes, const uint32_t* rows, std::byte* out,
             size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool has = i < n;
    CopyRecords(tile, has ? out + i * bytes : nullptr, has ? plane.At(rows[i]) + offset : nullptr, bytes);
  });
}
template <class Q>
void CopyIn(Q& q, PlaneView plane, size_t offset, size_t bytes, const uint32_t* rows, const std::byte* in,
            size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const bool has = i < n;
    CopyRecords(tile, has ? plane.At(rows[i]) + offset : nullptr, has ? in + i * bytes : nullptr, bytes);
  });
}

}  // namespace kvjax::device
