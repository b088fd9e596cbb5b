// Routing on the device: the rules and the results of core/route.h.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/read_kernels.h"

namespace kvjax::device {

/// The shards of the keys of a call: by a partitioner, or nullptr for those of virtual buckets.
struct OwnersView {
  const int32_t* given;
  uint32_t shards;

  [[nodiscard]] KVJAX_HD bool Known(size_t i) const {
    return given == nullptr || (given[i] >= 0 && static_cast<uint32_t>(given[i]) < shards);
  }
  /// `shards` where a partitioner has said something else than a shard.
  [[nodiscard]] KVJAX_HD uint32_t operator()(uint64_t key, size_t i) const {
    if (given == nullptr) return OwnerOf(key, shards);
    return Known(i) ? static_cast<uint32_t>(given[i]) : shards;
  }
};

/// The position of the first key that is valid and whose shard is none; n if there is none.
template <class Q>
void FindUnowned(Q& q, OwnersView owner, Valid valid, size_t n, uint32_t* position) {
  q.Once([=] KVJAX_HD() { *position = static_cast<uint32_t>(n); });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (valid(i) && !owner.Known(i)) Lower(*position, static_cast<uint32_t>(i));
  });
}

/// Which of n keys the shard owns.
template <class Q>
void MarkOwned(Q& q, const uint64_t* keys, OwnersView owner, uint32_t shard, size_t n, bool* owned) {
  q.Each(n, [=] KVJAX_HD(size_t i) { owned[i] = owner(keys[i], i) == shard; });
}

/// Sorts a batch by owner; see Routed.
template <class Q>
void RouteKeys(Q& q, const uint64_t* keys, Valid valid, OwnersView of, size_t n, int32_t capacity,
               Routed out) {
  Scratch<Q, uint32_t> firsts(q, n), numbers(q, n + 1), owners(q, n), positions(q, n), sorted(q, n);
  uint32_t *const first = firsts.data(), *const number = numbers.data(), *const distinct = number + n;
  uint32_t *const owner = owners.data(), *const position = positions.data(), *const at = sorted.data();
  NumberKeys(q, keys, valid, n, first, number);
  q.Each(n, [=] KVJAX_HD(size_t u) {
    if (u < *distinct) return;
    owner[u] = of.shards;  // behind all others
    position[u] = 0;
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (!valid(i) || first[i] != i) return;
    owner[number[i]] = of(keys[i], i);
    position[number[i]] = static_cast<uint32_t>(i);
  });
  if (n > 0) q.SortPairs(owner, position, n, std::bit_width(of.shards));
  q.Each(size_t{of.shards} + 1, [=] KVJAX_HD(size_t s) {
    size_t begin = 0, end = n;
    while (begin < end) {
      const size_t middle = begin + (end - begin) / 2;
      if (owner[middle] < s) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    out.starts[s] = static_cast<int32_t>(begin);
  });
  q.Each(n, [=] KVJAX_HD(size_t j) {
    const bool used = j < *distinct;
    out.keys[j] = used ? keys[position[j]] : 0;
    out.order[j] = used ? static_cast<int32_t>(position[j]) : 0;
    if (used) at[position[j]] = static_cast<uint32_t>(j);
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    out.position[i] = 0;
    out.round[i] = -1;
    if (!valid(i)) return;
    const uint32_t j = at[first[i]], to = owner[j];
    if (to >= of.shards) return;
    const int32_t nth = static_cast<int32_t>(j) - out.starts[to];
    out.position[i] = static_cast<int32_t>(to) * capacity + nth % capacity;
    out.round[i] = nth / capacity;
  });
}

}  // namespace kvjax::device
