// The device backend's part in tables that are spread over devices.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
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

  static void Owned(Exec& exec, std::string_view table, KeySpan keys, const int32_t* owners, uint32_t shards,
                    uint32_t shard, bool* owned) {
    Q q = On::Make(exec);
    CheckOwners(q, table, keys, {}, {owners, shards});
    MarkOwned(q, keys.data, {owners, shards}, shard, keys.n, owned);
  }
  static void Route(Exec& exec, std::string_view table, KeySpan keys, const bool* mask, const int32_t* owners,
                    uint32_t shards, int32_t room, Routed out) {
    Q q = On::Make(exec);
    CheckOwners(q, table, keys, {.mask = mask}, {owners, shards});
    RouteKeys(q, keys.data, {.mask = mask}, {owners, shards}, keys.n, room, out);
  }
  static void Receive(Exec& exec, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                      const uint32_t* seals, size_t num_seals, const float* rows, size_t senders,
                      const int32_t* round, const int32_t* rounds, InitialRows initial) {
    Q q = On::Make(exec);
    for (const uint32_t seal : Fetch(q, seals, num_seals)) {
      if (seal != kSeal) throw SealError(t.spec().name, "apply");
    }
    t.Receive(q, version, keys, counts, rows, senders, round, rounds, initial);
  }
  static void PlanStep(Exec& exec, Table& t, const uint32_t* version, const int64_t* step,
                       const SlotLayout& layout, uint64_t* facts, size_t n) {
    Q q = On::Make(exec);
    t.PlanStep(q, version, reinterpret_cast<const uint32_t*>(step), layout);
    q.Fill(facts, 0, n * sizeof(uint64_t));  // no other shard has to know more
  }
  static void TellFacts(Exec& exec, uint64_t* facts, uint32_t number) {
    Q q = On::Make(exec);
    auto* const words = reinterpret_cast<uint32_t*>(facts);
    if (number != 0) FillWords(q, words, 1, number);
    if (number != 0) FillWords(q, words + 1, 1, 0);
  }
  /// The number of the failure that this shard has had before, or 0. There is nothing else to prepare.
  static uint32_t Prepare(Exec& exec, Table&, std::string_view, const uint32_t*, const uint64_t* facts,
                          size_t, size_t, const int32_t*, uint32_t*, uint32_t*) {
    return Read(exec, reinterpret_cast<const uint32_t*>(facts));
  }
  static void CommitStep(Exec& exec, Table& t, const uint32_t* version, uint32_t* next, int32_t* active,
                         int64_t* used_step) {
    Q q = On::Make(exec);
    t.CommitStep(q, version, next, active, reinterpret_cast<uint32_t*>(used_step));
    if constexpr (Q::kSynchronous) t.Raise();
  }
  static uint32_t Read(Exec& exec, const uint32_t* word) {
    Q q = On::Make(exec);
    return Fetch(q, word, 1)[0];
  }
  static void CopyBytes(Exec& exec, const std::byte* from, size_t n, std::byte* to) {
    if (from != to) On::Make(exec).Copy(to, from, n);
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
  static void CheckOwners(Q& q, std::string_view table, KeySpan keys, Meant meant, OwnersView owners) {
    if (owners.given == nullptr) return;
    Scratch<Q, uint32_t> first(q, 1);
    FindUnowned(q, owners, meant, keys.n, first.data());
    const uint32_t i = Fetch(q, first.data(), 1)[0];
    if (i == keys.n) return;
    (void)CheckOwner(table, Fetch(q, keys.data + i, 1)[0], Fetch(q, owners.given + i, 1)[0], owners.shards);
  }
};

}  // namespace kvjax::device
