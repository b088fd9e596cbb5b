// Handlers of the table operations: decode, check, call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/errors.h"
#include "kvjax/ffi/handlers/registry.h"

namespace kvjax {

using Result = ffi::Result<ffi::AnyBuffer>;

/// mask: (n,) or (0,) bool; initial: (m, dim) rows for new keys; rows: (n, dim); found: (n,) bool; used: ()
/// float32 (vmap may give it leading axes), always 1: a value that exists only once the rows have been read,
/// by which a later write can be made to wait for this call. `initial_rows` asks for those of keys without a
/// row, whatever the table's admission says they read as.
template <Backend B>
ffi::Error Lookup(typename B::Exec exec, std::string_view name, bool narrow, bool initial_rows,
                  ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer mask, ffi::AnyBuffer initial,
                  Result rows, Result found, Result used) {
  return Guard(name, "lookup", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup");
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
  return Rets<3>(Args<4>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("narrow")
                             .template Attr<bool>("initial_rows")));
}

/// mask: (n,) or (0,) bool; missing: (n + 1, 2) uint32, of which the first `count` () int32 are meant.
template <Backend B>
ffi::Error FindMissing(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                       ffi::AnyBuffer keys, ffi::AnyBuffer mask, Result missing, Result count) {
  return Guard(name, "lookup", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup");
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
  return Rets<2>(Args<3>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("narrow")));
}

/// found: (n,) bool; frequency and row_version: (n, 2) uint32, the words of int64.
template <Backend B>
ffi::Error Inspect(typename B::Exec exec, std::string_view name, std::string_view op, bool narrow,
                   ffi::AnyBuffer version, ffi::AnyBuffer keys, Result found, Result frequency,
                   Result row_version) {
  return Guard(name, op, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op);
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
  return Rets<3>(Args<2>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<std::string_view>("op")
                             .template Attr<bool>("narrow")));
}

/// out: (n, ...) of the slot's type.
template <Backend B>
ffi::Error ReadSlot(typename B::Exec exec, std::string_view name, std::string_view slot, bool narrow,
                    ffi::AnyBuffer version, ffi::AnyBuffer keys, Result out) {
  return Guard(name, "slot", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "slot");
    const KeySpan k = Keys(name, "slot", keys, narrow);
    if (k.n == 0) return;
    B::ReadSlot(exec, *table, Version(name, "slot", version), slot, out->size_bytes() / k.n, k,
                Data<std::byte>(out));
  });
}
template <Backend B>
auto BindReadSlot() {
  return Rets<1>(Args<2>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<std::string_view>("slot")
                             .template Attr<bool>("narrow")));
}

/// op: lookup_or_insert, remove, pin or unpin; initial: (m, dim) rows for new keys; next: () uint32, the
/// version of the next handle; so in all writes below.
template <Backend B>
ffi::Error WriteKeys(typename B::Exec exec, std::string_view name, std::string_view op, bool narrow,
                     ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer initial, Result next) {
  return Guard(name, op, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op);
    B::WriteKeys(exec, *table, op, Version(name, op, version), Keys(name, op, keys, narrow),
                 Initial(table->spec(), op, initial), Word(name, next));
  });
}
template <Backend B>
auto BindWriteKeys() {
  return Rets<1>(Args<3>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<std::string_view>("op")
                             .template Attr<bool>("narrow")));
}

/// op: upsert or assign, with rows (n, dim) of the table's dtype; or add, with rows (n, dim) float32.
template <Backend B>
ffi::Error WriteRows(typename B::Exec exec, std::string_view name, std::string_view op, bool narrow,
                     ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer rows, ffi::AnyBuffer initial,
                     Result next) {
  return Guard(name, op, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op);
    const KeySpan k = Keys(name, op, keys, narrow);
    op == "add" ? ExpectFloats(table->spec(), op, rows, k.n) : ExpectRows(table->spec(), op, rows, k.n);
    B::WriteRows(exec, *table, op, Version(name, op, version), k, Data<std::byte>(rows),
                 Initial(table->spec(), op, initial), Word(name, next));
  });
}
template <Backend B>
auto BindWriteRows() {
  return Rets<1>(Args<4>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<std::string_view>("op")
                             .template Attr<bool>("narrow")));
}

/// old_rows, new_rows: (n, dim) float32; exists: (n,) bool.
template <Backend B>
ffi::Error Accum(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                 ffi::AnyBuffer keys, ffi::AnyBuffer old_rows, ffi::AnyBuffer new_rows, ffi::AnyBuffer exists,
                 Result next) {
  return Guard(name, "accum", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "accum");
    const KeySpan k = Keys(name, "accum", keys, narrow);
    ExpectFloats(table->spec(), "accum", old_rows, k.n);
    ExpectFloats(table->spec(), "accum", new_rows, k.n);
    Expect(Holds(exists, ffi::PRED, k.n), name, "accum", "exists (n,) bool", exists);
    B::Accum(exec, *table, Version(name, "accum", version), k, Data<float>(old_rows), Data<float>(new_rows),
             Data<bool>(exists), Word(name, next));
  });
}
template <Backend B>
auto BindAccum() {
  return Rets<1>(Args<5>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("narrow")));
}

/// op: evict or restrict; step: (2,) uint32, the words of int64; policy: as Policy::Parse reads it.
template <Backend B>
ffi::Error Evict(typename B::Exec exec, std::string_view name, std::string_view op, std::string_view policy,
                 ffi::AnyBuffer version, ffi::AnyBuffer step, Result next) {
  return Guard(name, op, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op);
    Expect(Holds(step, ffi::U32, 2), name, op, "step (2,) uint32", step);
    B::Evict(exec, *table, op, Version(name, op, version), Policy::Parse(policy), Data<int64_t>(step),
             Word(name, next));
  });
}
template <Backend B>
auto BindEvict() {
  return Rets<1>(Args<2>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<std::string_view>("op")
                             .template Attr<std::string_view>("policy")));
}

template <Backend B>
ffi::Error Clear(typename B::Exec exec, std::string_view name, bool slots_only, ffi::AnyBuffer version,
                 Result next) {
  const char* op = slots_only ? "clear_slots" : "clear";
  return Guard(name, op, [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, op);
    const uint32_t* current = Version(name, op, version);
    slots_only ? B::ClearSlots(exec, *table, current, Word(name, next))
               : B::Clear(exec, *table, current, Word(name, next));
  });
}
template <Backend B>
auto BindClear() {
  return Rets<1>(Args<1>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("slots_only")));
}

}  // namespace kvjax
