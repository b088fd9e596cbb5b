// Bags on the device: rows combined by sum or maximum. Results have the bits of those in core/bag.h: a lane
// has one column of a bag to itself and adds in the same order.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/bag.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// The rows of each bag, in order. They are sorted also where they stand so already: the host cannot know
/// without waiting, and the ids are few bytes beside the rows.
template <class Q>
class BagPositions {
 public:
  struct View {
    const uint32_t* positions;  // those of bag b are positions[begin[b]] .. positions[end[b] - 1]
    const uint32_t* begin;
    const uint32_t* end;
  };

  BagPositions(Q& q, const BagShape& shape)
      : positions_(q, shape.n), begin_(q, shape.bags), end_(q, shape.bags) {
    Sort(q, shape);  // nvcc wants no kernels in constructors
  }

  [[nodiscard]] View view() const { return {positions_.data(), begin_.data(), end_.data()}; }

  void Sort(Q& q, const BagShape& shape) {
    if (shape.bags == 0) return;  // there are no bits to sort by
    Scratch<Q, uint32_t> ids(q, shape.n);
    uint32_t *const id = ids.data(), *const position = positions_.data();
    uint32_t *const begin = begin_.data(), *const end = end_.data();
    const auto none = static_cast<uint32_t>(shape.bags);
    q.Fill(begin, 0, shape.bags * sizeof(uint32_t));
    q.Fill(end, 0, shape.bags * sizeof(uint32_t));
    q.Each(shape.n, [=] KVJAX_HD(size_t i) {
      id[i] = shape.IsPadding(i) ? none : static_cast<uint32_t>(shape.ids[i]);
      position[i] = static_cast<uint32_t>(i);
    });
    q.SortPairs(id, position, shape.n, std::bit_width(none));
    q.Each(shape.n, [=] KVJAX_HD(size_t j) {
      const uint32_t bag = id[j];
      if (bag == none) return;
      if (j == 0 || id[j - 1] != bag) begin[bag] = static_cast<uint32_t>(j);
      if (j + 1 == shape.n || id[j + 1] != bag) end[bag] = static_cast<uint32_t>(j + 1);
    });
  }

 private:
  Scratch<Q, uint32_t> positions_, begin_, end_;
};

/// See SumBags in core/bag.h; so below.
template <class Q>
void SumBags(Q& q, const BagShape& shape, const float* weights, const float* rows, float* bags) {
  const BagPositions<Q> sorted(q, shape);
  const auto of = sorted.view();
  q.Each(shape.bags * shape.dim, [=] KVJAX_HD(size_t j) {
    const size_t bag = j / shape.dim, d = j % shape.dim;
    float sum = 0.0f;
    for (uint32_t k = of.begin[bag]; k < of.end[bag]; ++k) {
      const size_t i = of.positions[k];
      sum += weights[i] * rows[i * shape.dim + d];
    }
    bags[j] = sum;
  });
}

template <class Q>
void ExpandBags(Q& q, const BagShape& shape, const float* weights, const float* bags, float* rows) {
  q.Each(shape.n * shape.dim, [=] KVJAX_HD(size_t j) {
    const size_t i = j / shape.dim, d = j % shape.dim;
    rows[j] =
        shape.IsPadding(i) ? 0.0f : weights[i] * bags[static_cast<size_t>(shape.ids[i]) * shape.dim + d];
  });
}

/// The lanes of a tile share the partial sums of each row.
template <class Q>
void DotBags(Q& q, const BagShape& shape, const float* rows, const float* bags, float* weights) {
  q.Tiles(shape.n, [=] KVJAX_HD(typename Q::Tile tile, size_t lane_number) {
    const size_t base = lane_number - tile.rank();
    for (size_t i = base; i < base + tile.size() && i < shape.n; ++i) {
      float mine[kDotLanes / Q::Tile::size()] = {};
      if (!shape.IsPadding(i)) {
        const float* const row = rows + i * shape.dim;
        const float* const bag = bags + static_cast<size_t>(shape.ids[i]) * shape.dim;
        for (int m = 0; m < kDotLanes / tile.size(); ++m) {
          for (size_t d = m * tile.size() + tile.rank(); d < shape.dim; d += kDotLanes)
            mine[m] += row[d] * bag[d];
        }
      }
      float sum = 0.0f;
      for (int l = 0; l < kDotLanes; ++l) sum += tile.Shuffle(mine[l / tile.size()], l % tile.size());
      if (tile.rank() == 0) weights[i] = sum;
    }
  });
}

template <class Q>
void MaxBags(Q& q, const BagShape& shape, const float* rows, float* bags, int32_t* positions) {
  const BagPositions<Q> sorted(q, shape);
  const auto of = sorted.view();
  q.Each(shape.bags * shape.dim, [=] KVJAX_HD(size_t j) {
    const size_t bag = j / shape.dim, d = j % shape.dim;
    float largest = 0.0f;
    int32_t from = -1;
    for (uint32_t k = of.begin[bag]; k < of.end[bag]; ++k) {
      const size_t i = of.positions[k];
      const float x = rows[i * shape.dim + d];
      if (IsLargest(x, largest, from)) largest = x, from = static_cast<int32_t>(i);
    }
    bags[j] = largest;
    positions[j] = from;
  });
}

template <class Q>
void PlaceBags(Q& q, const BagShape& shape, const int32_t* positions, const float* bags, float* rows) {
  q.Fill(rows, 0, shape.n * shape.dim * sizeof(float));
  q.Each(shape.bags * shape.dim, [=] KVJAX_HD(size_t j) {
    const int32_t p = positions[j];
    if (p < 0 || static_cast<size_t>(p) >= shape.n) return;
    rows[static_cast<size_t>(p) * shape.dim + j % shape.dim] = bags[j];
  });
}

/// The bag of position i, or -1.
KVJAX_HD inline int32_t BagOf(const uint32_t* begin, const int32_t* lengths, size_t bags, size_t i) {
  size_t low = 0;
  for (size_t high = bags; low < high;) {  // which is the first bag that begins behind i?
    const size_t middle = (low + high) / 2;
    if (begin[middle] <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || i - begin[low - 1] >= static_cast<size_t>(lengths[low - 1])) return -1;
  return static_cast<int32_t>(low - 1);
}

/// Lengths that do not fit are refused in the name of `call`, if it has a table, and all positions become
/// padding.
template <class Q>
void IdsOfLengths(Q& q, CallView call, const int32_t* lengths, size_t bags, size_t n, int32_t* ids) {
  constexpr uint32_t kNone = 0xFFFFFFFFu;
  Scratch<Q, uint32_t> begins(q, bags), bads(q, 1);
  uint32_t *const begin = begins.data(), *const bad = bads.data();
  // Sums are exact up to the first bag that does not fit, and none behind it matter.
  q.ExclusiveSum(reinterpret_cast<const uint32_t*>(lengths), begin, bags);
  q.Fill(bad, 0xFF, sizeof(uint32_t));
  q.Each(bags, [=] KVJAX_HD(size_t b) {
    const bool fits = lengths[b] >= 0 && uint64_t{begin[b]} + static_cast<uint64_t>(lengths[b]) <= n;
    if (!fits) Lower(*bad, static_cast<uint32_t>(b));
  });
  q.Once([=] KVJAX_HD() {
    const uint32_t b = *bad;
    if (b == kNone || call.report == nullptr) return;
    if (lengths[b] < 0) {
      call.Refuse(Refusal::kLength, static_cast<uint32_t>(lengths[b]), b);
    } else {
      call.Refuse(Refusal::kLengths, b, static_cast<uint32_t>(n));
    }
  });
  q.Each(n, [=] KVJAX_HD(size_t i) { ids[i] = *bad == kNone ? BagOf(begin, lengths, bags, i) : -1; });
}

}  // namespace kvjax::device
