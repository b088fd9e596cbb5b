// The CPU backend's part in pooling.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/bag.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/cpu/table.h"
#include "kvjax/ffi/cpu/thread_pool.h"

namespace kvjax {

struct CpuBags {
  using Exec = xla::ffi::ThreadPool;

  static ParallelFor On(Exec& pool) {
    return [&pool](size_t n, size_t grain, const auto& body) { RunOnPool(pool, n, grain, body); };
  }
  static void BagSum(Exec& pool, const BagShape& shape, const float* weights, const float* rows,
                     float* bags) {
    SumBags(On(pool), shape, weights, rows, bags);
  }
  static void BagSpread(Exec& pool, const BagShape& shape, const float* weights, const float* bags,
                        float* rows) {
    SpreadBags(On(pool), shape, weights, bags, rows);
  }
  static void BagDot(Exec& pool, const BagShape& shape, const float* rows, const float* bags,
                     float* weights) {
    DotBags(On(pool), shape, rows, bags, weights);
  }
  static void BagMax(Exec& pool, const BagShape& shape, const float* rows, float* bags, int32_t* positions) {
    MaxBags(On(pool), shape, rows, bags, positions);
  }
  static void BagPlace(Exec& pool, const BagShape& shape, const int32_t* positions, const float* bags,
                       float* rows) {
    PlaceBags(On(pool), shape, positions, bags, rows);
  }
  static void BagIds(Exec&, std::string_view table, const int32_t* lengths, size_t bags, size_t n,
                     int32_t* ids) {
    IdsOfLengths(table, lengths, bags, n, ids);
  }
};

}  // namespace kvjax
