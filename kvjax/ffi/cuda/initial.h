// Initial rows, written by the lanes of a tile: the same bits as core/initial.h gives.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cuda/plane.h"

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

  /// Writes the row of a key; it is the number-th of those that have come with the call.
  template <class Tile>
  KVJAX_HD void Write(const Tile& tile, uint64_t key, uint32_t number, std::byte* row) const {
    switch (of.kind) {
      case Generator::Kind::kGiven:
        if (number < given_rows) CopyRecord(tile, row, given + number * row_bytes, row_bytes);
        return;
      case Generator::Kind::kConstant:
      case Generator::Kind::kPool: {
        const float* const from =
            of.kind == Generator::Kind::kPool ? pool + Generator::PoolRow(key, pool_rows) * dim : nullptr;
        for (int64_t column = tile.rank(); column < dim; column += tile.size()) {
          StoreElement(type, row, column, from == nullptr ? static_cast<float>(of.a) : from[column]);
        }
        return;
      }
      default:
        for (int64_t column = 4 * tile.rank(); column < dim; column += 4 * tile.size()) {
          const auto words = of.Words(key, column / 4);
          for (int64_t i = 0; i < 4 && column + i < dim; ++i)
            StoreElement(type, row, column + i, of.Element(words[i]));
        }
    }
  }
};

}  // namespace kvjax::device
