// Handlers of a training step: merge, then begin, gather and scatter; and the two ops that order calls.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

/// keys: (n, 2) uint32; rows: (n, dim) float32; counts: (n,) int32; seals: (s,) uint32. The results have the
/// shapes of the first three operands: distinct keys in order of first occurrence, then padding.
template <Backend B>
ffi::Error Merge(typename B::Exec exec, ffi::AnyBuffer keys, ffi::AnyBuffer rows, ffi::AnyBuffer counts,
                 ffi::AnyBuffer seals, Result out_keys, Result out_rows, Result out_counts) {
  return Guard("", "merge", [&] {
    const KeySpan k = Keys("", "merge", keys, false);
    const size_t dim = k.n == 0 ? 0 : rows.element_count() / k.n;
    for (const ffi::AnyBuffer& r : {rows, *out_rows}) {
      Expect(Holds(r, ffi::F32, k.n * dim), "", "merge", "rows (n, dim) float32", r);
    }
    for (const ffi::AnyBuffer& c : {counts, *out_counts}) {
      Expect(Holds(c, ffi::S32, k.n), "", "merge", "counts (n,) int32", c);
    }
    Expect(Holds(*out_keys, ffi::U32, 2 * k.n), "", "merge", "keys (n, 2) uint32", *out_keys);
    Expect(seals.element_type() == ffi::U32, "", "merge", "seals () uint32", seals);
    B::Merge(exec, k, Data<float>(rows), Data<int32_t>(counts), Data<uint32_t>(seals), seals.element_count(),
             dim, Data<uint64_t>(out_keys), Data<float>(out_rows), Data<int32_t>(out_counts));
  });
}
template <Backend B>
auto BindMerge() {
  return Rets<3>(Args<4>(ffi::Ffi::Bind().template Ctx<typename B::Ctx>()));
}

/// keys, counts, seals, rows: as merged; step: (2,) uint32, the words of int64; initial: (m, dim) rows for
/// new keys; slots: the layout the optimizer wants. targets: (n, 2) uint32, row and gradient, of which the
/// first `active` () int32 are meant; used_step: (2,) uint32; pooled: (dim,) float32, the gradient of the
/// shared row.
template <Backend B>
ffi::Error BeginApply(typename B::Exec exec, int32_t device, std::string_view name, std::string_view slots,
                      bool narrow, ffi::AnyBuffer version, ffi::AnyBuffer keys, ffi::AnyBuffer counts,
                      ffi::AnyBuffer seals, ffi::AnyBuffer rows, ffi::AnyBuffer step, ffi::AnyBuffer initial,
                      Result next, Result targets, Result active, Result used_step, Result pooled) {
  return Guard(name, "apply", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    const KeySpan k = Keys(name, "apply", keys, narrow);
    Expect(Holds(counts, ffi::S32, k.n), name, "apply", "counts (n,) int32", counts);
    Expect(seals.element_type() == ffi::U32, name, "apply", "seals (s,) uint32", seals);
    Expect(Holds(step, ffi::U32, 2), name, "apply", "step (2,) uint32", step);
    ExpectFloats(table->spec(), "apply", rows, k.n);
    Expect(Holds(*targets, ffi::U32, 2 * k.n), name, "apply", "targets (n, 2) uint32", *targets);
    Expect(Holds(*used_step, ffi::U32, 2), name, "apply", "step (2,) uint32", *used_step);
    ExpectFloats(table->spec(), "apply", *pooled, 1);
    Expect(Holds(*active, ffi::S32, 1), name, "apply", "active () int32", *active);
    B::BeginApply(exec, *table, Version(name, "apply", version), k, Data<int32_t>(counts),
                  Data<uint32_t>(seals), seals.element_count(), Data<float>(rows), Data<int64_t>(step),
                  ParseLayout(slots), Initial(table->spec(), "apply", initial), Word(name, next),
                  Data<uint32_t>(targets), Data<int32_t>(active), Data<int64_t>(used_step),
                  Data<float>(pooled));
  });
}
template <Backend B>
auto BindBeginApply() {
  return Rets<5>(
      Args<7>(BindTable<B>().template Attr<std::string_view>("slots").template Attr<bool>("narrow")));
}

/// The rows of the step that a chunk is about: [start, start + chunk), cut at `active`.
inline void ExpectRange(std::string_view name, const ffi::AnyBuffer& targets, const ffi::AnyBuffer& start,
                        const ffi::AnyBuffer& active) {
  Expect(targets.element_type() == ffi::U32, name, "apply", "targets (n, 2) uint32", targets);
  Expect(Holds(start, ffi::S32, 1), name, "apply", "start () int32", start);
  Expect(Holds(active, ffi::S32, 1), name, "apply", "active () int32", active);
}

inline void ExpectSlots(std::string_view name, const SlotLayout& layout, size_t chunk,
                        const std::vector<ffi::AnyBuffer>& slots) {
  for (size_t s = 0; s < std::max(slots.size(), layout.slots().size()); ++s) {
    const bool ok =
        slots.size() == layout.slots().size() && slots[s].size_bytes() == chunk * layout.slots()[s].bytes;
    if (!ok) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "apply", "slots " + layout.ToString(),
                      std::to_string(slots.size()) + " arrays of other sizes",
                      "call kvjax's Python functions, which prepare the operands");
    }
  }
}

/// Rows [start, start + chunk) of the step, cut at `active`: values (chunk, dim), grads (chunk, dim) float32
/// copied from the merged rows or `pooled`, or (0, dim) if nobody wants them, fresh (chunk,) bool, row_keys
/// (chunk, 2) uint32, and one array per slot. targets, keys, rows and pooled are empty if the step is that of
/// a shard, which has them itself.
template <Backend B>
ffi::Error Gather(typename B::Exec exec, int32_t device, std::string_view name, std::string_view layout,
                  ffi::AnyBuffer version, ffi::AnyBuffer targets, ffi::AnyBuffer keys, ffi::AnyBuffer rows,
                  ffi::AnyBuffer pooled, ffi::AnyBuffer start, ffi::AnyBuffer active, Result values,
                  Result grads, Result fresh, Result row_keys, ffi::RemainingRets slots) {
  return Guard(name, "apply", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    const size_t chunk = fresh->element_count();
    ExpectRange(name, targets, start, active);
    Expect(Holds(*fresh, ffi::PRED, chunk), name, "apply", "fresh (chunk,) bool", *fresh);
    const auto dim = static_cast<size_t>(table->spec().dim);
    ExpectRows(table->spec(), "apply", *values, chunk);
    const bool wanted = chunk == 0 || grads->element_count() > 0;
    Expect(Holds(*grads, ffi::F32, wanted ? chunk * dim : 0), name, "apply", "grads (chunk, dim) float32",
           *grads);
    Expect(Holds(*row_keys, ffi::U32, 2 * chunk), name, "apply", "keys (chunk, 2) uint32", *row_keys);
    const size_t n = targets.element_count() / 2;
    Expect(Holds(keys, ffi::U32, 2 * n), name, "apply", "keys (n, 2) uint32", keys);
    ExpectFloats(table->spec(), "apply", rows, n);
    ExpectFloats(table->spec(), "apply", pooled, n == 0 && pooled.element_count() == 0 ? 0 : 1);
    std::vector<std::byte*> data;
    std::vector<ffi::AnyBuffer> buffers;
    for (size_t s = 0; s < slots.size(); ++s) {
      buffers.push_back(**slots.get<ffi::AnyBuffer>(s));
      data.push_back(static_cast<std::byte*>(buffers.back().untyped_data()));
    }
    ExpectSlots(name, ParseLayout(layout), chunk, buffers);
    B::Gather(exec, *table, Version(name, "apply", version), Data<uint32_t>(targets), n, Data<int32_t>(start),
              Data<int32_t>(active), chunk, Data<uint64_t>(keys), Data<float>(rows), Data<float>(pooled),
              Data<std::byte>(values), wanted ? Data<float>(grads) : nullptr, Data<bool>(fresh),
              Data<uint64_t>(row_keys), data);
  });
}
template <Backend B>
auto BindGather() {
  return Rets<4>(Args<7>(BindTable<B>().template Attr<std::string_view>("slots"))).RemainingRets();
}

/// Writes the chunk back; out: the version, for the next call to depend on.
template <Backend B>
ffi::Error Scatter(typename B::Exec exec, int32_t device, std::string_view name, std::string_view layout,
                   ffi::AnyBuffer version, ffi::AnyBuffer targets, ffi::AnyBuffer start,
                   ffi::AnyBuffer active, ffi::AnyBuffer values, ffi::RemainingArgs slots, Result out) {
  return Guard(name, "apply", [&] {
    const auto table = Registry<typename B::Table>::Get().Find(name, "apply", device);
    const size_t chunk = values.element_count() / static_cast<size_t>(table->spec().dim);
    ExpectRange(name, targets, start, active);
    ExpectRows(table->spec(), "apply", values, chunk);
    std::vector<const std::byte*> data;
    std::vector<ffi::AnyBuffer> buffers;
    for (size_t s = 0; s < slots.size(); ++s) {
      buffers.push_back(*slots.get<ffi::AnyBuffer>(s));
      data.push_back(static_cast<const std::byte*>(buffers.back().untyped_data()));
    }
    ExpectSlots(name, ParseLayout(layout), chunk, buffers);
    B::Scatter(exec, *table, Version(name, "apply", version), Data<uint32_t>(targets),
               targets.element_count() / 2, Data<int32_t>(start), Data<int32_t>(active), chunk,
               Data<std::byte>(values), data, Word(name, out));
  });
}
template <Backend B>
auto BindScatter() {
  return Rets<1>(Args<5>(BindTable<B>().template Attr<std::string_view>("slots")).RemainingArgs());
}

/// used: (lookups,) float32, how often the loss used each lookup; what follows is only waited for.
/// seal: () uint32, kSeal.
template <Backend B>
ffi::Error Seal(typename B::Exec exec, std::string_view name, ffi::AnyBuffer used, ffi::RemainingArgs,
                Result seal) {
  return Guard(name, "value_and_grad", [&] {
    Expect(used.element_type() == ffi::F32, name, "value_and_grad", "uses (lookups,) float32", used);
    B::Seal(exec, name, Data<float>(used), used.element_count(), Word(name, seal));
  });
}
/// version: () uint32, handed through once all that follows it exists.
template <Backend B>
ffi::Error After(typename B::Exec exec, std::string_view name, ffi::AnyBuffer version, ffi::RemainingArgs,
                 Result out) {
  return Guard(name, "after", [&] { B::Copy(exec, Version(name, "after", version), Word(name, out)); });
}
template <Backend B>
auto BindOrder() {
  return Rets<1>(
      Args<1>(ffi::Ffi::Bind().template Ctx<typename B::Ctx>().template Attr<std::string_view>("table"))
          .RemainingArgs());
}

}  // namespace kvjax
