// Bags: rows combined by sum or maximum, and the gradients.
//
// Rows, weights and bags meet in one form, linear in each of them: T = sum over i of w[i] <row[i],
// bag[ids[i]]>. SumBags, ExpandBags and DotBags are its gradients by the bags, the rows and the weights; so
// the gradients of each are the other two. Everything is added in the order of the positions: results are the
// same to the bit however many threads there are.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// What is worth a thread: a few tens of microseconds.
inline constexpr size_t kGrainFloats = 1 << 15;

/// An inner product is made of so many sums, because a compiler may not reorder a sum of floats by itself.
inline constexpr int kDotLanes = 8;

/// n rows of `dim` floats, of which row i belongs to bag ids[i]; an id outside [0, bags) marks padding.
struct BagShape {
  size_t n = 0, bags = 0, dim = 0;
  const int32_t* ids = nullptr;

  [[nodiscard]] KVJAX_HD bool IsPadding(size_t i) const {
    return ids[i] < 0 || static_cast<size_t>(ids[i]) >= bags;
  }
  /// How many rows are worth a thread.
  [[nodiscard]] size_t Grain() const { return std::max<size_t>(kGrainFloats / std::max<size_t>(dim, 1), 1); }
};

/// Whether the bags stand one after the other, padding aside.
inline bool IsAscending(const BagShape& shape) {
  bool ascending = true;
  for (size_t i = 0, last = 0; i < shape.n; ++i) {
    if (shape.IsPadding(i)) continue;
    ascending &= static_cast<size_t>(shape.ids[i]) >= last;
    last = static_cast<size_t>(shape.ids[i]);
  }
  return ascending;
}

/// The first position at or after `i` that is not of the bag before it: where ascending bags may be cut.
inline size_t NextBag(const BagShape& shape, size_t i) {
  size_t before = i;
  while (before > 0 && shape.IsPadding(before - 1)) --before;
  if (before == 0) return i;
  while (i < shape.n && (shape.IsPadding(i) || shape.ids[i] == shape.ids[before - 1])) ++i;
  return i;
}

/// Calls row(i, bag) for all rows but padding. Every bag sees its rows in order, and belongs to one thread:
/// bags that stand in any order are all one thread's.
template <class Row>
void ForEachRow(const ParallelFor& parallel, const BagShape& shape, const Row& row) {
  const size_t grain = IsAscending(shape) ? shape.Grain() : std::max<size_t>(shape.n, 1);
  parallel(shape.n, grain, [&](size_t begin, size_t end) {
    end = NextBag(shape, end);
    for (size_t i = NextBag(shape, begin); i < end; ++i) {
      if (!shape.IsPadding(i)) row(i, static_cast<size_t>(shape.ids[i]));
    }
  });
}

/// bags (bags, dim): the weighted sums; 0 for an empty bag.
inline void SumBags(const ParallelFor& parallel, const BagShape& shape, const float* weights,
                    const float* rows, float* bags) {
  std::fill_n(bags, shape.bags * shape.dim, 0.0f);
  ForEachRow(parallel, shape, [&](size_t i, size_t bag) {
    const float w = weights[i];
    const float* __restrict const row = rows + i * shape.dim;
    float* __restrict const out = bags + bag * shape.dim;
    for (size_t d = 0; d < shape.dim; ++d) out[d] += w * row[d];
  });
}

/// rows (n, dim): each bag times the weights of its rows; 0 for padding.
inline void ExpandBags(const ParallelFor& parallel, const BagShape& shape, const float* weights,
                       const float* bags, float* rows) {
  parallel(shape.n, shape.Grain(), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* const out = rows + i * shape.dim;
      if (shape.IsPadding(i)) {
        std::fill_n(out, shape.dim, 0.0f);
        continue;
      }
      const float* const bag = bags + static_cast<size_t>(shape.ids[i]) * shape.dim;
      for (size_t d = 0; d < shape.dim; ++d) out[d] = weights[i] * bag[d];
    }
  });
}

/// weights (n,): the inner product of each row and its bag; 0 for padding.
inline void DotBags(const ParallelFor& parallel, const BagShape& shape, const float* rows, const float* bags,
                    float* weights) {
  parallel(shape.n, shape.Grain(), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      weights[i] = 0.0f;
      if (shape.IsPadding(i)) continue;
      const float* const row = rows + i * shape.dim;
      const float* const bag = bags + static_cast<size_t>(shape.ids[i]) * shape.dim;
      float lanes[kDotLanes] = {};
      size_t d = 0;
      for (; d + kDotLanes <= shape.dim; d += kDotLanes) {
        for (size_t l = 0; l < kDotLanes; ++l) lanes[l] += row[d + l] * bag[d + l];
      }
      for (size_t l = 0; d < shape.dim; ++d, ++l) lanes[l] += row[d] * bag[d];
      for (const float lane : lanes) weights[i] += lane;
    }
  });
}

/// Whether x is the largest of a column so far, by the largest before it and its position: larger, or the
/// first NaN that comes, or the first row of the bag. No branch, so that it is vector code.
KVJAX_HD inline bool IsLargest(float x, float largest, int32_t from) {
  return static_cast<bool>(((largest == largest) & !(x <= largest)) | (from < 0));
}

/// bags (bags, dim): the largest of each column, and positions (bags, dim): the row it comes from, the first
/// of equal ones; 0 and -1 for an empty bag. A NaN is the largest of all.
inline void MaxBags(const ParallelFor& parallel, const BagShape& shape, const float* rows, float* bags,
                    int32_t* positions) {
  std::fill_n(bags, shape.bags * shape.dim, 0.0f);
  std::fill_n(positions, shape.bags * shape.dim, -1);
  ForEachRow(parallel, shape, [&](size_t i, size_t bag) {
    const auto position = static_cast<int32_t>(i);
    const float* __restrict const row = rows + i * shape.dim;
    float* __restrict const out = bags + bag * shape.dim;
    int32_t* __restrict const from = positions + bag * shape.dim;
    for (size_t d = 0; d < shape.dim; ++d) {
      const bool wins = IsLargest(row[d], out[d], from[d]);
      out[d] = wins ? row[d] : out[d];
      from[d] = wins ? position : from[d];
    }
  });
}

/// The gradient of MaxBags by its rows: bags (bags, dim) go to the positions (bags, dim) in rows (n, dim),
/// which are 0 elsewhere. Bags share no positions, because a row belongs to one bag.
inline void PlaceBags(const ParallelFor& parallel, const BagShape& shape, const int32_t* positions,
                      const float* bags, float* rows) {
  parallel(shape.n, shape.Grain(), [&](size_t begin, size_t end) {
    std::fill_n(rows + begin * shape.dim, (end - begin) * shape.dim, 0.0f);
  });
  parallel(shape.bags, shape.Grain(), [&](size_t begin, size_t end) {
    for (size_t i = begin * shape.dim; i < end * shape.dim; ++i) {
      const int32_t p = positions[i];
      if (p < 0 || static_cast<size_t>(p) >= shape.n) continue;
      rows[static_cast<size_t>(p) * shape.dim + i % shape.dim] = bags[i];
    }
  });
}

/// ids (n,) of bags whose rows stand one after the other, lengths[b] of them for bag b; what is left of the n
/// rows is padding, -1. `table` is for errors.
inline void IdsOfLengths(std::string_view table, const int32_t* lengths, size_t bags, size_t n,
                         int32_t* ids) {
  size_t used = 0;
  for (size_t b = 0; b < bags; ++b) {
    if (lengths[b] < 0) throw LengthError(table, lengths[b], b);
    const auto length = static_cast<size_t>(lengths[b]);
    if (length > n - used) throw LengthsError(table, b, n);
    std::fill_n(ids + used, length, static_cast<int32_t>(b));
    used += length;
  }
  std::fill_n(ids + used, n - used, -1);
}

}  // namespace kvjax
