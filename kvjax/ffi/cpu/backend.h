// The CPU backend: what the handlers need of the CPU table.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/cpu/backend_bags.h"
#include "kvjax/ffi/cpu/backend_sharded.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

/// Reads on the spot the scalars that the handlers hand through as pointers, and calls the table.
struct Cpu : CpuBags, CpuSharded {
  using Ctx = xla::ffi::ThreadPool;
  using Exec = xla::ffi::ThreadPool;
  using Table = kvjax::Table;

  static void Lookup(Exec& pool, Table& t, const LookupOperands& o) {
    t.Lookup(On(pool), Given(o.version), o.keys, o.mask, o.initial, o.missing, o.rows, o.found, o.own_rows);
    std::fill_n(o.used, o.num_used, 1.0f);
  }
  static void FindMissing(Exec& pool, Table& t, const FindMissingOperands& o) {
    const size_t n = t.FindMissing(On(pool), Given(o.version), o.keys, o.mask, o.missing);
    std::fill(o.missing + n, o.missing + o.keys.n + 1, uint64_t{0});
    *o.count = static_cast<int32_t>(n);
  }
  static void Inspect(Exec& pool, Table& t, const InspectOperands& o) {
    t.Inspect(On(pool), Name(o.op), Given(o.version), o.keys, o.found, o.frequency, o.row_version, o.pinned);
  }
  static void ReadSlot(Exec& pool, Table& t, const ReadSlotOperands& o) {
    t.ReadSlot(On(pool), Given(o.version), o.slot, o.bytes, o.keys, o.out);
  }
  static void Changed(Exec&, Table& t, const ChangedOperands& o) {
    t.Changed(*o.version, *o.since, o.keys, o.changed);
  }
  static void WriteKeys(Exec& pool, Table& t, const WriteKeysOperands& o) {
    WithOwn(t, o.op, o, [&](Call call, OwnBatch& own) {
      const KeySpan keys = own.keys.keys();
      switch (o.op) {
        case Op::kLookupOrInsert:
          return t.Insert(On(pool), call, keys, o.initial);
        case Op::kPin:
          return t.Pin(On(pool), call, keys, o.initial);
        case Op::kUnpin:
          return t.Unpin(call, keys);
        case Op::kRemove:
          return t.Remove(call, keys);
        default:
          throw UnknownOpError(t.spec().name, Name(o.op));
      }
    });
  }
  static void WriteRows(Exec& pool, Table& t, const WriteRowsOperands& o) {
    WithOwn(t, o.op, o, [&](Call call, OwnBatch& own) {
      const KeySpan keys = own.keys.keys();
      const auto rows = [&](size_t bytes) { return own.keys.Rows(o.rows, bytes, own.rows); };
      switch (o.op) {
        case Op::kUpsert:
          return t.Upsert(On(pool), call, keys, rows(t.row_bytes()));
        case Op::kAssign:
          return t.Assign(On(pool), call, keys, rows(t.row_bytes()));
        case Op::kAdd: {
          const std::byte* const deltas = rows(static_cast<size_t>(t.spec().dim) * sizeof(float));
          return t.Add(On(pool), call, keys, reinterpret_cast<const float*>(deltas), o.initial);
        }
        default:
          throw UnknownOpError(t.spec().name, Name(o.op));
      }
    });
  }
  static void Accum(Exec& pool, Table& t, const AccumOperands& o) {
    WithOwn(t, Op::kAccum, o, [&](Call call, OwnBatch& own) {
      const auto dim = static_cast<size_t>(t.spec().dim);
      const auto* exists = own.keys.Rows(reinterpret_cast<const uint8_t*>(o.exists), 1, own.exists);
      return t.Accum(On(pool), call, own.keys.keys(), own.keys.Rows(o.old_rows, dim, own.old_rows),
                     own.keys.Rows(o.new_rows, dim, own.new_rows), reinterpret_cast<const bool*>(exists));
    });
  }
  static void Evict(Exec& pool, Table& t, const EvictOperands& o) {
    const int64_t step = Load64(o.step);
    *o.next = o.dry_run ? t.CountVictims(On(pool), {*o.version, o.phase, "dry run"}, o.policy, step,
                                         {o.counts, o.parts})
                        : t.Evict(On(pool), Name(o.op), {*o.version, o.phase, Name(o.op)}, o.policy, step);
  }
  static void Clear(Exec&, Table& t, const ClearOperands& o) {
    const Call call(*o.version, o.phase, Name(o.op));
    *o.next = o.op == Op::kClearSlots ? t.ClearSlots(call) : t.Clear(call);
  }
  static void Apply(Exec& pool, Table& t, const ApplyOperands& o) {
    CheckCanaries(t.spec().name, "apply", o.step.gradients);
    *o.next = t.Apply(On(pool), o);
  }
  static void EndApply(Exec& pool, Table& t, const EndApplyOperands& o) { *o.next = t.EndApply(On(pool), o); }
  static void BeginApply(Exec& pool, Table& t, const BeginApplyOperands& o) {
    const StepSpan& step = o.step;
    CheckCanaries(t.spec().name, "apply", step.gradients);
    int64_t used = 0;
    *o.next = t.BeginApply(
        On(pool), *step.version, step.keys, step.gradients.counts, step.gradients.rows, Load64(step.step),
        step.layout, step.initial,
        {reinterpret_cast<Table::Target*>(o.targets), o.active, &used, o.shared_gradient, o.facts});
    std::memcpy(o.used_step, &used, sizeof(used));
  }
  static void Gather(Exec& pool, Table& t, const GatherOperands& o) { t.Gather(On(pool), o); }
  static void Scatter(Exec& pool, Table& t, const ScatterOperands& o) { *o.out = t.Scatter(On(pool), o); }
  static void Merge(Exec& pool, const MergeOperands& o) {
    CheckCanaries("", "merge", o.gradients);
    MergeRows(On(pool), o.keys.data, o.gradients.rows, o.gradients.counts, o.keys.n, o.dim, o.out_keys,
              o.out_rows, o.out_counts);
  }
  static void Canary(Exec&, const CanaryOperands& o) {
    for (size_t i = 0; i < o.lookups; ++i) {
      if (o.used[i] == 0.0f || o.used[i] == 1.0f) continue;
      throw UsesError(o.table, i, o.lookups, o.used[i]);
    }
    *o.canary = kCanary;
  }
  template <class T>
  static void Copy(Exec&, const T* from, size_t n, T* to) {
    if (from != to) std::copy_n(from, n, to);
  }
  static void Fill(Exec&, uint32_t* out, size_t n, uint32_t word) { std::fill_n(out, n, word); }

 private:
  /// The version of a read, if it brings one.
  static std::optional<uint32_t> Given(const uint32_t* version) {
    return version == nullptr ? std::nullopt : std::optional(*version);
  }

  /// A write, write(call, own keys), of one phase. A commit works on the batch that its plan has made.
  template <class Operands, class Write>
  static void WithOwn(Table& t, Op op, const Operands& o, Write write) {
    const Call call(*o.version, o.phase, Name(op), o.keys.n);
    const bool kept = call.phase == Phase::kCommit && o.mask != nullptr;
    OwnBatch own = kept ? t.TakeBatch(call) : OwnBatch(o.keys, o.mask);
    *o.next = write(call, own);
    if (Plans(call.phase) && o.mask != nullptr) t.KeepBatch(call, std::move(own));
  }
};

}  // namespace kvjax
