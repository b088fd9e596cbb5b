// Initial rows, written by the kernels of the processor's instruction set: the same bits as core/initial.h
// gives.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cpu/program/kernels.h"

namespace kvjax {

/// Writes the initial row of a key, by a generator or from a pool.
inline void StoreInitialRow(const Initializer& initializer, RowType type, int64_t dim, uint64_t key,
                            std::byte* row, const program::Kernels& kernels = program::BestKernels()) {
  const auto store = [&](int64_t begin, int64_t end, const float* from) {  // of columns
    for (int64_t column = begin; column < end; ++column)
      StoreElement(type, row, column, from[column - begin]);
  };
  if (initializer.kind == Initializer::Kind::kPool) return store(0, dim, initializer.PoolRow(key, dim));
  constexpr int64_t kPiece = 256;
  float piece[kPiece];
  int64_t begin = 0;
  for (const Generator::Segment& segment : initializer.segments) {
    const int64_t last = std::min(segment.end, dim);
    for (int64_t end = begin; begin < last; begin = end) {
      end = type == RowType::kFloat32 ? last : std::min(begin + kPiece, last);
      float* const to = type == RowType::kFloat32 ? reinterpret_cast<float*>(row) + begin : piece;
      kernels.elements(segment.of, initializer.seed, key, begin, end, to);
      if (to == piece) store(begin, end, piece);
    }
    if (last == dim) return;
  }
}

}  // namespace kvjax
