// Groups of equal keys in a call: by a hash table that lives as long as the call, and, where their order
// matters, by sorting.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/secret.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// Which keys of a call are valid: those whose flag is true, whose count is above zero, and that have no row,
/// as far as each of these is given.
struct Valid {
  const bool* mask = nullptr;
  const int32_t* counts = nullptr;
  const uint32_t* rows = nullptr;

  KVJAX_HD bool operator()(size_t i) const {
    return (mask == nullptr || mask[i]) && (counts == nullptr || counts[i] > 0) &&
           (rows == nullptr || rows[i] == 0xFFFFFFFFu);
  }
};

/// first: (n,) the position of the first key equal to keys[i], of those that are valid; i itself where
/// keys[i] is not. is_first, unless it is null: (n,) 1 for the first of equal keys that are valid, 0 for the
/// others.
template <class Q>
void GroupKeys(Q& q, const uint64_t* keys, Valid valid, size_t n, uint32_t* first,
               uint32_t* is_first = nullptr) {
  if (n == 0) return;
  constexpr uint32_t kFree = 0xFFFFFFFFu;
  const uint64_t mask = std::bit_ceil(2 * n) - 1, secret = Secret();
  const Scratch<Q, uint32_t> firsts(q, mask + 1), cells(q, n);
  uint32_t *const f = firsts.data(), *const c = cells.data();
  q.Fill(f, 0xFF, (mask + 1) * sizeof(uint32_t));
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!valid(i)) return;
    const auto me = static_cast<uint32_t>(i);
    const uint64_t key = keys[i];
    uint64_t cell = (PlaceHash(key, secret) >> 20) & mask;
    for (;; cell = (cell + 1) & mask) {
      uint32_t seen = Load(f[cell]);
      if (seen == kFree && Exchange(f[cell], seen, me)) break;
      if (keys[seen] != key) continue;
      Lower(f[cell], me);
      break;
    }
    c[i] = static_cast<uint32_t>(cell);
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool grouped = valid(i);
    const auto me = static_cast<uint32_t>(i);
    const uint32_t leader = grouped ? f[c[i]] : me;
    first[i] = leader;
    if (is_first != nullptr) is_first[i] = grouped && leader == me ? 1 : 0;
  });
}

/// The same of keys that all differ.
template <class Q>
void NumberPositions(Q& q, uint32_t* first, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) { first[i] = static_cast<uint32_t>(i); });
}

/// The distinct ones of n keys that are valid, numbered by first occurrence: number[first[i]] is that of
/// keys[i], and number[n] is how many there are.
template <class Q>
void NumberKeys(Q& q, const uint64_t* keys, Valid valid, size_t n, uint32_t* first, uint32_t* number) {
  if (n == 0) return q.Fill(number, 0, sizeof(uint32_t));
  GroupKeys(q, keys, valid, n, first, number);
  q.ExclusiveSum(number, number, n + 1);  // what stands at n before counts for nothing
}

/// The distinct keys that are valid, numbered by first occurrence, with all positions of each, in order.
template <class Q>
class Segments {
 public:
  struct View {
    const uint32_t* positions;  // those of number u are positions[begin[u]] .. positions[end[u] - 1]
    const uint32_t* begin;
    const uint32_t* end;
    const uint32_t* numbers;   // (n,) u of each of the positions; what is not valid stands behind them all
    const uint32_t* distinct;  // how many numbers there are
  };

  Segments(Q& q, const uint64_t* keys, Valid valid, size_t n)
      : n_(n), positions_(q, n), begin_(q, n), end_(q, n), numbers_(q, n), by_first_(q, n + 1) {
    Sort(q, keys, valid);  // nvcc wants no kernels in constructors
  }

  [[nodiscard]] View view() const {
    return {positions_.data(), begin_.data(), end_.data(), numbers_.data(), by_first_.data() + n_};
  }

  void Sort(Q& q, const uint64_t* keys, Valid valid) {
    const Scratch<Q, uint32_t> firsts(q, n_);
    NumberKeys(q, keys, valid, n_, firsts.data(), by_first_.data());
    if (n_ == 0) return;
    const size_t n = n_;
    const uint32_t *const first = firsts.data(), *const by_first = by_first_.data();
    uint32_t *const position = positions_.data(), *const number = numbers_.data();
    uint32_t *const begin = begin_.data(), *const end = end_.data();
    q.Each(n, [=] KVJAX_HD(size_t i) {
      number[i] = by_first[valid(i) ? first[i] : n];
      position[i] = static_cast<uint32_t>(i);
    });
    q.SortPairs(number, position, n, std::bit_width(n == 1 ? 1 : n - 1));
    q.Each(n, [=] KVJAX_HD(size_t j) {
      const uint32_t u = number[j];
      if (u >= by_first[n]) return;
      if (j == 0 || number[j - 1] != u) begin[u] = static_cast<uint32_t>(j);
      if (j + 1 == n || number[j + 1] != u) end[u] = static_cast<uint32_t>(j + 1);
    });
  }

 private:
  size_t n_;
  Scratch<Q, uint32_t> positions_, begin_, end_, numbers_, by_first_;
};

}  // namespace kvjax::device
