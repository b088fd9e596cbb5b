// The merge of a batch on the device: the same bits as MergeRows in core/merge.h gives.
//
// A key's rows are added block by block, and all blocks of a call at once: so a key that is half of the batch
// does not keep one tile busy while the others are done.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/plane.h"

namespace kvjax::device {

/// Rows of `dim` floats that stand anywhere.
struct RowsAt {
  const float* rows;
  const uint32_t* positions;
  size_t dim;
  KVJAX_HD const float* operator()(uint32_t k) const { return rows + positions[k] * dim; }
};
/// A key's sums of blocks: that of the first one is where the whole sum is to be.
struct BlocksAt {
  const float* first;
  const float* sums;
  size_t dim;
  KVJAX_HD const float* operator()(uint32_t k) const { return k == 0 ? first : sums + k * dim; }
};

/// target = at(0) + at(1) + ... + at(n - 1), in this order; the lanes of a tile share the columns. A lane has
/// several rows on their way before it adds the first of them.
template <int kWide, class Tile, class At>
KVJAX_HD void AddRows(const Tile& tile, float* target, size_t dim, uint32_t n, At at) {
  struct alignas(kWide * sizeof(float)) Piece {
    float x[kWide];
  };
  constexpr uint32_t kAtOnce = 8;
  for (size_t d = tile.rank(); d < dim / kWide; d += tile.size()) {
    Piece sum = reinterpret_cast<const Piece*>(at(0))[d];
    for (uint32_t k = 1; k < n; k += kAtOnce) {
      Piece next[kAtOnce] = {};
      for (uint32_t m = 0; m < kAtOnce; ++m) {
        if (k + m < n) next[m] = reinterpret_cast<const Piece*>(at(k + m))[d];
      }
      for (uint32_t m = 0; m < kAtOnce; ++m) {
        for (int w = 0; w < kWide; ++w) {
          if (k + m < n) sum.x[w] += next[m].x[w];
        }
      }
    }
    reinterpret_cast<Piece*>(target)[d] = sum;
  }
}

/// The parts of a sum of n counts that the lanes of a tile have each, together; at most INT32_MAX.
template <class Tile>
KVJAX_HD int32_t SumOfCounts(const Tile& tile, int64_t mine) {
  const int64_t sum = SumOfLanes(tile, mine);
  return static_cast<int32_t>(sum < INT32_MAX ? sum : INT32_MAX);
}

/// keys (n,), rows (n, dim), counts (n,): a count of 0 or less is padding. The outputs have the same shapes.
template <class Q>
void MergeGradients(Q& q, const uint64_t* keys, const float* rows, const int32_t* counts, size_t n,
                    size_t dim, uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
  const Segments<Q> segments(q, keys, {.counts = counts}, n);
  const auto of = segments.view();
  // Of blocks that are not the first of their key, whose sums stand in the results: they begin at least
  // kSumBlock positions apart.
  const size_t others = n > kSumBlock ? n / kSumBlock + 1 : 0;
  const Scratch<Q, float> sums(q, others * dim);
  const Scratch<Q, int32_t> counted(q, others);
  float* const other_rows = sums.data();
  int32_t* const other_counts = counted.data();
  const size_t bytes = dim * sizeof(float);
  const bool wide = (reinterpret_cast<size_t>(rows) | reinterpret_cast<size_t>(out_rows) | bytes) % 16 == 0;
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t j) {
    const bool valid = j < n && of.numbers[j] < *of.distinct;
    const uint32_t u = valid ? of.numbers[j] : 0, begin = valid ? of.begin[u] : 0;
    const auto from_here = static_cast<uint32_t>(valid ? of.end[u] - j : 0);
    uint32_t length = 0;  // of the block that begins here
    if (valid && (j - begin) % kSumBlock == 0) length = from_here < kSumBlock ? from_here : kSumBlock;
    const bool is_first = j == begin;
    const size_t other = valid ? j / kSumBlock : 0;
    float* const sum = is_first ? out_rows + u * dim : other_rows + other * dim;
    int32_t* const count = is_first ? out_counts + u : other_counts + other;
    const bool alone = length == 1;
    CopyRecords(tile, alone ? reinterpret_cast<std::byte*>(sum) : nullptr,
                alone ? reinterpret_cast<const std::byte*>(rows + of.positions[j] * dim) : nullptr, bytes);
    if (alone) *count = counts[of.positions[j]];
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t added = tile.Shuffle(length, lane);
      if (added < 2) continue;
      const uint32_t* const positions = of.positions + (j - tile.rank()) + lane;
      float* const target = tile.Shuffle(sum, lane);
      if (wide) {
        AddRows<4>(tile, target, dim, added, RowsAt{rows, positions, dim});
      } else {
        AddRows<1>(tile, target, dim, added, RowsAt{rows, positions, dim});
      }
      int64_t mine = 0;
      for (uint32_t k = tile.rank(); k < added; k += tile.size()) mine += counts[positions[k]];
      const int32_t all = SumOfCounts(tile, mine);
      if (tile.rank() == lane) *count = all;
    }
  });
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t u) {
    const bool is_key = u < n && u < *of.distinct;
    const uint32_t begin = is_key ? of.begin[u] : 0, end = is_key ? of.end[u] : 0;
    float* const row = out_rows + u * dim;
    CopyRecords(tile, u < n && !is_key ? reinterpret_cast<std::byte*>(row) : nullptr, nullptr, bytes);
    if (u < n) out_keys[u] = is_key ? keys[of.positions[begin]] : 0;
    if (u < n && !is_key) out_counts[u] = 0;
    const uint32_t blocks = (end - begin + kSumBlock - 1) / kSumBlock;
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t added = tile.Shuffle(blocks, lane);
      if (added < 2) continue;
      const size_t other = tile.Shuffle(begin, lane) / kSumBlock;
      float* const target = tile.Shuffle(row, lane);
      const BlocksAt at{target, other_rows + other * dim, dim};
      if (wide) {
        AddRows<4>(tile, target, dim, added, at);
      } else {
        AddRows<1>(tile, target, dim, added, at);
      }
      int64_t mine = tile.rank() == lane ? out_counts[u] : 0;
      for (uint32_t k = 1 + tile.rank(); k < added; k += tile.size()) mine += other_counts[other + k];
      const int32_t all = SumOfCounts(tile, mine);
      if (tile.rank() == lane) out_counts[u] = all;
    }
  });
}

}  // namespace kvjax::device
