// Which keys of a call are equal: by a hash table that lives as long as the call, and, where their order
// matters, by sorting.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/cuda/atomic.h"
#include "kvjax/ffi/cuda/memory.h"

namespace kvjax::device {

/// Which keys of a call are meant: those whose flag is true, whose count is above zero, and that have no row,
/// as far as each of these is given.
struct Meant {
  const bool* mask = nullptr;
  const int32_t* counts = nullptr;
  const uint32_t* rows = nullptr;

  KVJAX_HD bool operator()(size_t i) const {
    return (mask == nullptr || mask[i]) && (counts == nullptr || counts[i] > 0) &&
           (rows == nullptr || rows[i] == 0xFFFFFFFFu);
  }
};

/// For n keys: first[i] and, unless it is null, last[i] are the places of the first and the last key equal to
/// keys[i], of those that are meant; i itself where keys[i] is not.
template <class Q>
void GroupKeys(Q& q, const uint64_t* keys, Meant meant, size_t n, uint32_t* first, uint32_t* last) {
  if (n == 0) return;
  constexpr uint32_t kFree = 0xFFFFFFFFu;
  const uint64_t mask = std::bit_ceil(2 * n) - 1;
  Scratch<Q, uint32_t> firsts(q, mask + 1), lasts(q, last != nullptr ? mask + 1 : 0), cells(q, n);
  uint32_t *const f = firsts.data(), *const l = last != nullptr ? lasts.data() : nullptr,
                  *const c = cells.data();
  q.Fill(f, 0xFF, (mask + 1) * sizeof(uint32_t));
  if (l != nullptr) q.Fill(l, 0, (mask + 1) * sizeof(uint32_t));
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!meant(i)) return;
    const auto me = static_cast<uint32_t>(i);
    const uint64_t key = keys[i];
    uint64_t cell = (Mix(key) >> 20) & mask;
    for (;; cell = (cell + 1) & mask) {
      uint32_t seen = Load(f[cell]);
      if (seen == kFree && Exchange(f[cell], seen, me)) break;
      if (keys[seen] != key) continue;
      Lower(f[cell], me);
      break;
    }
    if (l != nullptr) Raise(l[cell], me);
    c[i] = static_cast<uint32_t>(cell);
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool grouped = meant(i);
    first[i] = grouped ? f[c[i]] : static_cast<uint32_t>(i);
    if (l != nullptr) last[i] = grouped ? l[c[i]] : static_cast<uint32_t>(i);
  });
}

/// The distinct keys that are meant, numbered by first occurrence, with all places of each, in order.
template <class Q>
class Segments {
 public:
  struct View {
    const uint32_t* places;  // those of number u are places[begin[u]] .. places[end[u] - 1]
    const uint32_t* begin;
    const uint32_t* end;
    const uint32_t* distinct;  // how many numbers there are
  };

  Segments(Q& q, const uint64_t* keys, Meant meant, size_t n)
      : places_(q, n), begin_(q, n), end_(q, n), distinct_(q, 1) {
    Sort(q, keys, meant, n);  // nvcc wants no kernels in constructors
  }

  [[nodiscard]] View view() const { return {places_.data(), begin_.data(), end_.data(), distinct_.data()}; }

  void Sort(Q& q, const uint64_t* keys, Meant meant, size_t n) {
    q.Fill(distinct_.data(), 0, sizeof(uint32_t));
    if (n == 0) return;
    Scratch<Q, uint32_t> first(q, n), starts(q, n), numbers(q, n);
    GroupKeys(q, keys, meant, n, first.data(), nullptr);
    uint32_t *const group = first.data(), *const start = starts.data(), *const number = numbers.data();
    uint32_t *const place = places_.data(), *const begin = begin_.data(), *const end = end_.data();
    uint32_t* const distinct = distinct_.data();
    const auto none = static_cast<uint32_t>(n);
    q.Each(n, [=] KVJAX_HD(size_t i) {
      const bool is_meant = meant(i);
      start[i] = is_meant && group[i] == i ? 1 : 0;
      if (!is_meant) group[i] = none;
      place[i] = static_cast<uint32_t>(i);
    });
    q.ExclusiveSum(start, number, n);
    q.Once([=] KVJAX_HD() { *distinct = number[n - 1] + start[n - 1]; });
    q.SortPairs(group, place, n, std::bit_width(n));
    q.Each(n, [=] KVJAX_HD(size_t j) {
      if (group[j] == none) return;
      const uint32_t u = number[group[j]];
      if (j == 0 || group[j - 1] != group[j]) begin[u] = static_cast<uint32_t>(j);
      if (j + 1 == n || group[j + 1] != group[j]) end[u] = static_cast<uint32_t>(j + 1);
    });
  }

 private:
  Scratch<Q, uint32_t> places_, begin_, end_, distinct_;
};

/// Sums the rows of equal keys; see MergeRows in core/merge.h, whose results have the same bits.
template <class Q>
void MergeGradients(Q& q, const uint64_t* keys, const float* rows, const int32_t* counts, size_t n,
                    size_t dim, uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
  const Segments<Q> segments(q, keys, {.counts = counts}, n);
  const auto of = segments.view();
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t lane_number) {
    const size_t base = lane_number - tile.rank();
    for (size_t u = base; u < base + tile.size() && u < n; ++u) {  // the lanes share each row
      float* const target = out_rows + u * dim;
      if (u >= *of.distinct) {
        for (size_t d = tile.rank(); d < dim; d += tile.size()) target[d] = 0.0f;
        if (tile.rank() == 0) out_keys[u] = 0, out_counts[u] = 0;
        continue;
      }
      const uint32_t begin = of.begin[u], end = of.end[u];
      for (size_t d = tile.rank(); d < dim; d += tile.size()) {
        float sum = rows[of.places[begin] * dim + d];
        for (uint32_t j = begin + 1; j < end; ++j) sum += rows[of.places[j] * dim + d];
        target[d] = sum;
      }
      if (tile.rank() == 0) {
        int64_t count = 0;
        for (uint32_t j = begin; j < end; ++j) count += counts[of.places[j]];
        out_keys[u] = keys[of.places[begin]];
        out_counts[u] = static_cast<int32_t>(count < INT32_MAX ? count : INT32_MAX);
      }
    }
  });
}

}  // namespace kvjax::device
