// The row that keys without one share: it is looked for with the keys of a call, and trained with the sum of
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

/// Copies n keys, and whether they are meant; behind them comes one more, which is.
template <class Q>
void AppendKey(Q& q, const uint64_t* keys, Meant meant, size_t n, uint64_t key, uint64_t* out, bool* flags) {
  q.Each(n + 1, [=] KVJAX_HD(size_t i) {
    out[i] = i < n ? keys[i] : key;
    flags[i] = i < n ? meant(i) : true;
  });
}

/// The keys of a call, and behind them the one whose row others share, if there is one.
template <class Q>
class WithShared {
 public:
  WithShared(Q& q, const AdmissionSpec& spec, KeySpan keys, Meant meant)
      : keys_(q, spec.shares() ? keys.n + 1 : 0),
        flags_(q, spec.shares() ? keys.n + 1 : 0),
        all_(keys),
        meant_(meant) {
    if (!spec.shares()) return;
    AppendKey(q, keys.data, meant, keys.n, spec.shared_key, keys_.data(), flags_.data());
    all_ = {keys_.data(), keys.n + 1, keys.narrow};
    meant_ = {.mask = flags_.data()};
  }

  [[nodiscard]] KeySpan keys() const { return all_; }
  [[nodiscard]] Meant meant() const { return meant_; }

 private:
  Scratch<Q, uint64_t> keys_;
  Scratch<Q, bool> flags_;
  KeySpan all_;
  Meant meant_;
};

/// Finds the gradients that are pooled, and whether the shared row is to be made for them: verdict[n] is
/// about it.
template <class Q>
void FindPool(Q& q, CallView call, IndexView rows, GradientsView g, uint64_t shared_key,
              const uint32_t* first, uint8_t* verdict, uint32_t* in_pool, Pool* pool) {
  const size_t n = g.n;
  q.Fill(pool, 0, sizeof(Pool));
  q.Once([=] KVJAX_HD() { pool->place = kNoRow; });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    const bool refused = verdict[i] == Decision<Q>::kRefused;
    const bool pooled = refused || (i < call.control->active && g.keys[i] == shared_key);
    in_pool[i] = pooled ? 1 : 0;
    if (refused) Lower(pool->place, static_cast<uint32_t>(i));
    if (pooled) pool->occurrences.Add(i, static_cast<uint64_t>(g.counts[i]));
  });
  q.Once([=] KVJAX_HD() {
    const bool enters = pool->place != kNoRow && first[n] == n && rows.Find(shared_key) == kNoRow;
    pool->entering = enters ? 1 : 0;
    verdict[n] = enters ? Decision<Q>::kAdmitted : Decision<Q>::kRefused;
  });
}

/// Sums the pool in the order of its keys' hashes, so that the sum does not depend on how the batch was made:
/// blocks of gradients first, then these. order, in_pool, hashes: (n,); blocks: (ceil(n / kSumBlock), dim);
/// pooled: (dim,).
template <class Q>
void SumPool(Q& q, GradientsView g, size_t dim, uint64_t* hashes, uint32_t* order, uint32_t* in_pool,
             Pool* pool, double* blocks, float* pooled) {
  const size_t n = g.n;
  q.Each(n, [=] KVJAX_HD(size_t i) {
    hashes[i] = Mix(g.keys[i]);
    order[i] = static_cast<uint32_t>(i);
  });
  q.SortPairs(hashes, order, n, 64);
  q.Each(n, [=] KVJAX_HD(size_t j) { hashes[j] = 1 - in_pool[order[j]]; });
  q.SortPairs(hashes, order, n, 1);
  q.Each(n, [=] KVJAX_HD(size_t j) {
    if (hashes[j] == 0 && (j + 1 == n || hashes[j + 1] != 0)) pool->size = static_cast<uint32_t>(j + 1);
  });
  q.Each((n + kSumBlock - 1) / kSumBlock * dim, [=] KVJAX_HD(size_t k) {
    const size_t begin = k / dim * kSumBlock,
                 end = begin + kSumBlock < pool->size ? begin + kSumBlock : pool->size;
    double sum = 0.0;
    for (size_t j = begin; j < end; ++j) sum += static_cast<double>(g.rows[order[j] * dim + k % dim]);
    blocks[k] = sum;
  });
  q.Each(dim, [=] KVJAX_HD(size_t d) {
    double sum = 0.0;
    for (size_t block = 0; block * kSumBlock < pool->size; ++block) sum += blocks[block * dim + d];
    pooled[d] = pool->place == kNoRow ? 0.0f : static_cast<float>(sum);
  });
}

/// Room for that; nothing without a shared row.
template <class Q>
struct Pooling {
  Pooling(Q& q, bool shares, size_t n, size_t dim)
      : pool(q, shares ? 1 : 0),
        hashes(q, shares ? n : 0),
        order(q, shares ? n : 0),
        in_pool(q, shares ? n : 0),
        blocks(q, shares ? (n + kSumBlock - 1) / kSumBlock * dim : 0) {}

  Scratch<Q, Pool> pool;
  Scratch<Q, uint64_t> hashes;
  Scratch<Q, uint32_t> order, in_pool;
  Scratch<Q, double> blocks;
};

}  // namespace kvjax::device
