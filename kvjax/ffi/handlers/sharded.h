// Handlers of sharded tables: routing, the agreed status of a call, and the training write of one shard.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/shard_summary.h"
#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

/// Checks that a device, or what a following read takes from elsewhere, is the shard () int32 that the
/// program takes it for.
template <Backend B>
uint32_t CheckShard(typename B::Exec& exec, const Decoder& in, const int32_t* shard) {
  const auto want = static_cast<uint32_t>(B::Read(exec, reinterpret_cast<const uint32_t*>(shard)));
  const uint32_t got = TableToRead<B>(in, false)->spec().shard;
  if (want == got) return got;
  throw MeshError(in.table(), in.op(), got, want);
}

/// (n,) int32 by a partitioner, or (0,) for those of virtual buckets.
inline OwnerSpan InOwners(Decoder& in, size_t n) {
  const ffi::AnyBuffer owners = in.In();
  const bool given = owners.element_count() > 0;
  in.Want(Decoder::Holds(owners, ffi::S32, given ? n : 0), "owners (n,) int32", owners);
  return {given ? static_cast<const int32_t*>(owners.untyped_data()) : nullptr,
          static_cast<uint32_t>(in.Count("shards", 1, kNumBuckets))};
}

template <Backend B>
ffi::Error OwnedKeys(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Name(Op::kRoute), true, [&] {
    OwnedOperands o{.table = in.table()};
    o.keys = in.InKeys(false);
    o.owners = InOwners(in, o.keys.n);
    const int32_t* const shard = in.In<int32_t>("shard ()", 1);
    o.owned = in.Out<bool>("owned (n,)", o.keys.n);
    o.shard = CheckShard<B>(in.Done(exec), in, shard);
    B::Owned(exec, o);
  });
}

/// The results are those of Routed.
template <Backend B>
ffi::Error RouteKeys(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Name(Op::kRoute), true, [&] {
    RouteOperands o{.table = in.table()};
    o.keys = in.InKeys(false);
    o.capacity = static_cast<int32_t>(in.Count("round_capacity", o.keys.n > 0 ? 1 : 0, INT32_MAX));
    o.mask = in.InMask(o.keys.n);
    o.owners = InOwners(in, o.keys.n);
    const int32_t* const shard = in.In<int32_t>("shard ()", 1);
    o.out.keys = in.Out<uint64_t>("keys (n, 2)", o.keys.n);
    o.out.order = in.Out<int32_t>("order (n,)", o.keys.n);
    o.out.starts = in.Out<int32_t>("starts (shards + 1,)", o.owners.shards + 1);
    o.out.position = in.Out<int32_t>("positions (n,)", o.keys.n);
    o.out.round = in.Out<int32_t>("rounds (n,)", o.keys.n);
    (void)CheckShard<B>(in.Done(exec), in, shard);
    B::Route(exec, o);
  });
}

/// low, high: () uint32, the smallest and the largest checksum of the operands of a call.
template <Backend B>
ffi::Error CheckSame(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, in.Text("op"), true, [&] {
    const uint32_t* const low = in.InVersion();
    const uint32_t* const high = in.InVersion();
    if (B::Read(in.Done(exec), low) == B::Read(exec, high)) return;
    throw DifferError(in.table(), in.op());
  });
}

/// agreed: () uint32, the greatest status of all devices: 0, or the number of a failure, which is raised. If
/// none has failed, counts what the call's `rounds` () int32 have moved: the keys of `starts` (shards + 1,)
/// int32, of Routed, and the bytes of each round. The other operands are copied to the results.
template <Backend B>
ffi::Error Agree(typename B::Exec& exec, Decoder& in) {
  in.Names(in.Text("op"), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const uint32_t* const agreed = in.InVersion();
    const uint32_t* const rounds = reinterpret_cast<const uint32_t*>(in.In<int32_t>("rounds ()", 1));
    const Array1<const int32_t> starts = in.InAny<int32_t>("starts (shards + 1,)");
    Decoder copies =
        in;  // to be taken again: a list of them would need memory, and this device alone may have none
    while (in.HasOut()) {
      const ffi::AnyBuffer from = in.In(), to = in.Out();
      in.Want(to.size_bytes() == from.size_bytes(), "arrays of one size", to);
    }
    (void)in.Done(exec);
    if (const uint32_t number = B::Read(exec, agreed); number != 0) {
      if (number == Failures::kAhead) throw AheadError(in.table(), in.op());
      const Error refused = Failures::Get().Find(number).value_or(ElsewhereError(in.table(), in.op()));
      throw in.op() == Name(Op::kApply) ? StepError(refused) : refused;
    }
    // A table that has been dropped meanwhile is no failure: it would be one of this device alone.
    const auto table = Registry<typename B::Table>::Get().FindIfThere(in.table(), in.device);
    if (starts.n > 0 && table != nullptr) {
      table->Count({.keys = B::Read(exec, reinterpret_cast<const uint32_t*>(starts.data) + starts.n - 1),
                    .rounds = B::Read(exec, rounds),
                    .usual_rounds = static_cast<uint64_t>(in.Number("usual_rounds")),
                    .to_owners = static_cast<uint64_t>(in.Number("to_owners")),
                    .from_owners = static_cast<uint64_t>(in.Number("from_owners"))});
    }
    while (copies.HasOut()) {
      const ffi::AnyBuffer from = copies.In(), to = copies.Out();
      B::Copy(exec, static_cast<const std::byte*>(from.untyped_data()), from.size_bytes(),
              static_cast<std::byte*>(to.untyped_data()));
    }
  });
}

template <Backend B>
ffi::Error Receive(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Name(Op::kApply), true, [&] {
    const auto table = TableOf<B>(in);
    ReceiveOperands o{.senders = static_cast<size_t>(in.Count("senders", 1, kNumBuckets))};
    o.version = in.InVersion();
    o.round = in.In<int32_t>("round ()", 1);
    o.rounds = in.In<int32_t>("rounds ()", 1);
    o.keys = in.InKeys(in.Flag("narrow"));
    if (o.keys.n % o.senders != 0)
      throw OperandError(in.table(), in.op(), "as many keys of each sender", std::to_string(o.keys.n));
    o.gradients = in.InGradients(table->spec(), o.keys.n);
    o.initial = in.InInitial(table->spec());
    B::Receive(in.Done(exec), *table, o);
  });
}

/// The words of a shard's summary, as a result.
inline Array1<uint64_t> OutSummary(Decoder& in) {
  const ffi::AnyBuffer summary = in.Out();
  in.Want(summary.element_type() == ffi::U32 && summary.element_count() >= 2 * ShardSummary::kWords,
          "a summary (words, 2) uint32", summary);
  return {static_cast<uint64_t*>(summary.untyped_data()), summary.element_count() / 2};
}

/// Runs body(), which writes the summary, unless there has been a failure: then its number () uint32 is
/// written instead.
template <Backend B, class Body>
ffi::Error ReportSummary(typename B::Exec& exec, Decoder& in, const uint32_t* earlier, uint64_t* summary,
                         Body body) {
  const auto put = [&](uint32_t number) { B::PutFailure(exec, summary, number); };
  uint32_t failed = 0;
  const ffi::Error error = Report(in.table(), in.op(), true, put, [&] {
    failed = B::Read(exec, earlier);
    if (failed == 0) body();
  });
  if (failed != 0) put(failed);
  return error;
}

/// delivered: () uint32, 0 or the number of a failure that there has been.
template <Backend B>
ffi::Error PlanStep(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  PlanStepOperands o;
  o.version = in.InVersion();
  o.step = in.In<int64_t>("step (2,)", 1);
  const uint32_t* const delivered = in.InVersion();
  const Array1<const uint64_t> shared = in.InAny<uint64_t>("shared (s, 2)");
  const Array1<uint64_t> summary = OutSummary(in);
  o.summary = summary.data, o.words = summary.n;
  return ReportSummary<B>(exec, in, delivered, o.summary, [&] {
    const auto table = TableOf<B>(in);
    o.layout = SlotLayout::Parse(in.Text("slots"));
    o.program = in.ProgramFor(table->spec(), o.layout);
    o.shared = shared.data;
    o.facts = in.Flag("facts");
    if (shared.n != (o.program ? static_cast<size_t>(o.program->shared) : 0))
      throw ProgramError(in.table(), 0);
    B::PlanStep(in.Done(exec), *table, o);
  });
}

/// planned: () uint32, 0 or the number of a failure that there has been.
template <EvictingBackend B>
ffi::Error Summarize(typename B::Exec& exec, Decoder& in) {
  in.Names(in.Text("op"), in.Text("table"));
  SummaryOperands o;
  o.version = in.InVersion();
  const uint32_t* const planned = in.InVersion();
  const Array1<uint64_t> summary = OutSummary(in);
  o.summary = summary.data, o.words = summary.n;
  return ReportSummary<B>(exec, in, planned, o.summary,
                          [&] { B::Summarize(in.Done(exec), *TableOf<B>(in), o); });
}

/// What the shards have to add up: nothing, to begin with.
template <Backend B>
TallyResult OutTally(typename B::Exec& exec, Decoder& in) {
  TallyResult out;
  out.tally = in.Out<uint32_t>("a tally (words,)", Tally::kWords);
  out.more = in.OutWord();
  B::Fill(exec, out.tally, Tally::kWords, 0);
  B::Fill(exec, out.more, 1, 0);
  return out;
}

template <Backend B>
ffi::Error Prepare(typename B::Exec& exec, Decoder& in) {
  in.Names(in.Text("op"), in.Text("table"));
  PrepareOperands o{.op = OpOf(in), .out = OutTally<B>(exec, in)};
  const uint32_t* const version = in.InVersion();
  const Array1<const uint64_t> summaries = in.InAny<uint64_t>("summaries (shards, words, 2)");
  uint32_t* const status = in.Status().data;
  uint32_t earlier = 0;
  const auto put = [&](uint32_t number) { B::Fill(exec, status, 1, number); };
  const ffi::Error error = Report(in.table(), in.op(), true, put, [&] {
    const auto table = TableOf<B>(in);
    o.version = version;
    o.summaries = summaries.data, o.words = summaries.n;
    o.shards = static_cast<size_t>(in.Count("shards", 1, kNumBuckets));
    o.shard = in.In<int32_t>("shard ()", 1);
    earlier = B::Prepare(in.Done(exec), *table, o);
  });
  if (earlier != 0) put(earlier);
  return error;
}

/// The third operand, the shard, only makes the devices' calls differ.
template <EvictingBackend B>
ffi::Error Continue(typename B::Exec& exec, Decoder& in) {
  in.Names(in.Text("op"), in.Text("table"));
  ContinueOperands o{.op = OpOf(in), .out = OutTally<B>(exec, in)};
  return AnswerRead<B>(exec, in, in.op(), true, [&] {
    const auto table = TableOf<B>(in);
    o.version = in.InVersion();
    o.sum = in.In<uint32_t>("a sum (words,)", Tally::kWords);
    (void)in.In<int32_t>("shard ()", 1);
    B::Continue(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error CommitStep(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    CommitStepOperands o;
    o.version = in.InVersion();
    o.next = in.OutWord();
    o.active = in.Out<int32_t>("active ()", 1);
    o.used_step = in.Out<int64_t>("step (2,)", 1);
    B::CommitStep(in.Done(exec), *table, o);
  });
}

}  // namespace kvjax
