// The device backend's part in pooling.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/device/bags.h"
#include "kvjax/ffi/device/refusals.h"
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// `On` as for DeviceBackend.
template <class On>
struct DeviceBags {
  using Exec = typename On::Exec;
  using Q = typename On::Queue;

  static void BagSum(Exec& exec, const BagShape& shape, const float* weights, const float* rows,
                     float* bags) {
    Q q = On::Make(exec);
    SumBags(q, shape, weights, rows, bags);
  }
  static void BagSpread(Exec& exec, const BagShape& shape, const float* weights, const float* bags,
                        float* rows) {
    Q q = On::Make(exec);
    SpreadBags(q, shape, weights, bags, rows);
  }
  static void BagDot(Exec& exec, const BagShape& shape, const float* rows, const float* bags,
                     float* weights) {
    Q q = On::Make(exec);
    DotBags(q, shape, rows, bags, weights);
  }
  static void BagMax(Exec& exec, const BagShape& shape, const float* rows, float* bags, int32_t* positions) {
    Q q = On::Make(exec);
    MaxBags(q, shape, rows, bags, positions);
  }
  static void BagPlace(Exec& exec, const BagShape& shape, const int32_t* positions, const float* bags,
                       float* rows) {
    Q q = On::Make(exec);
    PlaceBags(q, shape, positions, bags, rows);
  }
  /// The table hears of lengths that do not fit.
  static void BagIds(Exec& exec, std::string_view name, const int32_t* lengths, size_t bags, size_t n,
                     int32_t* ids) {
    using Tables = Registry<DeviceTable<Q>>;
    Q q = On::Make(exec);
    const auto table = Tables::Get().FindIfThere(name, Tables::kEveryDevice);
    const Told<Q> told(q, table.get(), "lookup_bag");
    IdsOfLengths(q, told.call(), lengths, bags, n, ids);
    told.Raise();
  }
};

}  // namespace kvjax::device
