// The merge of a batch: the sums of the gradient rows of equal keys.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/parallel.h"

namespace kvjax {

/// Rows that are summed one after the other. A sum of more is the sum of the sums of so many rows each, in
/// order: as reproducible, more accurate, and the blocks can be summed at the same time.
inline constexpr uint32_t kSumBlock = 256;

/// Sums some of the rows (n, dim), one after the other.
struct SumInOrder {
  void operator()(float* __restrict sum, const float* __restrict rows, std::span<const uint32_t> which,
                  size_t dim) const {
    std::memcpy(sum, rows + which[0] * dim, dim * sizeof(float));
    for (const uint32_t r : which.subspan(1)) {
      for (size_t d = 0; d < dim; ++d) sum[d] += rows[r * dim + d];
    }
  }
};

/// The sum of some of the rows (n, dim) in blocks, each of which `sum` sums as SumInOrder does. `memory` has
/// space for two rows; a sum of one row is that row itself.
template <class Sum>
const float* SumRows(const float* rows, std::span<const uint32_t> which, size_t dim, float* memory, Sum sum) {
  if (which.size() == 1) return rows + which[0] * dim;
  sum(memory, rows, which.first(std::min<size_t>(which.size(), kSumBlock)), dim);
  for (size_t begin = kSumBlock; begin < which.size(); begin += kSumBlock) {
    sum(memory + dim, rows, which.subspan(begin, std::min<size_t>(which.size() - begin, kSumBlock)), dim);
    for (size_t d = 0; d < dim; ++d) memory[d] += memory[dim + d];
  }
  return memory;
}

/// Merges n rows of `dim` floats into one row per distinct key, in order of first occurrence; the rows of
/// a key are added in blocks of kSumBlock, in the order in which they stand, so the result is reproducible to
/// the bit.
/// The outputs have space for n rows; what is behind the returned number of distinct keys is not written.
inline size_t MergeUnpadded(const ParallelFor& parallel, const uint64_t* keys, const float* rows,
                            const int32_t* counts, size_t n, size_t dim, uint64_t* out_keys, float* out_rows,
                            int32_t* out_counts) {
  constexpr size_t kGrain = 1024;  // keys: below this, waking a second thread costs more than it saves
  const KeyGroups groups(parallel, keys, counts, n);
  const size_t distinct = groups.size();
  std::copy(groups.keys().begin(), groups.keys().end(), out_keys);
  std::copy(groups.counts().begin(), groups.counts().end(), out_counts);
  parallel(distinct, kGrain, [&](size_t begin, size_t end) {
    std::vector<float> memory(2 * dim);
    for (size_t u = begin; u < end; ++u) {
      const float* const sum = SumRows(rows, groups.rows(u), dim, memory.data(), SumInOrder());
      std::memcpy(out_rows + u * dim, sum, dim * sizeof(float));
    }
  });
  return distinct;
}

/// The same, and zeros behind them.
inline size_t MergeRows(const ParallelFor& parallel, const uint64_t* keys, const float* rows,
                        const int32_t* counts, size_t n, size_t dim, uint64_t* out_keys, float* out_rows,
                        int32_t* out_counts) {
  const size_t distinct = MergeUnpadded(parallel, keys, rows, counts, n, dim, out_keys, out_rows, out_counts);
  std::fill(out_keys + distinct, out_keys + n, uint64_t{0});
  std::fill(out_counts + distinct, out_counts + n, int32_t{0});
  std::fill(out_rows + distinct * dim, out_rows + n * dim, 0.0f);
  return distinct;
}

}  // namespace kvjax
