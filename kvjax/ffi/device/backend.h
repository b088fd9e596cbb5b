// What the handlers need of a device table: the backend, once for every kind of queue.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/device/backend_bags.h"
#include "kvjax/ffi/device/backend_sharded.h"
#include "kvjax/ffi/device/evict.h"
#include "kvjax/ffi/device/merge.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/whole.h"
#include "kvjax/ffi/device/writes.h"

namespace kvjax::device {

/// Checks the seals of gradients that belong to no table yet. Where one is broken, what is merged is not fit
/// for use: no rows but NaN, and counts that no table takes.
template <class Q>
void SpoilUnsealed(Q& q, const uint32_t* seals, size_t num_seals, float* rows, int32_t* counts, size_t n,
                   size_t dim) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    for (size_t s = 0; s < num_seals; ++s) {
      if (seals[s] == kSeal) continue;
      for (size_t d = 0; d < dim; ++d) rows[i * dim + d] = NAN;
      counts[i] = -1;
      return;
    }
  });
}

/// See Seal in handlers/training.h.
template <class Q>
void SealLoss(Q& q, CallView call, const float* used, size_t lookups, uint32_t* seal) {
  q.Once([=] KVJAX_HD() {
    *seal = kSeal;
    for (size_t i = 0; i < lookups; ++i) {
      if (used[i] == 0.0f || used[i] == 1.0f) continue;
      *seal = 0;
      const auto places = static_cast<uint32_t>(i << 16 | (lookups & 0xFFFFu));
      if (call.report != nullptr) call.Refuse(Refusal::kUses, places, std::bit_cast<uint32_t>(used[i]));
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

  static void Lookup(Exec& exec, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                     InitialRows initial, Missing missing, std::byte* rows, bool* found, float* used,
                     size_t num_used) {
    Q q = On::Make(exec);
    t.Lookup(q, version, keys, mask, initial, missing, rows, found);
    FillUses(q, used, num_used);
    Answered(q, t);
  }
  static void FindMissing(Exec& exec, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                          uint64_t* missing, int32_t* count) {
    Q q = On::Make(exec);
    t.FindMissing(q, version, keys, mask, missing, count);
    Answered(q, t);
  }
  static void Inspect(Exec& exec, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                      bool* found, int64_t* frequency, int64_t* row_version) {
    Q q = On::Make(exec);
    t.Inspect(q, op, version, keys, found, frequency, row_version);
    Answered(q, t);
  }
  static void ReadSlot(Exec& exec, Table& t, const uint32_t* version, std::string_view slot, size_t bytes,
                       KeySpan keys, std::byte* out) {
    Q q = On::Make(exec);
    t.ReadSlot(q, version, slot, bytes, keys, out);
    Answered(q, t);
  }
  static void Changed(Exec& exec, Table& t, const uint32_t* version, const uint32_t* since, KeySpan keys,
                      bool* changed) {
    Q q = On::Make(exec);
    t.Changed(q, version, since, keys, changed);
    Answered(q, t);
  }
  static void WriteKeys(Exec& exec, Table& t, std::string_view op, Operand by, KeySpan keys, const bool* mask,
                        InitialRows initial, uint32_t* next) {
    Q q = On::Make(exec);
    const bool makes_rows = op == "lookup_or_insert" || op == "pin";
    if (Plans(by)) return t.Plan(q, op, by.version, keys, mask, makes_rows);
    if (op == "lookup_or_insert") {
      t.Insert(q, by.version, keys, mask, initial, next);
    } else if (op == "remove") {
      t.Remove(q, by.version, keys, mask, next);
    } else {
      t.Pin(q, op, by.version, keys, mask, initial, next);
    }
    Done(t);
  }
  static void WriteRows(Exec& exec, Table& t, std::string_view op, Operand by, KeySpan keys, const bool* mask,
                        const std::byte* rows, InitialRows initial, uint32_t* next) {
    Q q = On::Make(exec);
    if (Plans(by)) return t.Plan(q, op, by.version, keys, mask, op != "assign");
    if (op == "upsert") {
      t.Upsert(q, by.version, keys, mask, rows, next);
    } else if (op == "assign") {
      t.Assign(q, by.version, keys, mask, rows, next);
    } else {
      t.Add(q, by.version, keys, mask, reinterpret_cast<const float*>(rows), initial, next);
    }
    Done(t);
  }
  static void Accum(Exec& exec, Table& t, Operand by, KeySpan keys, const bool* mask, const float* old_rows,
                    const float* new_rows, const bool* exists, uint32_t* next) {
    Q q = On::Make(exec);
    if (Plans(by)) return t.Plan(q, "accum", by.version, keys, mask, true);
    t.Accum(q, by.version, keys, mask, old_rows, new_rows, exists, next);
    Done(t);
  }
  static void Evict(Exec& exec, Table& t, std::string_view op, Operand by, const Policy& policy,
                    const int64_t* step, uint32_t* next) {
    Q q = On::Make(exec);
    if (Plans(by)) return t.Plan(q, op, by.version, {}, nullptr, false);
    t.Evict(q, op, by.version, policy, Words(step), next);
    Done(t);
  }
  static void Clear(Exec& exec, Table& t, Operand by, uint32_t* next) {
    Q q = On::Make(exec);
    if (Plans(by)) return t.Plan(q, "clear", by.version, {}, nullptr, false);
    t.Clear(q, by.version, next);
    Done(t);
  }
  static void ClearSlots(Exec& exec, Table& t, Operand by, uint32_t* next) {
    Q q = On::Make(exec);
    if (Plans(by)) return t.Plan(q, "clear_slots", by.version, {}, nullptr, false);
    t.ClearSlots(q, by.version, next);
    Done(t);
  }
  static void BeginApply(Exec& exec, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                         const uint32_t* seals, size_t num_seals, const float* rows, const int64_t* step,
                         const SlotLayout& layout, InitialRows initial, uint32_t* next, uint32_t* targets,
                         int32_t* active, int64_t* used_step, float* pooled) {
    Q q = On::Make(exec);
    const GradientsView gradients{
        keys.data, counts, rows, keys.n, seals, num_seals, kSeal, Words(step), t.spec().count_batches};
    t.BeginApply(q, version, keys, gradients, layout, initial, next, targets, active,
                 reinterpret_cast<uint32_t*>(used_step), pooled);
    Done(t);
  }
  static void Gather(Exec& exec, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                     const int32_t* start, const int32_t* active, size_t chunk, const uint64_t* keys,
                     const float* rows, const float* pooled, std::byte* values, float* grads, bool* fresh,
                     uint64_t* row_keys, const std::vector<std::byte*>& slots) {
    Q q = On::Make(exec);
    const auto dim = static_cast<size_t>(t.spec().dim);
    t.Gather(q, version, targets, num_rows, start, active, chunk,
             {keys, rows, pooled, t.spec().admission.shared_key, dim, grads, fresh, row_keys}, values, slots);
    Done(t);
  }
  static void Scatter(Exec& exec, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                      const int32_t* start, const int32_t* active, size_t chunk, const std::byte* values,
                      const std::vector<const std::byte*>& slots, uint32_t* out) {
    Q q = On::Make(exec);
    t.Scatter(q, version, targets, num_rows, start, active, chunk, values, slots, out);
    Done(t);
  }
  static void Merge(Exec& exec, KeySpan keys, const float* rows, const int32_t* counts, const uint32_t* seals,
                    size_t num_seals, size_t dim, uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
    Q q = On::Make(exec);
    if constexpr (Q::kSynchronous) {
      for (size_t s = 0; s < num_seals; ++s) {
        if (seals[s] != kSeal) throw SealError("", "merge");
      }
    }
    MergeGradients(q, keys.data, rows, counts, keys.n, dim, out_keys, out_rows, out_counts);
    SpoilUnsealed(q, seals, num_seals, out_rows, out_counts, keys.n, dim);
  }
  static void Seal(Exec& exec, std::string_view name, const float* used, size_t lookups, uint32_t* seal) {
    Q q = On::Make(exec);
    const auto table = Registry<Table>::Get().FindIfThere(name, Registry<Table>::kEveryDevice);
    const Told<Q> told(q, table.get(), "value_and_grad");
    SealLoss(q, told.call(), used, lookups, seal);
    told.Raise();
  }
  static void Copy(Exec& exec, const uint32_t* version, uint32_t* out) {
    On::Make(exec).Copy(out, version, sizeof(uint32_t));
  }
  static void Fill(Exec& exec, uint32_t* out, size_t n, uint32_t word) {
    Q q = On::Make(exec);
    FillWords(q, out, n, word);
  }

 private:
  /// XLA aligns the words of an int64 like any uint32.
  static const uint32_t* Words(const int64_t* step) { return reinterpret_cast<const uint32_t*>(step); }
  /// All shards must agree on a read, so one of a spread table tells at once what it was refused for.
  static void Answered(Q& q, Table& t) {
    if (!Q::kSynchronous && !t.spec().spread) return;
    q.Wait();
    t.Raise();
  }
  /// Whether the call only says what it would do.
  static bool Plans(Operand by) { return by.phase == Phase::kPlan || by.phase == Phase::kPropose; }
  /// With a queue that waits, a call that was refused is itself an error.
  static void Done(Table& t) {
    if constexpr (Q::kSynchronous) t.Raise();
  }
};

}  // namespace kvjax::device
