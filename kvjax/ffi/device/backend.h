// The device backend: what the handlers need of a device table, once for every kind of queue.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/device/apply.h"
#include "kvjax/ffi/device/backend_bags.h"
#include "kvjax/ffi/device/backend_sharded.h"
#include "kvjax/ffi/device/delta.h"
#include "kvjax/ffi/device/evict.h"
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/reads.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/whole.h"
#include "kvjax/ffi/device/writes.h"

namespace kvjax::device {

/// Checks the canaries of gradients that belong to no table yet. Where one is broken, what is merged is made
/// unusable: no rows but NaN, and counts that no table takes.
template <class Q>
void PoisonEdited(Q& q, const uint32_t* canaries, size_t num_canaries, float* rows, int32_t* counts, size_t n,
                  size_t dim) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    for (size_t s = 0; s < num_canaries; ++s) {
      if (canaries[s] == kCanary) continue;
      for (size_t d = 0; d < dim; ++d) rows[i * dim + d] = NAN;
      counts[i] = -1;
      return;
    }
  });
}

/// See CanaryOperands.
template <class Q>
void MakeCanary(Q& q, CallView call, const float* used, size_t lookups, uint32_t* canary) {
  q.Once([=] KVJAX_HD() {
    *canary = kCanary;
    for (size_t i = 0; i < lookups; ++i) {
      if (used[i] == 0.0f || used[i] == 1.0f) continue;
      *canary = 0;
      const auto which = static_cast<uint32_t>(i << 16 | (lookups & 0xFFFFu));
      if (call.report != nullptr) call.Refuse(Refusal::kUses, which, std::bit_cast<uint32_t>(used[i]));
    }
  });
}

template <class Q>
void FillUses(Q& q, float* out, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) { out[i] = 1.0f; });
}

/// `On` says which context XLA gives, what it is decoded to, and which queue that makes.
template <class On>
struct DeviceBackend : DeviceBags<On>, DeviceSharded<On> {
  using Ctx = typename On::Ctx;
  using Exec = typename On::Exec;
  using Q = typename On::Queue;
  using Table = DeviceTable<Q>;

  static void Lookup(Exec& exec, Table& t, const LookupOperands& o) {
    Answer(exec, t, o.version, [&](Q& q) {
      t.Lookup(q, o);
      FillUses(q, o.used, o.num_used);
    });
  }
  static void FindMissing(Exec& exec, Table& t, const FindMissingOperands& o) {
    Answer(exec, t, o.version, [&](Q& q) { t.FindMissing(q, o); });
  }
  static void Inspect(Exec& exec, Table& t, const InspectOperands& o) {
    Answer(exec, t, o.version, [&](Q& q) { t.Inspect(q, o); });
  }
  static void ReadSlot(Exec& exec, Table& t, const ReadSlotOperands& o) {
    Answer(exec, t, o.version, [&](Q& q) { t.ReadSlot(q, o); });
  }
  static void Changed(Exec& exec, Table& t, const ChangedOperands& o) {
    Answer(exec, t, o.version, [&](Q& q) { t.Changed(q, o); });
  }
  static void WriteKeys(Exec& exec, Table& t, const WriteKeysOperands& o) {
    Write(exec, t, o.phase, {o.op, o.version, o.keys, o.mask}, [&](Q& q) {
      switch (o.op) {
        case Op::kLookupOrInsert:
          return t.Insert(q, o);
        case Op::kPin:
          return t.Pin(q, o);
        case Op::kUnpin:
          return t.Unpin(q, o);
        case Op::kRemove:
          return t.Remove(q, o);
        default:
          throw UnknownOpError(t.spec().name, Name(o.op));
      }
    });
  }
  static void WriteRows(Exec& exec, Table& t, const WriteRowsOperands& o) {
    Write(exec, t, o.phase, {o.op, o.version, o.keys, o.mask}, [&](Q& q) {
      switch (o.op) {
        case Op::kUpsert:
          return t.Upsert(q, o);
        case Op::kAssign:
          return t.Assign(q, o);
        case Op::kAdd:
          return t.Add(q, o);
        default:
          throw UnknownOpError(t.spec().name, Name(o.op));
      }
    });
  }
  static void Accum(Exec& exec, Table& t, const AccumOperands& o) {
    Write(exec, t, o.phase, {Op::kAccum, o.version, o.keys, o.mask}, [&](Q& q) { t.Accum(q, o); });
  }
  static void Evict(Exec& exec, Table& t, const EvictOperands& o) {
    Write(exec, t, o.phase, {o.op, o.version}, [&](Q& q) { t.Evict(q, o); });
  }
  static void Clear(Exec& exec, Table& t, const ClearOperands& o) {
    Write(exec, t, o.phase, {o.op, o.version},
          [&](Q& q) { o.op == Op::kClearSlots ? t.ClearSlots(q, o) : t.Clear(q, o); });
  }
  static void Apply(Exec& exec, Table& t, const ApplyOperands& o) {
    Q q = On::Make(exec);
    t.Apply(q, o);
  }
  static void PlanApply(Exec& exec, Table& t, const PlanApplyOperands& o) {
    Q q = On::Make(exec);
    t.PlanApply(q, o);
    if (!o.reports) return;
    q.Wait();
    t.Raise();
  }
  static void ReadStep(Exec& exec, Table& t, const ReadStepOperands& o) {
    Answer(exec, t, o.step.version, [&](Q& q) { t.ReadStep(q, o); });
  }
  static void WriteStep(Exec& exec, Table& t, const WriteStepOperands& o) {
    Q q = On::Make(exec);
    t.WriteStep(q, o);
  }
  static void Gather(Exec& exec, Table& t, const GatherOperands& o) {
    Q q = On::Make(exec);
    t.Gather(q, o);
  }
  static void Scatter(Exec& exec, Table& t, const ScatterOperands& o) {
    Q q = On::Make(exec);
    t.Scatter(q, o);
  }
  static void Merge(Exec& exec, const MergeOperands& o) {
    Q q = On::Make(exec);
    const GradientSpan& g = o.gradients;
    MergeGradients(q, o.keys.data, g.rows, g.counts, o.keys.n, o.dim, o.out_keys, o.out_rows, o.out_counts);
    PoisonEdited(q, g.canaries, g.num_canaries, o.out_rows, o.out_counts, o.keys.n, o.dim);
  }
  static void Canary(Exec& exec, const CanaryOperands& o) {
    Q q = On::Make(exec);
    const auto table = Registry<Table>::Get().FindIfThere(o.table, Registry<Table>::kEveryDevice);
    const OwnReport<Q> report(q, table.get(), Op::kValueAndGrad);
    MakeCanary(q, report.call(), o.used, o.lookups, o.canary);
    report.Raise();
  }
  template <class T>
  static void Copy(Exec& exec, const T* from, size_t n, T* to) {
    if (from != to) On::Make(exec).Copy(to, from, n * sizeof(T));
  }
  static void Fill(Exec& exec, uint32_t* out, size_t n, uint32_t word) {
    Q q = On::Make(exec);
    FillWords(q, out, n, word);
  }

 private:
  /// All shards must agree on a read, so one of a sharded table raises at once what it was refused for; that
  /// of a following handle, without a version, nothing that was there before it.
  template <class Read>
  static void Answer(Exec& exec, Table& t, const uint32_t* version, Read read) {
    Q q = On::Make(exec);
    const uint32_t before = t.refusals();
    read(q);
    if (!t.spec().sharded) return;
    q.Wait();
    if (version != nullptr || t.refusals() != before) t.Raise();
  }
  /// Plans a write, or makes it.
  template <class Make>
  static void Write(Exec& exec, Table& t, Phase phase, const PlanOperands& plan, Make make) {
    Q q = On::Make(exec);
    if (Plans(phase)) return t.Plan(q, plan);
    make(q);
  }
};

}  // namespace kvjax::device
