// The device backend's part in bags.
#pragma once
#include "kvjax/ffi/core/operands.h"
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

  static void BagSum(Exec& exec, const BagSumOperands& o) {
    Q q = On::Make(exec);
    SumBags(q, o.shape, o.weights, o.rows, o.bags);
  }
  static void BagExpand(Exec& exec, const BagExpandOperands& o) {
    Q q = On::Make(exec);
    ExpandBags(q, o.shape, o.weights, o.bags, o.rows);
  }
  static void BagDot(Exec& exec, const BagDotOperands& o) {
    Q q = On::Make(exec);
    DotBags(q, o.shape, o.rows, o.bags, o.weights);
  }
  static void BagMax(Exec& exec, const BagMaxOperands& o) {
    Q q = On::Make(exec);
    MaxBags(q, o.shape, o.rows, o.bags, o.positions);
  }
  static void BagPlace(Exec& exec, const BagPlaceOperands& o) {
    Q q = On::Make(exec);
    PlaceBags(q, o.shape, o.positions, o.bags, o.rows);
  }
  /// Lengths that do not fit are reported to the table.
  static void BagIds(Exec& exec, const BagIdsOperands& o) {
    using Tables = Registry<DeviceTable<Q>>;
    Q q = On::Make(exec);
    const auto table = Tables::Get().FindIfThere(o.table, Tables::kEveryDevice);
    const OwnReport<Q> report(q, table.get(), Op::kLookupBag);
    IdsOfLengths(q, report.call(), o.lengths, o.bags, o.n, o.ids);
    report.Raise();
  }
};

}  // namespace kvjax::device
