// Routing: the owner of each key, and a batch sorted by owner.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/spec.h"

namespace kvjax {

/// Shard i of n owns the contiguous virtual buckets b with b * n / kNumBuckets == i.
constexpr uint32_t OwnerOf(uint64_t key, uint32_t shards) {
  return static_cast<uint32_t>(uint64_t{BucketOf(key)} * shards / kNumBuckets);
}

/// A partitioner's answer, checked.
inline uint32_t CheckOwner(std::string_view table, uint64_t key, int32_t owner, uint32_t shards) {
  if (owner >= 0 && static_cast<uint32_t>(owner) < shards) return static_cast<uint32_t>(owner);
  throw OwnerError(table, key, owner, shards);
}

/// Which of n keys the shard owns; owners: (n,) by a partitioner, or nullptr for those of virtual buckets.
inline void Owned(std::string_view table, KeySpan keys, const int32_t* owners, uint32_t shards,
                  uint32_t shard, bool* owned) {
  for (size_t i = 0; i < keys.n; ++i) {
    const uint64_t key = keys.data[i];
    owned[i] =
        shard == (owners == nullptr ? OwnerOf(key, shards) : CheckOwner(table, key, owners[i], shards));
  }
}

/// A batch by owner: its distinct keys, those of one owner in the order of their first occurrence. They
/// travel in rounds, of which each takes up to `capacity` keys to each owner.
struct Routed {
  uint64_t* keys;     // (n,), what is behind the distinct ones is 0
  int32_t* order;     // (n,) where each of them first occurs
  int32_t* starts;    // (shards + 1,) where the keys of each owner begin
  int32_t* position;  // (n,) owner * capacity + number in the round, of each key of the batch
  int32_t* round;     // (n,) its round; -1 where the mask is false
};

/// owners: as above; mask: (n,) or nullptr.
inline void Route(std::string_view table, KeySpan keys, const bool* mask, const int32_t* owners,
                  uint32_t shards, int32_t capacity, Routed out) {
  KeyNumbering numbering(keys.n);
  std::vector<int32_t> first;
  first.reserve(keys.n);
  for (size_t i = 0; i < keys.n; ++i) {
    if (mask != nullptr && !mask[i]) {
      out.round[i] = -1;
      continue;
    }
    const uint32_t number = numbering.Add(keys.data[i]);
    if (number == first.size()) first.push_back(static_cast<int32_t>(i));
    out.round[i] = static_cast<int32_t>(number);
  }
  const size_t n = first.size();
  std::vector<uint32_t> owner(n);
  std::fill_n(out.starts, shards + 1, 0);
  for (size_t u = 0; u < n; ++u) {
    const uint64_t key = numbering.keys()[u];
    owner[u] = owners == nullptr ? OwnerOf(key, shards) : CheckOwner(table, key, owners[first[u]], shards);
    ++out.starts[owner[u] + 1];
  }
  for (uint32_t s = 0; s < shards; ++s) out.starts[s + 1] += out.starts[s];
  std::vector<int32_t> next(out.starts, out.starts + shards), moved(n);
  for (size_t u = 0; u < n; ++u) {
    moved[u] = next[owner[u]]++;
    out.keys[moved[u]] = numbering.keys()[u];
    out.order[moved[u]] = first[u];
  }
  for (size_t i = 0; i < keys.n; ++i) {
    out.position[i] = 0;
    if (out.round[i] < 0) continue;
    const auto u = static_cast<size_t>(out.round[i]);
    const int32_t nth = moved[u] - out.starts[owner[u]];
    out.position[i] = static_cast<int32_t>(owner[u]) * capacity + nth % capacity;
    out.round[i] = nth / capacity;
  }
  std::fill(out.keys + n, out.keys + keys.n, uint64_t{0});
  std::fill(out.order + n, out.order + keys.n, 0);
}

/// The keys of a call that are valid, and the rows that belong to them.
class Selected {
 public:
  Selected(KeySpan keys, const bool* mask) : span_(keys), all_(mask == nullptr) {
    if (all_) return;
    for (size_t i = 0; i < keys.n; ++i) {
      if (mask[i]) at_.push_back(i), keys_.push_back(keys.data[i]);
    }
    span_ = {keys_.data(), keys_.size(), keys.narrow};
  }
  [[nodiscard]] KeySpan keys() const { return span_; }

  /// Of rows (n, width) those of the keys; `copy` holds them if they are not all.
  template <class T>
  const T* Rows(const T* rows, size_t width, std::vector<T>& copy) const {
    if (all_) return rows;
    copy.resize(at_.size() * width + 1);  // + 1: never null
    for (size_t j = 0; j < at_.size(); ++j)
      std::copy_n(rows + at_[j] * width, width, copy.data() + j * width);
    return copy.data();
  }

 private:
  KeySpan span_;
  bool all_;
  std::vector<size_t> at_;
  std::vector<uint64_t> keys_;
};

}  // namespace kvjax
