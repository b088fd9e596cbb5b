// The device backend's part in sharded tables.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/device/route.h"
#include "kvjax/ffi/device/sharded.h"

namespace kvjax::device {

/// `On` as for DeviceBackend. What one device alone can find out it throws, so what the host has to know for
/// that it waits for.
template <class On>
struct DeviceSharded {
  using Exec = typename On::Exec;
  using Q = typename On::Queue;
  using Table = DeviceTable<Q>;

  static void Owned(Exec& exec, const OwnedOperands& o) {
    Q q = On::Make(exec);
    const OwnersView owners{o.owners.given, o.owners.shards};
    CheckOwners(q, o.table, o.keys, {}, owners);
    MarkOwned(q, o.keys.data, owners, o.shard, o.keys.n, o.owned);
  }
  static void Route(Exec& exec, const RouteOperands& o) {
    Q q = On::Make(exec);
    const OwnersView owners{o.owners.given, o.owners.shards};
    CheckOwners(q, o.table, o.keys, {.mask = o.mask}, owners);
    RouteKeys(q, o.keys.data, {.mask = o.mask}, owners, o.keys.n, o.capacity, o.out);
  }
  static void Receive(Exec& exec, Table& t, const ReceiveOperands& o) {
    Q q = On::Make(exec);
    for (const uint32_t canary : Fetch(q, o.gradients.canaries, o.gradients.num_canaries)) {
      if (canary != kCanary) throw CanaryError(t.spec().name, Name(Op::kApply));
    }
    t.Receive(q, o);
  }
  static void PlanStep(Exec& exec, Table& t, const PlanStepOperands& o) {
    Q q = On::Make(exec);
    t.PlanStep(q, o);
    q.Fill(o.summary, 0, o.words * sizeof(uint64_t));  // no other shard has to know more
  }
  static void PutFailure(Exec& exec, uint64_t* summary, uint32_t number) {
    Q q = On::Make(exec);
    auto* const words = reinterpret_cast<uint32_t*>(summary);
    if (number != 0) FillWords(q, words, 1, number);
    if (number != 0) FillWords(q, words + 1, 1, 0);
  }
  /// There is nothing else to prepare.
  static uint32_t Prepare(Exec& exec, Table&, const PrepareOperands& o) {
    return Read(exec, reinterpret_cast<const uint32_t*>(o.summaries));
  }
  static void CommitStep(Exec& exec, Table& t, const CommitStepOperands& o) {
    Q q = On::Make(exec);
    t.CommitStep(q, o);
  }
  static uint32_t Read(Exec& exec, const uint32_t* word) {
    Q q = On::Make(exec);
    return Fetch(q, word, 1)[0];
  }

 private:
  template <class T>
  static std::vector<T> Fetch(Q& q, const T* from, size_t n) {
    std::vector<T> values(n);
    q.Copy(values.data(), from, n * sizeof(T));
    q.Wait();
    return values;
  }
  /// Without a partitioner there is nothing to check, nor to wait for.
  static void CheckOwners(Q& q, std::string_view table, KeySpan keys, Valid valid, OwnersView owners) {
    if (owners.given == nullptr) return;
    Scratch<Q, uint32_t> first(q, 1);
    FindUnowned(q, owners, valid, keys.n, first.data());
    const uint32_t i = Fetch(q, first.data(), 1)[0];
    if (i == keys.n) return;
    (void)CheckOwner(table, Fetch(q, keys.data + i, 1)[0], Fetch(q, owners.given + i, 1)[0], owners.shards);
  }
};

}  // namespace kvjax::device
