// Handlers of the table operations: each decodes its operands once and gives them to the backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"

namespace kvjax {

/// A read, body(): its last result is a status (), 0 or on a sharded table the number of its failure.
template <class B, class Body>
ffi::Error AnswerRead(typename B::Exec& exec, Decoder& in, std::string_view op, bool sharded, Body body) {
  in.Names(op, in.Text("table"));
  const Array1<uint32_t> status = in.Status();
  const auto put = [&](uint32_t number) { B::Fill(exec, status.data, status.n, number); };
  return Report(in.table(), op, sharded, put, body);
}
template <class B, class Body>
ffi::Error AnswerRead(typename B::Exec& exec, Decoder& in, Op op, Body body) {
  return AnswerRead<B>(exec, in, Name(op), in.Flag("sharded"), body);
}

/// A write, body(version, phase, next): next () gets the version of the next handle, or while the write is
/// only planned 0 or the number of its failure.
template <class B, class Body>
ffi::Error MakeWrite(typename B::Exec& exec, Decoder& in, Op op, Body body) {
  in.Names(Name(op), in.Text("table"));
  const Phase phase = ParsePhase(in.table(), in.op(), in.Text("phase"));
  uint32_t* const next = in.OutWord();
  const auto put = [&](uint32_t number) {
    if (Plans(phase)) B::Fill(exec, next, 1, number);
  };
  return Report(in.table(), in.op(), Plans(phase), put, [&] { body(in.InVersion(), phase, next); });
}
/// The op that an attribute names.
inline Op OpOf(const Decoder& in) { return ParseOp(in.Text("table"), in.Text("op")); }

/// `initial_rows` asks for the initial rows of keys without a row, whatever the table's admission says they
/// read as.
template <Backend B>
ffi::Error Lookup(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kLookup, [&] {
    LookupOperands o;
    o.version = in.InReadVersion();
    const auto table = TableToRead<B>(in, o.version == nullptr);
    o.keys = in.InKeys(in.Flag("narrow"));
    o.mask = in.InMask(o.keys.n);
    o.initial = in.InInitial(table->spec());
    o.missing = in.Flag("initial_rows") ? Missing::kInitial : Missing::kTable;
    o.own_rows = in.Flag("own_rows");
    o.rows = in.OutRows(table->spec(), o.keys.n);
    o.found = in.Out<bool>("found (n,)", o.keys.n);
    const Array1<float> used = in.OutAll<float>("used ()");
    o.used = used.data, o.num_used = used.n;
    B::Lookup(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error FindMissing(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kLookup, [&] {
    FindMissingOperands o;
    o.version = in.InReadVersion();
    const auto table = TableToRead<B>(in, o.version == nullptr);
    o.keys = in.InKeys(in.Flag("narrow"));
    o.mask = in.InMask(o.keys.n);
    o.missing = in.Out<uint64_t>("missing keys (n + 1, 2)", o.keys.n + 1);
    o.count = in.Out<int32_t>("count ()", 1);
    B::FindMissing(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error Inspect(typename B::Exec& exec, Decoder& in) {
  const Op op = OpOf(in);
  return AnswerRead<B>(exec, in, op, [&] {
    InspectOperands o{.op = op};
    o.version = in.InReadVersion();
    const auto table = TableToRead<B>(in, o.version == nullptr);
    o.keys = in.InKeys(in.Flag("narrow"));
    o.found = in.Out<bool>("found (n,)", o.keys.n);
    o.frequency = in.Out<int64_t>("words (n, 2)", o.keys.n);
    o.row_version = in.Out<int64_t>("words (n, 2)", o.keys.n);
    o.pinned = in.Out<bool>("pinned (n,)", o.keys.n);
    B::Inspect(in.Done(exec), *table, o);
  });
}

/// The result is (n, ...) of the slot's type, which the handler does not know.
template <Backend B>
ffi::Error ReadSlot(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kSlot, [&] {
    ReadSlotOperands o{.slot = in.Text("slot")};
    o.version = in.InReadVersion();
    const auto table = TableToRead<B>(in, o.version == nullptr);
    o.keys = in.InKeys(in.Flag("narrow"));
    const ffi::AnyBuffer out = in.Out();
    typename B::Exec& where = in.Done(exec);
    if (o.keys.n == 0) return;
    o.bytes = out.size_bytes() / o.keys.n;
    o.out = static_cast<std::byte*>(out.untyped_data());
    B::ReadSlot(where, *table, o);
  });
}

template <Backend B>
ffi::Error Changed(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kPrefetch, [&] {
    const auto table = TableOf<B>(in);
    ChangedOperands o;
    o.version = in.InVersion();
    o.since = in.InVersion();
    o.keys = in.InKeys(in.Flag("narrow"));
    o.changed = in.Out<bool>("changed (n,)", o.keys.n);
    B::Changed(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error WriteKeys(typename B::Exec& exec, Decoder& in) {
  const Op op = OpOf(in);
  return MakeWrite<B>(exec, in, op, [&](const uint32_t* version, Phase phase, uint32_t* next) {
    const auto table = TableOf<B>(in);
    WriteKeysOperands o{.op = op, .phase = phase, .version = version, .next = next};
    o.keys = in.InKeys(in.Flag("narrow"));
    o.mask = in.InMask(o.keys.n);
    o.initial = in.InInitial(table->spec());
    B::WriteKeys(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error WriteRows(typename B::Exec& exec, Decoder& in) {
  const Op op = OpOf(in);
  return MakeWrite<B>(exec, in, op, [&](const uint32_t* version, Phase phase, uint32_t* next) {
    const auto table = TableOf<B>(in);
    WriteRowsOperands o{.op = op, .phase = phase, .version = version, .next = next};
    o.keys = in.InKeys(in.Flag("narrow"));
    o.mask = in.InMask(o.keys.n);
    o.rows = op == Op::kAdd ? reinterpret_cast<const std::byte*>(in.InFloats(table->spec(), o.keys.n))
                            : in.InRows(table->spec(), o.keys.n);
    o.initial = in.InInitial(table->spec());
    B::WriteRows(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error Accum(typename B::Exec& exec, Decoder& in) {
  return MakeWrite<B>(exec, in, Op::kAccum, [&](const uint32_t* version, Phase phase, uint32_t* next) {
    const auto table = TableOf<B>(in);
    AccumOperands o{.phase = phase, .version = version, .next = next};
    o.keys = in.InKeys(in.Flag("narrow"));
    o.mask = in.InMask(o.keys.n);
    o.old_rows = in.InFloats(table->spec(), o.keys.n);
    o.new_rows = in.InFloats(table->spec(), o.keys.n);
    o.exists = in.In<bool>("exists (n,)", o.keys.n);
    B::Accum(in.Done(exec), *table, o);
  });
}

/// policy: as Policy::Parse reads it. A dry run has a second result, how many rows each part of it chooses.
template <Backend B>
ffi::Error Evict(typename B::Exec& exec, Decoder& in) {
  const Op op = OpOf(in);
  return MakeWrite<B>(exec, in, op, [&](const uint32_t* version, Phase phase, uint32_t* next) {
    const auto table = TableOf<B>(in);
    EvictOperands o{.op = op, .phase = phase, .version = version, .next = next};
    // Shards that choose together have the choice in their plans, and a commit must not need memory.
    if (phase != Phase::kCommit || !EvictingBackend<B>) o.policy = Policy::Parse(in.Text("policy"));
    o.step = in.In<int64_t>("step (2,)", 1);
    o.dry_run = in.Flag("dry_run");
    if (o.dry_run && !Plans(phase)) {
      const Array1<uint32_t> counts = in.OutAll<uint32_t>("counts (parts,)");
      o.counts = counts.data, o.parts = counts.n;
    }
    B::Evict(in.Done(exec), *table, o);
  });
}

template <Backend B>
ffi::Error Clear(typename B::Exec& exec, Decoder& in) {
  const Op op = in.Flag("slots_only") ? Op::kClearSlots : Op::kClear;
  return MakeWrite<B>(exec, in, op, [&](const uint32_t* version, Phase phase, uint32_t* next) {
    B::Clear(in.Done(exec), *TableOf<B>(in), {.op = op, .phase = phase, .version = version, .next = next});
  });
}

}  // namespace kvjax
