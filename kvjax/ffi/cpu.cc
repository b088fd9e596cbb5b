// The CPU backend and its Python module: handlers for XLA, and the whole-table calls made from the host.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>

#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/table.h"
#include "kvjax/ffi/handlers/pool.h"
#include "kvjax/ffi/handlers/tables.h"
#include "kvjax/ffi/handlers/training.h"

namespace nb = nanobind;

namespace kvjax {

/// Calls the core, reading on the spot the scalars that the handlers hand through as pointers.
struct Cpu {
  using Ctx = ffi::ThreadPool;
  using Exec = ffi::ThreadPool;
  using Table = kvjax::Table;

  static ParallelFor On(Exec& pool) {
    return [&pool](size_t n, size_t grain, const auto& body) { RunOnPool(pool, n, grain, body); };
  }
  static void Lookup(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, std::byte* rows,
                     bool* found, float* used, size_t num_used) {
    t.Lookup(On(pool), *version, keys, rows, found);
    std::fill_n(used, num_used, 1.0f);
  }
  static void Inspect(Exec& pool, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                      bool* found, int64_t* frequency, int64_t* row_version) {
    t.Inspect(On(pool), op, *version, keys, found, frequency, row_version);
  }
  static void Insert(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, uint32_t* next) {
    *next = t.Insert(On(pool), *version, keys);
  }
  static void Upsert(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const std::byte* values,
                     uint32_t* next) {
    *next = t.Upsert(On(pool), *version, keys, values);
  }
  static void Remove(Exec&, Table& t, const uint32_t* version, KeySpan keys, uint32_t* next) {
    *next = t.Remove(*version, keys);
  }
  static void Clear(Exec&, Table& t, const uint32_t* version, uint32_t* next) { *next = t.Clear(*version); }
  static void ClearSlots(Exec&, Table& t, const uint32_t* version, uint32_t* next) {
    *next = t.ClearSlots(*version);
  }
  static void BeginApply(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                         const uint32_t* seals, size_t num_seals, const int64_t* step,
                         const SlotLayout& layout, uint32_t* next, uint32_t* row_ids, int32_t* active) {
    CheckSeals(t.spec().name, "apply", seals, num_seals);
    int64_t s;
    std::memcpy(&s, step, sizeof(s));
    *next = t.BeginApply(On(pool), *version, keys, counts, s, layout, row_ids, active);
  }
  static void Gather(Exec& pool, Table& t, const uint32_t* version, const uint32_t* row_ids, size_t num_rows,
                     const int32_t* start, const int32_t* active, size_t chunk, const float* rows,
                     std::byte* values, float* grads, bool* fresh, const std::vector<std::byte*>& slots) {
    const size_t n = ChunkRows(num_rows, *start, *active, chunk), dim = static_cast<size_t>(t.spec().dim);
    t.Gather(On(pool), *version, row_ids + *start, n, values, fresh, slots);
    std::memcpy(grads, rows + static_cast<size_t>(*start) * dim, n * dim * sizeof(float));
  }
  static void Scatter(Exec& pool, Table& t, const uint32_t* version, const uint32_t* row_ids, size_t num_rows,
                      const int32_t* start, const int32_t* active, size_t chunk, const std::byte* values,
                      const std::vector<const std::byte*>& slots, uint32_t* out) {
    t.Scatter(On(pool), *version, row_ids + *start, ChunkRows(num_rows, *start, *active, chunk), values,
              slots);
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
static_assert(Backend<Cpu>);

XLA_FFI_DEFINE_HANDLER_SYMBOL(LookupCpu, Lookup<Cpu>, BindLookup<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(InspectCpu, Inspect<Cpu>, BindInspect<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(InsertCpu, Insert<Cpu>, BindKeys<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RemoveCpu, Remove<Cpu>, BindKeys<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(UpsertCpu, Upsert<Cpu>, BindUpsert<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ClearCpu, Clear<Cpu>, BindClear<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MergeCpu, Merge<Cpu>, BindMerge<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BeginApplyCpu, BeginApply<Cpu>, BindBeginApply<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(GatherCpu, Gather<Cpu>, BindGather<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScatterCpu, Scatter<Cpu>, BindScatter<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SealCpu, Seal<Cpu>, BindOrder<Cpu>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AfterCpu, After<Cpu>, BindOrder<Cpu>());

namespace {

Registry<Table>& Tables() { return Registry<Table>::Get(); }

template <class T>
using HostArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// Hands a vector to NumPy without a copy.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> ToNumpy(std::vector<T>&& data) {
  auto* owned = new std::vector<T>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {owned->data(), {owned->size()}, owner};
}
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> BytesToNumpy(std::vector<std::byte>&& data) {
  auto* owned = new std::vector<std::byte>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  return {owned->data(), {owned->size()}, owner};
}

/// Runs a whole-table call; running out of memory names the table and the operation, as inside XLA.
template <class Body>
auto HostCall(std::string_view name, std::string_view op, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw MakeError(ErrorCode::kResourceExhausted, name, op, "memory for the call", "none",
                    "the table is as it was before: remove rows or give the process more memory");
  }
}

void Create(const std::string& name, int64_t dim, const std::string& dtype, const std::string& kind, double a,
            double b, uint64_t seed, HostArray<float> pool) {
  if (dim < 1 || dim > kMaxDim) {
    throw MakeError(ErrorCode::kInvalidArgument, name, "get_table", "dim in 1.." + std::to_string(kMaxDim),
                    std::to_string(dim), "dim is the width of a row");
  }
  Initializer initializer{Initializer::ParseKind(kind), a, b, seed};
  if (initializer.kind == Initializer::Kind::kPool) {
    if (pool.shape(0) == 0 || pool.shape(0) % static_cast<size_t>(dim) != 0) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "get_table", "a pool of whole rows",
                      std::to_string(pool.shape(0)) + " elements", "see kvjax.initializers.from_pool");
    }
    initializer.pool = std::make_shared<const std::vector<float>>(pool.data(), pool.data() + pool.shape(0));
  }
  TableSpec spec{name, dim, ParseRowType(dtype), std::move(initializer)};
  Tables().Create(name, [&](uint32_t first_version) {
    return std::make_shared<Table>(std::move(spec), std::make_shared<HostSlabs>(), first_version);
  });
}

nb::dict ExportTable(const std::string& name, uint32_t version, bool with_slots) {
  const auto table = Tables().Find(name, "export");
  Snapshot s = HostCall(name, "export", [&] {
    nb::gil_scoped_release release;
    return Export(*table, version, with_slots);
  });
  nb::dict out;
  out["keys"] = ToNumpy(std::move(s.keys));
  out["values"] = BytesToNumpy(std::move(s.values));
  out["freqs"] = ToNumpy(std::move(s.frequencies));
  out["versions"] = ToNumpy(std::move(s.versions));
  out["has_slots"] = BytesToNumpy(std::move(s.has_slots));
  out["offsets"] = ToNumpy(std::move(s.offsets));
  out["last_step"] = s.last_step;
  nb::list slots;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const Slot& slot = s.layout.slots()[i];
    slots.append(nb::make_tuple(slot.name, slot.type, BytesToNumpy(std::move(s.slots[i]))));
  }
  out["slots"] = slots;
  return out;
}

using SlotArray = std::tuple<std::string, std::string, HostArray<uint8_t>>;

uint32_t LoadTable(const std::string& name, uint32_t version, HostArray<int64_t> keys,
                   HostArray<uint8_t> values, HostArray<int64_t> freqs, HostArray<int64_t> versions,
                   HostArray<uint8_t> has_slots, int64_t last_step, const std::vector<SlotArray>& slots) {
  const auto table = Tables().Find(name, "load");
  SnapshotView view;
  view.n = keys.shape(0);
  view.keys = keys.data();
  view.last_step = last_step;
  const auto expect = [&](bool ok, const std::string& what, size_t got) {
    if (!ok) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "load", what, std::to_string(got),
                      "all arrays have one row per key");
    }
  };
  expect(values.shape(0) == view.n * table->row_bytes(),
         std::to_string(view.n * table->row_bytes()) + " bytes of values", values.shape(0));
  expect(freqs.shape(0) == view.n, std::to_string(view.n) + " freqs", freqs.shape(0));
  expect(versions.shape(0) == view.n, std::to_string(view.n) + " versions", versions.shape(0));
  expect(has_slots.shape(0) == view.n, std::to_string(view.n) + " has_slots", has_slots.shape(0));
  view.values = reinterpret_cast<const std::byte*>(values.data());
  view.frequencies = freqs.data();
  view.versions = versions.data();
  view.has_slots = reinterpret_cast<const std::byte*>(has_slots.data());
  for (const auto& [slot, type, bytes] : slots) {
    expect(view.n == 0 || bytes.shape(0) % view.n == 0, "whole rows of slot " + slot, bytes.shape(0));
    view.layout.Add(slot, type, view.n == 0 ? 0 : bytes.shape(0) / view.n);
    view.slots.push_back(reinterpret_cast<const std::byte*>(bytes.data()));
  }
  if (view.n == 0) view.layout = {}, view.slots.clear();
  return HostCall(name, "load", [&] {
    nb::gil_scoped_release release;
    return Load(*table, version, view);
  });
}

template <class F>
nb::capsule Capsule(F* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, F, XLA_FFI_CallFrame*>, "not an XLA FFI handler");
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Handlers() {
  nb::dict d;
  d["kvjax_lookup"] = Capsule(LookupCpu);
  d["kvjax_inspect"] = Capsule(InspectCpu);
  d["kvjax_insert"] = Capsule(InsertCpu);
  d["kvjax_remove"] = Capsule(RemoveCpu);
  d["kvjax_upsert"] = Capsule(UpsertCpu);
  d["kvjax_clear"] = Capsule(ClearCpu);
  d["kvjax_merge"] = Capsule(MergeCpu);
  d["kvjax_begin_apply"] = Capsule(BeginApplyCpu);
  d["kvjax_gather"] = Capsule(GatherCpu);
  d["kvjax_scatter"] = Capsule(ScatterCpu);
  d["kvjax_seal"] = Capsule(SealCpu);
  d["kvjax_after"] = Capsule(AfterCpu);
  return d;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashStrings(const std::vector<nb::bytes>& items, uint64_t salt) {
  std::vector<int64_t> out(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    out[i] = static_cast<int64_t>(HashBytes(items[i].c_str(), items[i].size(), salt));
  }
  return ToNumpy(std::move(out));
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashIntegers(HostArray<int64_t> items, uint64_t salt) {
  std::vector<int64_t> out(items.shape(0));
  // Mix is a bijection that fixes 0; adding the mixed salt first gives each salt a bijection of its own.
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] =
        static_cast<int64_t>(Mix(static_cast<uint64_t>(items.data()[i]) + Mix(salt) + 0x9E3779B97F4A7C15ull));
  }
  return ToNumpy(std::move(out));
}

}  // namespace
}  // namespace kvjax

NB_MODULE(_cpu, m) {
  using namespace kvjax;
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      PyObject* type = error.code() == ErrorCode::kInvalidArgument     ? PyExc_ValueError
                       : error.code() == ErrorCode::kNotFound          ? PyExc_KeyError
                       : error.code() == ErrorCode::kResourceExhausted ? PyExc_MemoryError
                                                                       : PyExc_RuntimeError;
      PyErr_SetString(type, error.what());
    }
  });
  m.attr("MAX_DIM") = kMaxDim;
  m.attr("SEAL") = kSeal;
  m.attr("NUM_BUCKETS") = kNumBuckets;
  m.def("handlers", &Handlers, "XLA FFI handlers by target name.");
  m.def("create", &Create, nb::arg("name"), nb::arg("dim"), nb::arg("dtype"), nb::arg("kind"), nb::arg("a"),
        nb::arg("b"), nb::arg("seed"), nb::arg("pool"));
  m.def("drop", [](const std::string& name) { Tables().Drop(name); });
  m.def("version", [](const std::string& name) { return Tables().Find(name, "version")->version(); });
  m.def("size",
        [](const std::string& name, uint32_t version) { return Tables().Find(name, "size")->Size(version); });
  m.def("export_table", &ExportTable, nb::arg("name"), nb::arg("version"), nb::arg("with_slots"));
  m.def("load_table", &LoadTable, nb::arg("name"), nb::arg("version"), nb::arg("keys"), nb::arg("values"),
        nb::arg("freqs"), nb::arg("versions"), nb::arg("has_slots"), nb::arg("last_step"), nb::arg("slots"));
  m.def("hash_strings", &HashStrings, nb::arg("items"), nb::arg("salt"));
  m.def("hash_integers", &HashIntegers, nb::arg("items"), nb::arg("salt"));
}
