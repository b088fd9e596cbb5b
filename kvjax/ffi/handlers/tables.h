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

/// rows: (n, dim); found: (n,) bool; used: () float32 (vmap may give it leading axes), always 1: a value that
/// exists only once the rows have been read, by which a later write can be made to wait for this call.
template <Backend B>
ffi::Error Lookup(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                  ffi::AnyBuffer keys, Result rows, Result found, Result used) {
  return Guard(name, "lookup", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup");
    const KeySpan k = Keys(name, "lookup", keys, narrow);
    ExpectRows(table->spec(), "lookup", *rows, k.n);
    Expect(Holds(*found, ffi::PRED, k.n), name, "lookup", "found (n,) bool", *found);
    Expect(used->element_type() == ffi::F32 && used->element_count() >= 1, name, "lookup", "used () float32",
           *used);
    B::Lookup(exec, *table, Version(name, "lookup", version), k, Data<std::byte>(rows), Data<bool>(found),
              Data<float>(used), used->element_count());
  });
}
template <Backend B>
auto BindLookup() {
  return Rets<3>(Args<2>(ffi::Ffi::Bind()
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

/// next: () uint32, the version of the next handle; so in all writes below.
template <Backend B>
ffi::Error Insert(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                  ffi::AnyBuffer keys, Result next) {
  return Guard(name, "lookup_or_insert", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "lookup_or_insert");
    B::Insert(exec, *table, Version(name, "lookup_or_insert", version),
              Keys(name, "lookup_or_insert", keys, narrow), Word(name, next));
  });
}
template <Backend B>
ffi::Error Remove(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                  ffi::AnyBuffer keys, Result next) {
  return Guard(name, "remove", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "remove");
    B::Remove(exec, *table, Version(name, "remove", version), Keys(name, "remove", keys, narrow),
              Word(name, next));
  });
}
template <Backend B>
auto BindKeys() {
  return Rets<1>(Args<2>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("narrow")));
}

/// values: (n, dim) of the table's dtype.
template <Backend B>
ffi::Error Upsert(typename B::Exec exec, std::string_view name, bool narrow, ffi::AnyBuffer version,
                  ffi::AnyBuffer keys, ffi::AnyBuffer values, Result next) {
  return Guard(name, "upsert", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "upsert");
    const KeySpan k = Keys(name, "upsert", keys, narrow);
    ExpectRows(table->spec(), "upsert", values, k.n);
    B::Upsert(exec, *table, Version(name, "upsert", version), k, Data<std::byte>(values), Word(name, next));
  });
}
template <Backend B>
auto BindUpsert() {
  return Rets<1>(Args<3>(ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Attr<std::string_view>("table")
                             .template Attr<bool>("narrow")));
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
