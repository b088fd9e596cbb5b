// The CPU backend: handlers for XLA over the core's table, and the Python module.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/table.h"
#include "kvjax/ffi/cpu_bags.h"
#include "kvjax/ffi/handlers/bags.h"
#include "kvjax/ffi/handlers/pool.h"
#include "kvjax/ffi/handlers/tables.h"
#include "kvjax/ffi/handlers/training.h"
#include "kvjax/ffi/host.h"

namespace nb = nanobind;

namespace kvjax {

/// Calls the core, reading on the spot the scalars that the handlers hand through as pointers.
struct Cpu : CpuBags {
  using Ctx = ffi::ThreadPool;
  using Exec = ffi::ThreadPool;
  using Table = kvjax::Table;

  static void Lookup(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                     InitialRows initial, Missing missing, std::byte* rows, bool* found, float* used,
                     size_t num_used) {
    t.Lookup(On(pool), *version, keys, mask, initial, missing, rows, found);
    std::fill_n(used, num_used, 1.0f);
  }
  static void FindMissing(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                          uint64_t* missing, int32_t* count) {
    const size_t n = t.FindMissing(On(pool), *version, keys, mask, missing);
    std::fill(missing + n, missing + keys.n + 1, uint64_t{0});
    *count = static_cast<int32_t>(n);
  }
  static void Inspect(Exec& pool, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                      bool* found, int64_t* frequency, int64_t* row_version) {
    t.Inspect(On(pool), op, *version, keys, found, frequency, row_version);
  }
  static void ReadSlot(Exec& pool, Table& t, const uint32_t* version, std::string_view slot, size_t bytes,
                       KeySpan keys, std::byte* out) {
    t.ReadSlot(On(pool), *version, slot, bytes, keys, out);
  }
  static void WriteKeys(Exec& pool, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                        InitialRows initial, uint32_t* next) {
    *next = op == "lookup_or_insert" ? t.Insert(On(pool), *version, keys, initial)
            : op == "pin"            ? t.Pin(On(pool), *version, keys, initial)
            : op == "unpin"          ? t.Unpin(*version, keys)
            : op == "remove"         ? t.Remove(*version, keys)
                                     : throw Unknown(t, op);
  }
  static void WriteRows(Exec& pool, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                        const std::byte* rows, InitialRows initial, uint32_t* next) {
    *next = op == "upsert"   ? t.Upsert(On(pool), *version, keys, rows)
            : op == "assign" ? t.Assign(On(pool), *version, keys, rows)
            : op == "add"    ? t.Add(On(pool), *version, keys, reinterpret_cast<const float*>(rows), initial)
                             : throw Unknown(t, op);
  }
  static void Accum(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const float* old_rows,
                    const float* new_rows, const bool* exists, uint32_t* next) {
    *next = t.Accum(On(pool), *version, keys, old_rows, new_rows, exists);
  }
  static void Evict(Exec& pool, Table& t, std::string_view op, const uint32_t* version, const Policy& policy,
                    const int64_t* step, uint32_t* next) {
    *next = t.Evict(On(pool), op, *version, policy, Unaligned(step));
  }
  static void Clear(Exec&, Table& t, const uint32_t* version, uint32_t* next) { *next = t.Clear(*version); }
  static void ClearSlots(Exec&, Table& t, const uint32_t* version, uint32_t* next) {
    *next = t.ClearSlots(*version);
  }
  static void BeginApply(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                         const uint32_t* seals, size_t num_seals, const float* rows, const int64_t* step,
                         const SlotLayout& layout, InitialRows initial, uint32_t* next, uint32_t* targets,
                         int32_t* active, int64_t* used_step, float* pooled) {
    CheckSeals(t.spec().name, "apply", seals, num_seals);
    int64_t used = 0;
    *next = t.BeginApply(On(pool), *version, keys, counts, rows, Unaligned(step), layout, initial,
                         {reinterpret_cast<Table::Target*>(targets), active, &used, pooled});
    std::memcpy(used_step, &used, sizeof(used));
  }
  static void Gather(Exec& pool, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                     const int32_t* start, const int32_t* active, size_t chunk, const float* rows,
                     const float* pooled, std::byte* values, float* grads, bool* fresh,
                     const std::vector<std::byte*>& slots) {
    const size_t n = ChunkRows(num_rows, *start, *active, chunk), dim = static_cast<size_t>(t.spec().dim);
    const Table::Target* of = reinterpret_cast<const Table::Target*>(targets) + *start;
    t.Gather(On(pool), *version, of, n, values, fresh, slots);
    for (size_t i = 0, run; i < n; i += run) {  // gradients mostly stand one behind the other
      const bool in_rows = of[i].gradient < num_rows;
      for (run = 1; in_rows && i + run < n && of[i + run].gradient == of[i].gradient + run;) ++run;
      std::memcpy(grads + i * dim, in_rows ? rows + of[i].gradient * dim : pooled, run * dim * sizeof(float));
    }
  }
  static void Scatter(Exec& pool, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                      const int32_t* start, const int32_t* active, size_t chunk, const std::byte* values,
                      const std::vector<const std::byte*>& slots, uint32_t* out) {
    t.Scatter(On(pool), *version, reinterpret_cast<const Table::Target*>(targets) + *start,
              ChunkRows(num_rows, *start, *active, chunk), values, slots,
              /*last=*/static_cast<size_t>(*start) + chunk >= static_cast<size_t>(*active));
    *out = *version;
  }
  static void Merge(Exec&, KeySpan keys, const float* rows, const int32_t* counts, const uint32_t* seals,
                    size_t num_seals, size_t dim, uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
    CheckSeals("", "merge", seals, num_seals);
    MergeRows(keys.data, rows, counts, keys.n, dim, out_keys, out_rows, out_counts);
  }
  static void Seal(Exec&, std::string_view table, const float* used, size_t lookups, uint32_t* seal) {
    for (size_t i = 0; i < lookups; ++i) {
      if (used[i] == 0.0f || used[i] == 1.0f) continue;
      throw MakeError(
          ErrorCode::kInvalidArgument, table, "value_and_grad", "a loss that uses each lookup at most once",
          "lookup " + std::to_string(i + 1) + " of " + std::to_string(lookups) + " used " +
              std::to_string(static_cast<int64_t>(used[i])) + " times",
          "a lookup inside a scan, vmap or twice-called jit of the loss: look the rows up before it "
          "and pass them in");
    }
    *seal = kSeal;
  }
  static void Copy(Exec&, const uint32_t* version, uint32_t* out) { *out = *version; }

 private:
  static Error Unknown(const Table& t, std::string_view op) {
    return MakeError(ErrorCode::kInvalidArgument, t.spec().name, op, "an operation of kvjax", op,
                     "call kvjax's Python functions");
  }
  /// XLA aligns the words of an int64 like any uint32.
  static int64_t Unaligned(const int64_t* words) {
    int64_t value;
    std::memcpy(&value, words, sizeof(value));
    return value;
  }
  static void CheckSeals(std::string_view table, std::string_view op, const uint32_t* seals, size_t n) {
    if (std::all_of(seals, seals + n, [](uint32_t seal) { return seal == kSeal; })) return;
    throw MakeError(ErrorCode::kInvalidArgument, table, op, "gradients as kvjax.value_and_grad made them",
                    "gradients whose keys went through arithmetic",
                    "transforms over dense and sparse gradients together go into kvjax.optax.joint(tx); "
                    "microbatch gradients are concatenated (stacked by lax.scan), not added");
  }
  /// How many rows of a step with `num_rows` the chunk at `start` has.
  static size_t ChunkRows(size_t num_rows, int32_t start, int32_t active, size_t chunk) {
    const auto rows = static_cast<int64_t>(std::min<size_t>(num_rows, INT32_MAX));
    if (start < 0 || active < 0 || active > rows || start > rows) {
      throw MakeError(ErrorCode::kInvalidArgument, "", "apply", "a chunk inside the step",
                      "start " + std::to_string(start) + ", active " + std::to_string(active),
                      "this is a defect of kvjax: please report it");
    }
    return std::min(chunk, static_cast<size_t>(std::max(active - start, 0)));
  }
};
static_assert(Backend<Cpu> && BagBackend<Cpu>);

XLA_FFI_DEFINE_HANDLER_SYMBOL(LookupCpu, Lookup<Cpu>, BindLookup<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(FindMissingCpu, FindMissing<Cpu>, BindFindMissing<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(InspectCpu, Inspect<Cpu>, BindInspect<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReadSlotCpu, ReadSlot<Cpu>, BindReadSlot<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteKeysCpu, WriteKeys<Cpu>, BindWriteKeys<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(WriteRowsCpu, WriteRows<Cpu>, BindWriteRows<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AccumCpu, Accum<Cpu>, BindAccum<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EvictCpu, Evict<Cpu>, BindEvict<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ClearCpu, Clear<Cpu>, BindClear<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MergeCpu, Merge<Cpu>, BindMerge<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BeginApplyCpu, BeginApply<Cpu>, BindBeginApply<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(GatherCpu, Gather<Cpu>, BindGather<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScatterCpu, Scatter<Cpu>, BindScatter<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SealCpu, Seal<Cpu>, BindOrder<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AfterCpu, After<Cpu>, BindOrder<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagSumCpu, BagSum<Cpu>, BindBags<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagSpreadCpu, BagSpread<Cpu>, BindBags<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagDotCpu, BagDot<Cpu>, BindBags<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagMaxCpu, BagMax<Cpu>, BindBagMax<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagPlaceCpu, BagPlace<Cpu>, BindBags<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BagIdsCpu, BagIds<Cpu>, BindBagIds<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SaltCpu, Salt<Cpu>, BindSalt<Cpu>());

namespace {

template <class F>
nb::capsule Capsule(F* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, F, XLA_FFI_CallFrame*>, "not an XLA FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Handlers() {
  nb::dict d;
  d["kvjax_lookup"] = Capsule(LookupCpu);
  d["kvjax_find_missing"] = Capsule(FindMissingCpu);
  d["kvjax_inspect"] = Capsule(InspectCpu);
  d["kvjax_read_slot"] = Capsule(ReadSlotCpu);
  d["kvjax_write_keys"] = Capsule(WriteKeysCpu);
  d["kvjax_write_rows"] = Capsule(WriteRowsCpu);
  d["kvjax_accum"] = Capsule(AccumCpu);
  d["kvjax_evict"] = Capsule(EvictCpu);
  d["kvjax_clear"] = Capsule(ClearCpu);
  d["kvjax_merge"] = Capsule(MergeCpu);
  d["kvjax_begin_apply"] = Capsule(BeginApplyCpu);
  d["kvjax_gather"] = Capsule(GatherCpu);
  d["kvjax_scatter"] = Capsule(ScatterCpu);
  d["kvjax_seal"] = Capsule(SealCpu);
  d["kvjax_after"] = Capsule(AfterCpu);
  d["kvjax_bag_sum"] = Capsule(BagSumCpu);
  d["kvjax_bag_spread"] = Capsule(BagSpreadCpu);
  d["kvjax_bag_dot"] = Capsule(BagDotCpu);
  d["kvjax_bag_max"] = Capsule(BagMaxCpu);
  d["kvjax_bag_place"] = Capsule(BagPlaceCpu);
  d["kvjax_bag_ids"] = Capsule(BagIdsCpu);
  d["kvjax_salt"] = Capsule(SaltCpu);
  return d;
}

}  // namespace
}  // namespace kvjax

NB_MODULE(_cpu, m) {
  using namespace kvjax;
  BindHost(m);
  m.def("handlers", &Handlers, "XLA FFI handlers by target name.");
}
