// Handlers of tables that are spread over devices: routing, agreement, and the training write of one shard.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/shard_summary.h"
#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

template <class B>
concept ShardedBackend = requires(
    typename B::Exec& exec, typename B::Table& table, const uint32_t* version, uint32_t* word, KeySpan keys,
    InitialRows initial, const bool* mask, bool* owned, int32_t room, const int32_t* ints, int32_t* out_ints,
    const float* rows, const int64_t* step, int64_t* longs, const SlotLayout& layout, uint64_t* words,
    const uint64_t* const_words, uint32_t shards, Routed routed, size_t n, std::string_view name) {
  B::Owned(exec, name, keys, ints, shards, shards, owned);
  B::Route(exec, name, keys, mask, ints, shards, room, routed);
  B::Receive(exec, table, version, keys, ints, version, n, rows, n, ints, ints, initial);
  B::PlanStep(exec, table, version, step, layout, words, n);
  B::Prepare(exec, table, name, version, const_words, n, n, ints, word, word);
  B::CommitStep(exec, table, version, word, out_ints, longs);
  B::Read(exec, version);
  B::Copy(exec, version, word);
};

/// Whose shards choose together what goes so that a write can be made.
template <class B>
concept RoomBackend =
    ShardedBackend<B> && requires(typename B::Exec& exec, typename B::Table& table, const uint32_t* version,
                                  uint32_t* word, uint64_t* words, size_t n, std::string_view name) {
      B::Facts(exec, table, version, words, n);
      B::Hear(exec, table, name, version, version, word, word);
    };

/// Checks that a device is the shard that the program takes it for.
template <Backend B>
uint32_t CheckShard(typename B::Exec& exec, std::string_view name, int32_t device,
                    const ffi::AnyBuffer& shard) {
  Expect(Holds(shard, ffi::S32, 1), name, "route", "shard () int32", shard);
  const auto want = static_cast<uint32_t>(B::Read(exec, Data<uint32_t>(shard)));
  const uint32_t got = Registry<typename B::Table>::Get().Find(name, "route", device)->spec().shard;
  if (want == got) return got;
  throw MakeError(ErrorCode::kFailedPrecondition, name, "route",
                  "a program on the mesh that the table was made with (this device has shard " +
                      std::to_string(got) + ")",
                  "one whose mesh makes it shard " + std::to_string(want),
                  "use that mesh, or kvjax.reshard(table, mesh)");
}

inline const int32_t* OwnersOf(std::string_view name, const ffi::AnyBuffer& owners, size_t n) {
  const bool given = owners.element_count() > 0;
  Expect(Holds(owners, ffi::S32, given ? n : 0), name, "route", "owners (n,) int32", owners);
  return given ? Data<int32_t>(owners) : nullptr;
}

/// owners: (n,) int32 by a partitioner, or (0,) for those of virtual buckets; shard: () int32, the place of
/// this device. owned: (n,) bool.
template <Backend B>
ffi::Error OwnedKeys(typename B::Exec exec, int32_t device, std::string_view name, int64_t shards,
                     ffi::AnyBuffer keys, ffi::AnyBuffer owners, ffi::AnyBuffer shard, Result owned,
                     Result status) {
  return Report(name, "route", true, Tell<B>(exec, name, "route", status), [&] {
    const KeySpan k = Keys(name, "route", keys, false);
    Expect(Holds(*owned, ffi::PRED, k.n), name, "route", "owned (n,) bool", *owned);
    B::Owned(exec, name, k, OwnersOf(name, owners, k.n), static_cast<uint32_t>(shards),
             CheckShard<B>(exec, name, device, shard), Data<bool>(owned));
  });
}
template <Backend B>
auto BindOwnedKeys() {
  return Rets<2>(Args<3>(BindTable<B>().template Attr<int64_t>("shards")));
}

/// mask: (n,) or (0,) bool; owners and shard: as above. sorted: (n, 2) uint32, order, slot and round: (n,)
/// int32, starts: (shards + 1,) int32 as in core/route.h.
template <Backend B>
ffi::Error RouteKeys(typename B::Exec exec, int32_t device, std::string_view name, int64_t shards,
                     int64_t room, ffi::AnyBuffer keys, ffi::AnyBuffer mask, ffi::AnyBuffer owners,
                     ffi::AnyBuffer shard, Result sorted, Result order, Result starts, Result slot,
                     Result round, Result status) {
  return Report(name, "route", true, Tell<B>(exec, name, "route", status), [&] {
    const KeySpan k = Keys(name, "route", keys, false);
    const auto n = static_cast<uint32_t>(shards);
    Expect(Holds(*sorted, ffi::U32, 2 * k.n), name, "route", "keys (n, 2) uint32", *sorted);
    for (const ffi::AnyBuffer& x : {*order, *slot, *round}) {
      Expect(Holds(x, ffi::S32, k.n), name, "route", "(n,) int32", x);
    }
    Expect(Holds(*starts, ffi::S32, n + 1), name, "route", "starts (shards + 1,) int32", *starts);
    (void)CheckShard<B>(exec, name, device, shard);
    B::Route(exec, name, k, Mask(name, "route", mask, k.n), OwnersOf(name, owners, k.n), n,
             static_cast<int32_t>(room),
             {Data<uint64_t>(sorted), Data<int32_t>(order), Data<int32_t>(starts), Data<int32_t>(slot),
              Data<int32_t>(round)});
  });
}
template <Backend B>
auto BindRouteKeys() {
  return Rets<6>(Args<4>(BindTable<B>().template Attr<int64_t>("shards").template Attr<int64_t>("room")));
}

/// low, high: () uint32, the smallest and the largest sum of what copies of the table have been told.
template <Backend B>
ffi::Error Alike(typename B::Exec exec, int32_t /*device*/, std::string_view name, std::string_view op,
                 ffi::AnyBuffer low, ffi::AnyBuffer high, Result status) {
  return Report(name, op, true, Tell<B>(exec, name, op, status), [&] {
    if (B::Read(exec, Version(name, op, low)) == B::Read(exec, Version(name, op, high))) return;
    throw MakeError(
        ErrorCode::kInvalidArgument, name, op, "the same keys and values for all that are told of them",
        "others on some devices",
        "processes give equal arrays, or their parts of one by jax.make_array_from_process_local_data; "
        "copies of "
        "a table along an axis want what is gathered over it, or shard_map with check_vma=True, where kvjax "
        "does it");
  });
}
template <Backend B>
auto BindAlike() {
  return Rets<1>(Args<2>(BindTable<B>().template Attr<std::string_view>("op")));
}

/// agreed: () uint32, the largest of the numbers that the devices gave: 0, or that of a failure, which is
/// raised. The call is over then, and what its `rounds` () int32 have moved is counted: the keys of `starts`
/// (shards + 1,) int32, of core/route.h, and the bytes of each round. The other operands are handed through.
template <Backend B>
ffi::Error Agree(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                 bool writes, int64_t to_owners, int64_t from_owners, int64_t usual_rounds,
                 ffi::AnyBuffer agreed, ffi::AnyBuffer rounds, ffi::AnyBuffer starts, ffi::RemainingArgs in,
                 ffi::RemainingRets out) {
  return Guard(name, op, [&] {
    Expect(Holds(rounds, ffi::S32, 1), name, op, "rounds () int32", rounds);
    Expect(starts.element_type() == ffi::S32, name, op, "starts (shards + 1,) int32", starts);
    if (const uint32_t number = B::Read(exec, Version(name, op, agreed)); number != 0) {
      const auto table = Registry<typename B::Table>::Get().FindIfThere(name, device);
      if (writes && table != nullptr) table->Abandon();
      throw Failures::Get().Find(number).value_or(
          MakeError(ErrorCode::kFailedPrecondition, name, op, "a call that all shards can do",
                    "a failure in another process", "the error there says why; nothing has changed here"));
    }
    // A call that has got so far does not fail on this device alone because its table is gone by now.
    const auto table = Registry<typename B::Table>::Get().FindIfThere(name, device);
    if (const size_t n = starts.element_count(); n > 0 && table != nullptr) {
      table->Count({.keys = B::Read(exec, Data<uint32_t>(starts) + n - 1),
                    .rounds = B::Read(exec, Data<uint32_t>(rounds)),
                    .usual_rounds = static_cast<uint64_t>(usual_rounds),
                    .to_owners = static_cast<uint64_t>(to_owners),
                    .from_owners = static_cast<uint64_t>(from_owners)});
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const ffi::AnyBuffer from = *in.get<ffi::AnyBuffer>(i), to = **out.get<ffi::AnyBuffer>(i);
      Expect(to.size_bytes() == from.size_bytes(), name, op, "arrays of one size", to);
      B::CopyBytes(exec, Data<std::byte>(from), from.size_bytes(),
                   static_cast<std::byte*>(to.untyped_data()));
    }
  });
}
template <Backend B>
auto BindAgree() {
  return Args<3>(BindTable<B>()
                     .template Attr<std::string_view>("op")
                     .template Attr<bool>("writes")
                     .template Attr<int64_t>("to_owners")
                     .template Attr<int64_t>("from_owners")
                     .template Attr<int64_t>("usual_rounds"))
      .RemainingArgs()
      .RemainingRets();
}

/// Gradients of one of `rounds` () int32 rounds: keys (senders, n, 2) uint32, counts (senders, n) int32, rows
/// (senders, n, dim) float32; initial: (m, dim) for keys without a row.
template <Backend B>
ffi::Error Receive(typename B::Exec exec, int32_t device, std::string_view name, int64_t senders, bool narrow,
                   ffi::AnyBuffer version, ffi::AnyBuffer round, ffi::AnyBuffer rounds, ffi::AnyBuffer keys,
                   ffi::AnyBuffer counts, ffi::AnyBuffer seals, ffi::AnyBuffer rows, ffi::AnyBuffer initial,
                   Result status) {
  return Report(name, "apply", true, Tell<B>(exec, name, "apply", status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    const KeySpan k = Keys(name, "apply", keys, narrow);
    Expect(Holds(counts, ffi::S32, k.n), name, "apply", "counts (senders, n) int32", counts);
    Expect(seals.element_type() == ffi::U32, name, "apply", "seals (s,) uint32", seals);
    Expect(Holds(round, ffi::S32, 1), name, "apply", "round () int32", round);
    Expect(Holds(rounds, ffi::S32, 1), name, "apply", "rounds () int32", rounds);
    ExpectFloats(table->spec(), "apply", rows, k.n);
    B::Receive(exec, *table, Version(name, "apply", version), k, Data<int32_t>(counts), Data<uint32_t>(seals),
               seals.element_count(), Data<float>(rows), static_cast<size_t>(senders), Data<int32_t>(round),
               Data<int32_t>(rounds), Initial(table->spec(), "apply", initial));
  });
}
template <Backend B>
auto BindReceive() {
  return Rets<1>(Args<8>(BindTable<B>().template Attr<int64_t>("senders").template Attr<bool>("narrow")));
}

/// Runs body(), which writes `facts`, unless there has been a failure: its number () uint32 is told instead.
template <Backend B, class Body>
ffi::Error ReportFacts(typename B::Exec& exec, std::string_view name, std::string_view op,
                       const ffi::AnyBuffer& earlier, Result& facts, Body body) {
  const auto tell = [&](uint32_t number) { B::TellFacts(exec, Data<uint64_t>(facts), number); };
  uint32_t failed = 0;
  const ffi::Error error = Report(name, op, true, tell, [&] {
    failed = B::Read(exec, Version(name, op, earlier));
    if (failed == 0) body();
  });
  if (failed != 0) tell(failed);
  return error;
}

/// step: (2,) uint32, the words of int64; delivered: () uint32, 0 or the number of a failure that there has
/// been; facts: (f, 2) uint32, the words of what core/shard_summary.h lists.
template <Backend B>
ffi::Error PlanStep(typename B::Exec exec, int32_t device, std::string_view name, std::string_view slots,
                    ffi::AnyBuffer version, ffi::AnyBuffer step, ffi::AnyBuffer delivered, Result facts) {
  return ReportFacts<B>(exec, name, "apply", delivered, facts, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    Expect(Holds(step, ffi::U32, 2), name, "apply", "step (2,) uint32", step);
    B::PlanStep(exec, *table, Version(name, "apply", version), Data<int64_t>(step), ParseLayout(slots),
                Data<uint64_t>(facts), facts->element_count() / 2);
  });
}
template <Backend B>
auto BindPlanStep() {
  return Rets<1>(Args<3>(BindTable<B>().template Attr<std::string_view>("slots")));
}

/// planned: () uint32, 0 or the number of a failure that there has been; facts: (f, 2) uint32, as above.
template <Backend B>
ffi::Error Facts(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                 ffi::AnyBuffer version, ffi::AnyBuffer planned, Result facts) {
  return ReportFacts<B>(exec, name, op, planned, facts, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    B::Facts(exec, *table, Version(name, op, version), Data<uint64_t>(facts), facts->element_count() / 2);
  });
}
template <Backend B>
auto BindFacts() {
  return Rets<1>(Args<2>(BindTable<B>().template Attr<std::string_view>("op")));
}

/// Checks two results and begins with nothing to ask. tally: what the shards have to add up, as core/select.h
/// writes it; more: () uint32, 1 if they have to, which all know alike unless one has failed.
template <Backend B>
void ExpectTally(typename B::Exec& exec, std::string_view name, std::string_view op, Result& tally,
                 Result& more) {
  Expect(Holds(*tally, ffi::U32, Tally::kWords), name, op, "a tally (words,) uint32", *tally);
  B::Fill(exec, Data<uint32_t>(tally), Tally::kWords, 0);
  B::Fill(exec, Word(name, more), 1, 0);
}

/// facts: (shards, f, 2) uint32, of all shards; shard: () int32, the place of this one.
template <Backend B>
ffi::Error Prepare(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                   int64_t shards, ffi::AnyBuffer version, ffi::AnyBuffer facts, ffi::AnyBuffer shard,
                   Result tally, Result more, Result status) {
  const auto tell = Tell<B>(exec, name, op, status);
  ExpectTally<B>(exec, name, op, tally, more);
  uint32_t earlier = 0;
  const ffi::Error error = Report(name, op, true, tell, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    Expect(Holds(shard, ffi::S32, 1), name, op, "shard () int32", shard);
    earlier = B::Prepare(exec, *table, op, Version(name, op, version), Data<uint64_t>(facts),
                         facts.element_count() / 2, static_cast<size_t>(shards), Data<int32_t>(shard),
                         Data<uint32_t>(tally), Data<uint32_t>(more));
  });
  if (earlier != 0) tell(earlier);
  return error;
}
template <Backend B>
auto BindPrepare() {
  return Rets<3>(
      Args<3>(BindTable<B>().template Attr<std::string_view>("op").template Attr<int64_t>("shards")));
}

/// sum: of the tallies of all shards; shard is only there to tell the devices' calls apart.
template <Backend B>
ffi::Error Hear(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                ffi::AnyBuffer version, ffi::AnyBuffer sum, ffi::AnyBuffer /*shard*/, Result tally,
                Result more, Result status) {
  ExpectTally<B>(exec, name, op, tally, more);
  return Report(name, op, true, Tell<B>(exec, name, op, status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    Expect(Holds(sum, ffi::U32, Tally::kWords), name, op, "a sum (words,) uint32", sum);
    B::Hear(exec, *table, op, Version(name, op, version), Data<uint32_t>(sum), Data<uint32_t>(tally),
            Data<uint32_t>(more));
  });
}
template <Backend B>
auto BindHear() {
  return Rets<3>(Args<3>(BindTable<B>().template Attr<std::string_view>("op")));
}

/// next: () uint32; active: () int32, the rows of the step; used_step: (2,) uint32.
template <Backend B>
ffi::Error CommitStep(typename B::Exec exec, int32_t device, std::string_view name, ffi::AnyBuffer version,
                      Result next, Result active, Result used_step) {
  return Guard(name, "apply", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    Expect(Holds(*used_step, ffi::U32, 2), name, "apply", "step (2,) uint32", *used_step);
    Expect(Holds(*active, ffi::S32, 1), name, "apply", "active () int32", *active);
    B::CommitStep(exec, *table, Version(name, "apply", version), Word(name, next), Data<int32_t>(active),
                  Data<int64_t>(used_step));
  });
}
template <Backend B>
auto BindCommitStep() {
  return Rets<3>(Args<1>(BindTable<B>()));
}

}  // namespace kvjax
