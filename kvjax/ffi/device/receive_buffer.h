// The training write that a shard is in the middle of, in device memory: gradients arrive from other devices
// in rounds, those of equal keys are summed, and then the step is one of distinct keys like any other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/slab.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/plane.h"
#include "kvjax/ffi/device/read_kernels.h"

namespace kvjax::device {

/// Memory of at least n elements, kept from one call to the next.
template <class Q, class T>
void Grow(Q& q, Array<Q, T>& array, size_t n) {
  if (array.data() != nullptr && array.size() >= n) return;
  Array<Q, T> next(q, n);
  std::swap(array, next);
  next.Retire(q);
}

/// The gradients of some keys, of which those with a count of 0 are padding.
struct GradientArraysView {
  uint64_t* keys;
  int32_t* counts;
  float* rows;
};
template <class Q>
struct GradientArrays {
  void Reserve(Q& q, size_t n, size_t dim) {
    Grow(q, keys, n);
    Grow(q, counts, n);
    Grow(q, rows, n * dim);
  }
  [[nodiscard]] GradientArraysView view() const { return {keys.data(), counts.data(), rows.data()}; }

  Array<Q, uint64_t> keys;
  Array<Q, int32_t> counts;
  Array<Q, float> rows;
};

/// In which order gradients are summed: that of the senders, whatever the rounds.
struct Positions {
  size_t senders, rounds, each;  // `each` sender's share of a round

  [[nodiscard]] KVJAX_HD size_t size() const { return senders * rounds * each; }
  /// Of the i-th gradient of a round.
  [[nodiscard]] KVJAX_HD size_t operator()(size_t round, size_t i) const {
    return (i / each * rounds + round) * each + i % each;
  }
};

/// Puts the gradients of a round, (senders, each) of `from`, where they belong.
template <class Q>
void PutRound(Q& q, Positions positions, size_t round, const uint64_t* keys, const int32_t* counts,
              const float* rows, size_t dim, GradientArraysView to) {
  const size_t n = positions.senders * positions.each;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const size_t k = positions(round, i);
    to.keys[k] = keys[i];
    to.counts[k] = counts[i];
  });
  q.Each(n * dim, [=] KVJAX_HD(size_t j) { to.rows[positions(round, j / dim) * dim + j % dim] = rows[j]; });
}

/// Remembers initial rows (m, bytes), which are those of the keys of a round that have no row (rows[i] is
/// kNoRow), numbered by first occurrence.
template <class Q>
void PutGiven(Q& q, Positions positions, size_t round, Valid missing, const uint32_t* first,
              const uint32_t* number, const std::byte* initial, size_t given, size_t bytes, std::byte* to) {
  q.Each(positions.senders * positions.each * bytes, [=] KVJAX_HD(size_t j) {
    const size_t i = j / bytes;
    if (!missing(i) || number[first[i]] >= given) return;
    to[positions(round, i) * bytes + j % bytes] = initial[number[first[i]] * bytes + j % bytes];
  });
}

/// Where each of the distinct keys first occurs: origin[u] of the key number u.
template <class Q>
void FindOrigins(Q& q, Valid valid, const uint32_t* first, const uint32_t* number, size_t n,
                 uint32_t* origin) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (valid(i) && first[i] == i) origin[number[i]] = static_cast<uint32_t>(i);
  });
}

/// The remembered rows of n distinct keys that have none, as a call brings them.
template <class Q>
void TakeGiven(Q& q, Valid missing, const uint32_t* number, const uint32_t* origin, const std::byte* given,
               size_t bytes, size_t n, std::byte* out) {
  q.Each(n * bytes, [=] KVJAX_HD(size_t j) {
    const size_t u = j / bytes;
    if (missing(u)) out[number[u] * bytes + j % bytes] = given[size_t{origin[u]} * bytes + j % bytes];
  });
}

/// How many of n merged gradients there are before the padding.
template <class Q>
void CountMerged(Q& q, const int32_t* counts, size_t n, uint32_t* total) {
  q.Fill(total, 0, sizeof(uint32_t));
  q.Each(n, [=] KVJAX_HD(size_t u) {
    if (counts[u] > 0 && (u + 1 == n || counts[u + 1] <= 0)) *total = static_cast<uint32_t>(u + 1);
  });
}

/// Gradients as they arrive.
template <class Q>
class ReceiveBuffer {
 public:
  [[nodiscard]] const Positions& positions() const { return positions_; }
  [[nodiscard]] GradientArraysView merged() const { return merged_.view(); }
  /// Whether all rounds have come.
  [[nodiscard]] bool complete() const { return complete_; }

  /// Forgets what has arrived.
  void Forget() {
    positions_ = {};
    complete_ = false;
  }
  /// For another step. `given` bytes of an initial row come with each gradient, or none.
  void Open(Q& q, Positions positions, size_t dim, size_t given) {
    merged_.Reserve(q, positions.size(), dim);
    if (positions.rounds > 1) rounds_.Reserve(q, positions.size(), dim);
    if (given > 0) {
      Grow(q, given_, positions.size() * given);
      Grow(q, origins_, positions.size());
    }
    positions_ = positions;
  }

  /// A round; the only one is summed where it is.
  void Add(Q& q, size_t round, const uint64_t* keys, const int32_t* counts, const float* rows, size_t dim,
           bool given) {
    if (positions_.rounds == 1) return Merge(q, keys, counts, rows, dim, given);
    PutRound(q, positions_, round, keys, counts, rows, dim, rounds_.view());
    if (round + 1 < positions_.rounds) return;
    const GradientArraysView all = rounds_.view();
    Merge(q, all.keys, all.counts, all.rows, dim, given);
  }
  [[nodiscard]] std::byte* given() const { return given_.data(); }
  [[nodiscard]] const uint32_t* origins() const { return origins_.data(); }

 private:
  void Merge(Q& q, const uint64_t* keys, const int32_t* counts, const float* rows, size_t dim, bool given) {
    const size_t n = positions_.size();
    const GradientArraysView to = merged_.view();
    MergeGradients(q, keys, rows, counts, n, dim, to.keys, to.rows, to.counts);
    complete_ = true;
    if (!given) return;
    Scratch<Q, uint32_t> first(q, n), number(q, n + 1);
    NumberKeys(q, keys, {.counts = counts}, n, first.data(), number.data());
    FindOrigins(q, {.counts = counts}, first.data(), number.data(), n, origins_.data());
  }

  Positions positions_ = {};
  bool complete_ = false;
  GradientArrays<Q> rounds_, merged_;
  Array<Q, std::byte> given_;
  Array<Q, uint32_t> origins_;
};

/// The step between the calls that deliver, plan and commit it. What XLA updates is staged until the last of
/// these, so that nobody sees any of it before.
template <class Q>
struct ShardStep {
  ReceiveBuffer<Q> received;
  bool narrow = false;
  uint32_t version = 0;  // for which it was received
  bool ready = false;    // to be committed
  bool open = false;     // its rows have been read, and come back in chunks
  SlotLayout layout;
  std::optional<Plane<Q>> new_slots;  // which the step brings
  std::optional<Program> program;     // of the update, if it is one
  Array<Q, uint64_t> shared;          // its shared registers
  size_t n = 0;                       // keys
  Array<Q, uint32_t> step;
  bool wants_facts = false;
  Array<Q, RowFacts> facts;           // (n,) of an update that is no program, as the others
  Array<Q, std::byte> values, slots;  // (n, dim), and of each slot (n, its bytes), one behind the other
  Array<Q, bool> fresh;

  /// Where those of each slot are.
  template <class Pointer>
  [[nodiscard]] std::vector<Pointer> SlotArrays() const {
    std::vector<Pointer> arrays;
    for (const Slot& slot : layout.slots()) arrays.push_back(slots.data() + n * slot.offset);
    return arrays;
  }
};

}  // namespace kvjax::device
