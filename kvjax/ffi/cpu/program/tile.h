// Tiles: rows of a step that are computed together, as lists of where their parts are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/facts.h"

namespace kvjax::program {

/// Where the parts of a tile's row are.
struct TileRow {
  std::byte* value;
  std::byte* slots;
  const float* gradient;  // a sum already
  const uint64_t* key;
  bool fresh;                       // no optimizer has written its slots
  const RowFacts* facts = nullptr;  // if the program wants them
};

class Tile {
 public:
  enum Part { kValue, kSlots, kGradient, kFacts, kParts };

  /// Of at most so many rows.
  explicit Tile(size_t rows) : most_(rows), parts_(kParts * rows), keys_(rows) { fresh_.reserve(rows); }

  [[nodiscard]] size_t size() const { return size_; }
  void Clear() { size_ = 0, fresh_.clear(); }

  void Add(const TileRow& row) {
    float** const to = parts_.data() + size_;  // no gradients or facts does anything write
    to[kValue * most_] = reinterpret_cast<float*>(row.value);
    to[kSlots * most_] = reinterpret_cast<float*>(row.slots);
    to[kGradient * most_] = const_cast<float*>(row.gradient);
    to[kFacts * most_] = reinterpret_cast<float*>(const_cast<RowFacts*>(row.facts));
    keys_[size_] = row.key;
    if (row.fresh) fresh_.push_back(size_);
    ++size_;
  }

  /// Those of `other` that are fresh.
  void AddFresh(const Tile& other) {
    for (const size_t r : other.fresh_)
      Add({reinterpret_cast<std::byte*>(other.part(kValue)[r]),
           reinterpret_cast<std::byte*>(other.part(kSlots)[r]), other.part(kGradient)[r], other.keys_[r],
           true, reinterpret_cast<RowFacts*>(other.part(kFacts)[r])});
  }

  /// Each of the two rows gets the place of the other.
  void Swap(size_t a, size_t b) {
    for (size_t part = 0; part < kParts; ++part)
      std::swap(parts_[part * most_ + a], parts_[part * most_ + b]);
    std::swap(keys_[a], keys_[b]);
  }

  /// Where that part of each row begins; the same place as long as the tile lives.
  [[nodiscard]] float* const* part(Part which) const { return parts_.data() + which * most_; }
  [[nodiscard]] const uint64_t* const* keys() const { return keys_.data(); }

  /// For a list of this tile's that of another one of the same size; others stay.
  [[nodiscard]] float* const* Same(float* const* rows, const Tile& other) const {
    const std::less<float* const*> before;
    const bool own = !before(rows, parts_.data()) && before(rows, parts_.data() + parts_.size());
    return own ? other.parts_.data() + (rows - parts_.data()) : rows;
  }

 private:
  size_t most_, size_ = 0;
  std::vector<float*> parts_;  // (kParts, most)
  std::vector<const uint64_t*> keys_;
  std::vector<size_t> fresh_;
};

}  // namespace kvjax::program
