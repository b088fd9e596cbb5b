// The row that unadmitted keys share: it is looked for with the keys of a call, and trained with the sum of
// the gradients that have no row of their own.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/device/admit.h"
#include "kvjax/ffi/device/groups.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/training_kernels.h"

namespace kvjax::device {

/// Copies n keys, and whether they are valid; behind them comes one more, which is.
template <class Q>
void AppendKey(Q& q, const uint64_t* keys, Valid valid, size_t n, uint64_t key, uint64_t* out, bool* flags) {
  q.Each(n + 1, [=] KVJAX_HD(size_t i) {
    out[i] = i < n ? keys[i] : key;
    flags[i] = i < n ? valid(i) : true;
  });
}

/// The keys of a call, and behind them the one whose row others share, if there is one.
template <class Q>
class WithShared {
 public:
  WithShared(Q& q, const AdmissionSpec& spec, KeySpan keys, Valid valid)
      : keys_(q, spec.shares() ? keys.n + 1 : 0),
        flags_(q, spec.shares() ? keys.n + 1 : 0),
        all_(keys),
        valid_(valid) {
    if (!spec.shares()) return;
    AppendKey(q, keys.data, valid, keys.n, spec.shared_key, keys_.data(), flags_.data());
    all_ = {keys_.data(), keys.n + 1, keys.narrow};
    valid_ = {.mask = flags_.data()};
  }

  [[nodiscard]] KeySpan keys() const { return all_; }
  [[nodiscard]] Valid valid() const { return valid_; }

 private:
  Scratch<Q, uint64_t> keys_;
  Scratch<Q, bool> flags_;
  KeySpan all_;
  Valid valid_;
};

/// Finds the gradients that make up the shared gradient, and whether the shared row is to be made for them:
/// verdict[n] is about it.
template <class Q>
void FindUnadmitted(Q& q, CallView call, IndexView rows, GradientsView g, uint64_t shared_key,
                    const uint32_t* first, uint8_t* verdict, uint32_t* in_sum, Unadmitted* unadmitted) {
  const size_t n = g.n;
  q.Fill(unadmitted, 0, sizeof(Unadmitted));
  q.Once([=] KVJAX_HD() { unadmitted->position = kNoRow; });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool refused = verdict[i] == Decision<Q>::kRefused;
    const bool summed = refused || (i < call.control->active && g.keys[i] == shared_key);
    in_sum[i] = summed ? 1 : 0;
    if (refused) Lower(unadmitted->position, static_cast<uint32_t>(i));
    if (summed) unadmitted->occurrences.Add(i, static_cast<uint64_t>(g.counts[i]));
  });
  q.Once([=] KVJAX_HD() {
    const bool enters = unadmitted->position != kNoRow && first[n] == n && rows.Find(shared_key) == kNoRow;
    unadmitted->entering = enters ? 1 : 0;
    verdict[n] = enters ? Decision<Q>::kAdmitted : Decision<Q>::kRefused;
  });
}

/// Sums these gradients in the order of their keys' hashes, so that the sum does not depend on how the batch
/// was made: blocks of gradients first, then these. order, in_sum, hashes: (n,); blocks: (ceil(n /
/// kSumBlock), dim); shared_gradient: (dim,).
template <class Q>
void SumUnadmitted(Q& q, GradientsView g, size_t dim, uint64_t* hashes, uint32_t* order, uint32_t* in_sum,
                   Unadmitted* unadmitted, double* blocks, float* shared_gradient) {
  const size_t n = g.n;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    hashes[i] = Mix(g.keys[i]);
    order[i] = static_cast<uint32_t>(i);
  });
  q.SortPairs(hashes, order, n, 64);
  q.Each(n, [=] KVJAX_HD(size_t j) { hashes[j] = 1 - in_sum[order[j]]; });
  q.SortPairs(hashes, order, n, 1);
  q.Each(n, [=] KVJAX_HD(size_t j) {
    if (hashes[j] == 0 && (j + 1 == n || hashes[j + 1] != 0)) unadmitted->size = static_cast<uint32_t>(j + 1);
  });
  q.Each((n + kSumBlock - 1) / kSumBlock * dim, [=] KVJAX_HD(size_t k) {
    const size_t begin = k / dim * kSumBlock,
                 end = begin + kSumBlock < unadmitted->size ? begin + kSumBlock : unadmitted->size;
    double sum = 0.0;
    for (size_t j = begin; j < end; ++j) sum += static_cast<double>(g.rows[order[j] * dim + k % dim]);
    blocks[k] = sum;
  });
  q.Each(dim, [=] KVJAX_HD(size_t d) {
    double sum = 0.0;
    for (size_t block = 0; block * kSumBlock < unadmitted->size; ++block) sum += blocks[block * dim + d];
    shared_gradient[d] = unadmitted->position == kNoRow ? 0.0f : static_cast<float>(sum);
  });
}

/// Scratch for that; nothing without a shared row.
template <class Q>
struct UnadmittedScratch {
  UnadmittedScratch(Q& q, bool shares, size_t n, size_t dim)
      : unadmitted(q, shares ? 1 : 0),
        hashes(q, shares ? n : 0),
        order(q, shares ? n : 0),
        in_sum(q, shares ? n : 0),
        blocks(q, shares ? (n + kSumBlock - 1) / kSumBlock * dim : 0) {}

  Scratch<Q, Unadmitted> unadmitted;
  Scratch<Q, uint64_t> hashes;
  Scratch<Q, uint32_t> order, in_sum;
  Scratch<Q, double> blocks;
};

}  // namespace kvjax::device
