// The CPU backend's part in bags.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/bag.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/cpu/workers.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

struct CpuBags {
  using Exec = xla::ffi::ThreadPool;

  /// On as many threads as XLA's own pool has.
  static ParallelFor On(Exec& pool) {
    const auto threads = static_cast<size_t>(std::max<int64_t>(pool.num_threads(), 1));
    return
        [threads](size_t n, size_t grain, const auto& body) { Workers::Own().Run(threads, n, grain, body); };
  }
  static void BagSum(Exec& pool, const BagSumOperands& o) {
    SumBags(On(pool), o.shape, o.weights, o.rows, o.bags);
  }
  static void BagExpand(Exec& pool, const BagExpandOperands& o) {
    ExpandBags(On(pool), o.shape, o.weights, o.bags, o.rows);
  }
  static void BagDot(Exec& pool, const BagDotOperands& o) {
    DotBags(On(pool), o.shape, o.rows, o.bags, o.weights);
  }
  static void BagMax(Exec& pool, const BagMaxOperands& o) {
    MaxBags(On(pool), o.shape, o.rows, o.bags, o.positions);
  }
  static void BagPlace(Exec& pool, const BagPlaceOperands& o) {
    PlaceBags(On(pool), o.shape, o.positions, o.bags, o.rows);
  }
  static void BagIds(Exec&, const BagIdsOperands& o) { IdsOfLengths(o.table, o.lengths, o.bags, o.n, o.ids); }
};

}  // namespace kvjax
