// Handlers of the table operations: decode, check, call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"

namespace kvjax {

using Result = ffi::Result<ffi::AnyBuffer>;

/// What all calls on a table bring: where they run, and the table's name.
template <Backend B>
auto BindTable() {
  return ffi::Ffi::Bind()
      .template Ctx<typename B::Ctx>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Attr<std::string_view>("table");
}

/// Tells a number to all of `out`, uint32: () or with the leading axes that vmap has given it.
template <Backend B>
auto Tell(typename B::Exec& exec, std::string_view name, std::string_view op, Result& out) {
  Expect(out->element_type() == ffi::U32 && out->element_count() >= 1, name, op, "a word () uint32", *out);
  return [&exec, words = Data<uint32_t>(out), n = out->element_count()](uint32_t number) {
    B::Fill(exec, words, n, number);
  };
}

inline Phase ParsePhase(std::string_view table, std::string_view op, std::string_view phase) {
  if (phase == "whole") return Phase::kWhole;
  if (phase == "plan") return Phase::kPlan;
  if (phase == "propose") return Phase::kPropose;
  if (phase == "commit") return Phase::kCommit;
  throw MakeError(ErrorCode::kInvalidArgument, table, op, "a phase whole, plan, propose or commit", phase,
                  "call kvjax's Python functions");
}

/// Runs a write, body(call) -> the next version: into `next` goes that, or while it is only planned 0 or the
/// number of its failure.
template <Backend B, class Body>
ffi::Error WriteOp(typename B::Exec& exec, std::string_view name, std::string_view op, std::string_view phase,
                   const ffi::AnyBuffer& version, Result& next, Body body) {
  const bool plans = phase == "plan" || phase == "propose";
  const auto tell = [&](uint32_t number) {
    if (plans) B::Fill(exec, static_cast<uint32_t*>(next->untyped_data()), 1, number);
  };
  return Report(name, op, plans, tell, [&] {
    body(Operand{Version(name, op, version), ParsePhase(name, op, phase)}, Word(name, next));
  });
}

/// mask: (n,) or (0,) bool; initial: (m, dim) rows for new keys; rows: (n, dim); found: (n,) bool; used: ()
/// float32 (vmap may give it leading axes), always 1: a value that exists only once the rows have been read,
/// by which a later write can be made to wait for this call. `initial_rows` asks for those of keys without a
/// row, whatever the table's admission says they read as.
template <Backend B>
ffi::Error Lookup(typename B::Exec exec, int32_t device, std::string_view name, bool narrow, bool spread,
                  bool initial_rows, ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer mask,
                  ffi::AnyBuffer initial, Result rows, Result found, Result used, Result status) {
  return Report(name, "lookup", spread, Tell<B>(exec, name, "lookup", status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup", device);
    const KeySpan k = Keys(name, "lookup", keys, narrow);
    ExpectRows(table->spec(), "lookup", *rows, k.n);
    Expect(Holds(*found, ffi::PRED, k.n), name, "lookup", "found (n,) bool", *found);
    Expect(used->element_type() == ffi::F32 && used->element_count() >= 1, name, "lookup", "used () float32",
           *used);
    B::Lookup(exec, *table, Version(name, "lookup", version), k, Mask(name, "lookup", mask, k.n),
              Initial(table->spec(), "lookup", initial), initial_rows ? Missing::kInitial : Missing::kTable,
              Data<std::byte>(rows), Data<bool>(found), Data<float>(used), used->element_count());
  });
}
template <Backend B>
auto BindLookup() {
  return Rets<4>(
      Args<4>(BindTable<B>().template Attr<bool>("narrow").template Attr<bool>("spread").template Attr<bool>(
          "initial_rows")));
}

/// mask: (n,) or (0,) bool; missing: (n + 1, 2) uint32, of which the first `count` () int32 are meant.
template <Backend B>
ffi::Error FindMissing(typename B::Exec exec, int32_t device, std::string_view name, bool narrow, bool spread,
                       ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer mask, Result missing,
                       Result count, Result status) {
  return Report(name, "lookup", spread, Tell<B>(exec, name, "lookup", status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup", device);
    const KeySpan k = Keys(name, "lookup", keys, narrow);
    Expect(Holds(*missing, ffi::U32, 2 * k.n + 2), name, "lookup", "missing keys (n + 1, 2) uint32",
           *missing);
    Expect(Holds(*count, ffi::S32, 1), name, "lookup", "count () int32", *count);
    B::FindMissing(exec, *table, Version(name, "lookup", version), k, Mask(name, "lookup", mask, k.n),
                   Data<uint64_t>(missing), Data<int32_t>(count));
  });
}
template <Backend B>
auto BindFindMissing() {
  return Rets<3>(Args<3>(BindTable<B>().template Attr<bool>("narrow").template Attr<bool>("spread")));
}

/// found: (n,) bool; frequency and row_version: (n, 2) uint32, the words of int64.
template <Backend B>
ffi::Error Inspect(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                   bool narrow, bool spread, ffi::AnyBuffer version, ffi::AnyBuffer keys, Result found,
                   Result frequency, Result row_version, Result status) {
  return Report(name, op, spread, Tell<B>(exec, name, op, status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    const KeySpan k = Keys(name, op, keys, narrow);
    Expect(Holds(*found, ffi::PRED, k.n), name, op, "found (n,) bool", *found);
    for (const ffi::AnyBuffer& words : {*frequency, *row_version}) {
      Expect(Holds(words, ffi::U32, 2 * k.n), name, op, "words (n, 2) uint32", words);
    }
    B::Inspect(exec, *table, op, Version(name, op, version), k, Data<bool>(found), Data<int64_t>(frequency),
               Data<int64_t>(row_version));
  });
}
template <Backend B>
auto BindInspect() {
  return Rets<4>(Args<2>(
      BindTable<B>().template Attr<std::string_view>("op").template Attr<bool>("narrow").template Attr<bool>(
          "spread")));
}

/// out: (n, ...) of the slot's type.
template <Backend B>
ffi::Error ReadSlot(typename B::Exec exec, int32_t device, std::string_view name, std::string_view slot,
                    bool narrow, bool spread, ffi::AnyBuffer version, ffi::AnyBuffer keys, Result out,
                    Result status) {
  return Report(name, "slot", spread, Tell<B>(exec, name, "slot", status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "slot", device);
    const KeySpan k = Keys(name, "slot", keys, narrow);
    if (k.n == 0) return;
    B::ReadSlot(exec, *table, Version(name, "slot", version), slot, out->size_bytes() / k.n, k,
                Data<std::byte>(out));
  });
}
template <Backend B>
auto BindReadSlot() {
  return Rets<2>(Args<2>(BindTable<B>()
                             .template Attr<std::string_view>("slot")
                             .template Attr<bool>("narrow")
                             .template Attr<bool>("spread")));
}

/// since: () uint32, an earlier version; changed: (n,) bool, whether keys may read otherwise since then.
template <Backend B>
ffi::Error Changed(typename B::Exec exec, int32_t device, std::string_view name, bool narrow, bool spread,
                   ffi::AnyBuffer version, ffi::AnyBuffer since, ffi::AnyBuffer keys, Result changed,
                   Result status) {
  return Report(name, "prefetch", spread, Tell<B>(exec, name, "prefetch", status), [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "prefetch", device);
    const KeySpan k = Keys(name, "prefetch", keys, narrow);
    Expect(Holds(*changed, ffi::PRED, k.n), name, "prefetch", "changed (n,) bool", *changed);
    B::Changed(exec, *table, Version(name, "prefetch", version), Version(name, "prefetch", since), k,
               Data<bool>(changed));
  });
}
template <Backend B>
auto BindChanged() {
  return Rets<2>(Args<3>(BindTable<B>().template Attr<bool>("narrow").template Attr<bool>("spread")));
}

/// op: lookup_or_insert, remove, pin or unpin; mask: (n,) or (0,) bool, false for keys that are passed over;
/// initial: (m, dim) rows for new keys; next: () uint32, the version of the next handle; so in all writes
/// below. phase: whole; or plan, which changes nothing and gives as `next` 0 or the number of its failure,
/// and then commit.
template <Backend B>
ffi::Error WriteKeys(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                     std::string_view phase, bool narrow, ffi::AnyBuffer version, ffi::AnyBuffer keys,
                     ffi::AnyBuffer mask, ffi::AnyBuffer initial, Result next) {
  return WriteOp<B>(exec, name, op, phase, version, next, [&](Operand call, uint32_t* out) {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    const KeySpan k = Keys(name, op, keys, narrow);
    B::WriteKeys(exec, *table, op, call, k, Mask(name, op, mask, k.n), Initial(table->spec(), op, initial),
                 out);
  });
}
template <Backend B>
auto BindWriteKeys() {
  return Rets<1>(Args<4>(BindTable<B>()
                             .template Attr<std::string_view>("op")
                             .template Attr<std::string_view>("phase")
                             .template Attr<bool>("narrow")));
}

/// op: upsert or assign, with rows (n, dim) of the table's dtype; or add, with rows (n, dim) float32.
template <Backend B>
ffi::Error WriteRows(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                     std::string_view phase, bool narrow, ffi::AnyBuffer version, ffi::AnyBuffer keys,
                     ffi::AnyBuffer mask, ffi::AnyBuffer rows, ffi::AnyBuffer initial, Result next) {
  return WriteOp<B>(exec, name, op, phase, version, next, [&](Operand call, uint32_t* out) {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    const KeySpan k = Keys(name, op, keys, narrow);
    op == "add" ? ExpectFloats(table->spec(), op, rows, k.n) : ExpectRows(table->spec(), op, rows, k.n);
    B::WriteRows(exec, *table, op, call, k, Mask(name, op, mask, k.n), Data<std::byte>(rows),
                 Initial(table->spec(), op, initial), out);
  });
}
template <Backend B>
auto BindWriteRows() {
  return Rets<1>(Args<5>(BindTable<B>()
                             .template Attr<std::string_view>("op")
                             .template Attr<std::string_view>("phase")
                             .template Attr<bool>("narrow")));
}

/// old_rows, new_rows: (n, dim) float32; exists: (n,) bool.
template <Backend B>
ffi::Error Accum(typename B::Exec exec, int32_t device, std::string_view name, std::string_view phase,
                 bool narrow, ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer mask,
                 ffi::AnyBuffer old_rows, ffi::AnyBuffer new_rows, ffi::AnyBuffer exists, Result next) {
  return WriteOp<B>(exec, name, "accum", phase, version, next, [&](Operand call, uint32_t* out) {
    const auto table = Registry<typename B::Table>::Get().Find(name, "accum", device);
    const KeySpan k = Keys(name, "accum", keys, narrow);
    for (const ffi::AnyBuffer& rows : {old_rows, new_rows}) ExpectFloats(table->spec(), "accum", rows, k.n);
    Expect(Holds(exists, ffi::PRED, k.n), name, "accum", "exists (n,) bool", exists);
    B::Accum(exec, *table, call, k, Mask(name, "accum", mask, k.n), Data<float>(old_rows),
             Data<float>(new_rows), Data<bool>(exists), out);
  });
}
template <Backend B>
auto BindAccum() {
  return Rets<1>(
      Args<6>(BindTable<B>().template Attr<std::string_view>("phase").template Attr<bool>("narrow")));
}

/// op: evict or restrict; step: (2,) uint32, the words of int64; policy: as Policy::Parse reads it.
template <Backend B>
ffi::Error Evict(typename B::Exec exec, int32_t device, std::string_view name, std::string_view op,
                 std::string_view phase, std::string_view policy, ffi::AnyBuffer version, ffi::AnyBuffer step,
                 Result next) {
  return WriteOp<B>(exec, name, op, phase, version, next, [&](Operand call, uint32_t* out) {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    Expect(Holds(step, ffi::U32, 2), name, op, "step (2,) uint32", step);
    B::Evict(exec, *table, op, call, Policy::Parse(policy), Data<int64_t>(step), out);
  });
}
template <Backend B>
auto BindEvict() {
  return Rets<1>(Args<2>(BindTable<B>()
                             .template Attr<std::string_view>("op")
                             .template Attr<std::string_view>("phase")
                             .template Attr<std::string_view>("policy")));
}

template <Backend B>
ffi::Error Clear(typename B::Exec exec, int32_t device, std::string_view name, std::string_view phase,
                 bool slots_only, ffi::AnyBuffer version, Result next) {
  const char* op = slots_only ? "clear_slots" : "clear";
  return WriteOp<B>(exec, name, op, phase, version, next, [&](Operand call, uint32_t* out) {
    const auto table = Registry<typename B::Table>::Get().Find(name, op, device);
    slots_only ? B::ClearSlots(exec, *table, call, out) : B::Clear(exec, *table, call, out);
  });
}
template <Backend B>
auto BindClear() {
  return Rets<1>(
      Args<1>(BindTable<B>().template Attr<std::string_view>("phase").template Attr<bool>("slots_only")));
}

}  // namespace kvjax
