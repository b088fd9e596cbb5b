// Initial rows, written by the lanes of a tile: the same bits as core/initial.h gives.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/device/plane.h"

namespace kvjax::device {

struct InitialView {
  Generator of;
  RowType type;
  int64_t dim;
  size_t row_bytes;
  const float* pool;  // in device memory
  uint64_t pool_rows;
  const std::byte* given;  // rows that come with the call
  size_t given_rows;

  /// Each lane of a tile names a row to be written, or nullptr, the key that it is of, and which of the rows
  /// that have come with the call it is.
  template <class Tile>
  KVJAX_HD void WriteRows(const Tile& tile, uint64_t key, uint32_t number, std::byte* row) const {
    if (of.kind == Generator::Kind::kGiven) {
      return CopyRecords(tile, number < given_rows ? row : nullptr, given + number * row_bytes, row_bytes);
    }
    if (tile.Count(row != nullptr) == 0) return;
    const auto pieces = static_cast<uint32_t>((dim + 3) / 4);
    for (uint32_t begin = 0; begin < tile.size() * pieces; begin += tile.size()) {
      const uint32_t at = begin + tile.rank(), record = at / pieces;
      const uint64_t its_key = tile.Shuffle(key, record);
      std::byte* const its_row = tile.Shuffle(row, record);
      if (its_row != nullptr) WriteFour(its_key, 4 * int64_t{at - record * pieces}, its_row);
    }
  }

 private:
  /// Up to four elements, from the column on.
  KVJAX_HD void WriteFour(uint64_t key, int64_t column, std::byte* row) const {
    if (of.kind == Generator::Kind::kPool) {
      const float* const from = pool + Generator::PoolIndex(key, pool_rows) * dim;
      for (int i = 0; i < 4 && column + i < dim; ++i) StoreElement(type, row, column + i, from[column + i]);
      return;
    }
    const auto words = of.Words(key, column / 4);
    for (int i = 0; i < 4; ++i) {  // a known number of times, so that the words stay in registers
      if (column + i < dim) StoreElement(type, row, column + i, of.Element(column + i, words[i]));
    }
  }
};

}  // namespace kvjax::device
