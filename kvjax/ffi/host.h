// The whole-table calls that Python makes by itself, outside of compiled programs.
//
// All of them let go of the GIL while they work on a table, because a write may call Python (sinks, scores)
// from another thread.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kvjax/ffi/callbacks.h"
#include "kvjax/ffi/core/storage.h"
#include "kvjax/ffi/core/table.h"
#include "kvjax/ffi/handlers/registry.h"
#include "kvjax/ffi/handlers/training.h"

namespace kvjax {

namespace nb = nanobind;

inline Registry<Table>& Tables() { return Registry<Table>::Get(); }

template <class T>
using HostArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// Runs a call on a table without the GIL; running out of memory names the table and the operation, as inside
/// XLA.
template <class Body>
auto HostCall(std::string_view name, std::string_view op, Body body) {
  const nb::gil_scoped_release release;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw MakeError(ErrorCode::kResourceExhausted, name, op, "memory for the call", "none",
                    "the table is as it was before: remove rows or give the process more memory");
  }
}

inline AdmissionSpec ParseAdmission(const nb::dict& o) {
  using Kind = AdmissionSpec::Kind;
  using Unadmitted = AdmissionSpec::Unadmitted;
  const auto kind = nb::cast<std::string>(o["kind"]), unadmitted = nb::cast<std::string>(o["unadmitted"]);
  AdmissionSpec spec;
  const auto choose = [&](const std::string& text, auto&& choices) {
    for (const auto& [word, choice] : choices) {
      if (text == word) return choice;
    }
    throw MakeError(ErrorCode::kInvalidArgument, "", "get_table", "an admission of kvjax.admit", text,
                    "call kvjax's Python functions");
  };
  spec.kind = choose(kind, std::vector<std::pair<const char*, Kind>>{{"min_count", Kind::kMinCount},
                                                                     {"sketch", Kind::kSketch},
                                                                     {"probability", Kind::kProbability}});
  spec.unadmitted =
      choose(unadmitted, std::vector<std::pair<const char*, Unadmitted>>{{"init", Unadmitted::kInitial},
                                                                         {"zeros", Unadmitted::kZeros},
                                                                         {"shared", Unadmitted::kShared}});
  spec.shared_key = static_cast<uint64_t>(nb::cast<int64_t>(o["shared_key"]));
  spec.threshold = nb::cast<uint32_t>(o["threshold"]);
  spec.cells = nb::cast<uint32_t>(o["cells"]);
  spec.halve_every = nb::cast<int64_t>(o["halve_every"]);
  spec.probability = nb::cast<double>(o["probability"]);
  spec.seed = nb::cast<uint64_t>(o["seed"]);
  return spec;
}

/// options: what kvjax._spec.TableSpec.host_options says.
inline void Create(const std::string& name, const nb::dict& o) {
  const auto dim = nb::cast<int64_t>(o["dim"]);
  if (dim < 1 || dim > kMaxDim) {
    throw MakeError(ErrorCode::kInvalidArgument, name, "get_table", "dim in 1.." + std::to_string(kMaxDim),
                    std::to_string(dim), "dim is the width of a row");
  }
  TableSpec spec{.name = name, .dim = dim, .type = ParseRowType(nb::cast<std::string>(o["dtype"]))};
  spec.initializer = {Initializer::ParseKind(nb::cast<std::string>(o["kind"])), nb::cast<double>(o["a"]),
                      nb::cast<double>(o["b"]), nb::cast<uint64_t>(o["seed"])};
  if (spec.initializer.kind == Initializer::Kind::kPool) {
    const auto pool = nb::cast<HostArray<float>>(o["pool"]);
    if (pool.shape(0) == 0 || pool.shape(0) % static_cast<size_t>(dim) != 0) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "get_table", "a pool of whole rows",
                      std::to_string(pool.shape(0)) + " elements", "see kvjax.initializers.from_pool");
    }
    spec.initializer.pool =
        std::make_shared<const std::vector<float>>(pool.data(), pool.data() + pool.shape(0));
  }
  if (!o["admit"].is_none()) spec.admission = ParseAdmission(nb::cast<nb::dict>(o["admit"]));
  spec.max_capacity = nb::cast<size_t>(o["max_capacity"]);
  spec.on_full = ParseOnFull(nb::cast<std::string>(o["on_full"]));
  spec.policy = Policy::Parse(nb::cast<std::string>(o["policy"]));
  spec.evict_every = nb::cast<int64_t>(o["evict_every"]);
  spec.count_batches = nb::cast<bool>(o["count_batches"]);
  const auto capacity = nb::cast<size_t>(o["capacity"]);
  const auto storage = nb::cast<std::string>(o["storage"]);
  ScoreFunction score = MakeScore(name, nb::object(o["score"]));
  HostCall(name, "get_table", [&] {
    Tables().Create(name, [&](uint32_t first_version) {
      auto table = std::make_shared<Table>(std::move(spec), MakeSlabs(storage, name), first_version);
      table->Reserve(first_version, capacity);
      table->SetScore(score);  // a copy: the last reference must not go under the registry's lock
      return table;
    });
  });
}

inline nb::dict ExportTable(const std::string& name, uint32_t version, bool with_slots) {
  const auto table = Tables().Find(name, "export");
  Snapshot s;
  AdmissionState admission;
  HostCall(name, "export", [&] {
    s = table->Export(version, with_slots);
    admission = table->ExportAdmission(version);
  });
  nb::dict out = SnapshotToNumpy(std::move(s));
  out["pending_keys"] = ToNumpy(std::move(admission.keys));
  out["pending_counts"] = ToNumpy(std::move(admission.counts));
  out["sketch"] = ToNumpy(std::move(admission.cells));
  return out;
}

/// rows: what ExportTable gives, as flat arrays; slots as (name, type, bytes).
inline uint32_t LoadTable(const std::string& name, uint32_t version, const nb::dict& in) {
  using SlotArray = std::tuple<std::string, std::string, HostArray<uint8_t>>;
  const auto table = Tables().Find(name, "load");
  const auto keys = nb::cast<HostArray<int64_t>>(in["keys"]);
  const size_t n = keys.shape(0);
  const auto expect = [&](bool ok, const std::string& what, size_t got) {
    if (!ok) {
      throw MakeError(ErrorCode::kInvalidArgument, name, "load", what, std::to_string(got),
                      "all arrays have one row per key");
    }
  };
  const auto longs = [&](const char* field) {
    const auto array = nb::cast<HostArray<int64_t>>(in[field]);
    expect(array.shape(0) == n, std::to_string(n) + " " + field, array.shape(0));
    return array;
  };
  const auto bytes = [&](const char* field, size_t row) {
    const auto array = nb::cast<HostArray<uint8_t>>(in[field]);
    expect(array.shape(0) == n * row, std::to_string(n * row) + " bytes of " + field, array.shape(0));
    return array;
  };
  const auto values = bytes("values", table->row_bytes());
  const auto has_slots = bytes("has_slots", 1), pinned = bytes("pinned", 1);
  const auto freqs = longs("freqs"), versions = longs("versions");
  const auto slots = nb::cast<std::vector<SlotArray>>(in["slots"]);
  const bool with_counts = in.contains("pending_keys");  // else those of the table stay
  HostArray<int64_t> pending_keys, pending_counts;
  HostArray<uint16_t> sketch;
  if (with_counts) {
    pending_keys = nb::cast<HostArray<int64_t>>(in["pending_keys"]);
    pending_counts = nb::cast<HostArray<int64_t>>(in["pending_counts"]);
    sketch = nb::cast<HostArray<uint16_t>>(in["sketch"]);
    expect(pending_keys.shape(0) == pending_counts.shape(0), "one count per pending key",
           pending_counts.shape(0));
  }

  SnapshotView view{.n = n,
                    .keys = keys.data(),
                    .values = reinterpret_cast<const std::byte*>(values.data()),
                    .frequencies = freqs.data(),
                    .versions = versions.data(),
                    .has_slots = reinterpret_cast<const std::byte*>(has_slots.data()),
                    .pinned = reinterpret_cast<const std::byte*>(pinned.data()),
                    .slots = {},
                    .layout = {},
                    .last_step = nb::cast<int64_t>(in["last_step"])};
  for (const auto& [slot, type, array] : slots) {
    if (n == 0) break;
    expect(array.shape(0) % n == 0, "whole rows of slot " + slot, array.shape(0));
    view.layout.Add(slot, type, array.shape(0) / n);
    view.slots.push_back(reinterpret_cast<const std::byte*>(array.data()));
  }
  return HostCall(name, "load", [&] {
    if (!with_counts) return table->Load(version, view, table->ExportAdmission(version));
    const AdmissionState admission{{pending_keys.data(), pending_keys.data() + pending_keys.shape(0)},
                                   {pending_counts.data(), pending_counts.data() + pending_counts.shape(0)},
                                   {sketch.data(), sketch.data() + sketch.shape(0)}};
    return table->Load(version, view, admission);
  });
}

/// Everything that kvjax.Stats says, by its names.
inline nb::dict TableStats(const std::string& name) {
  const auto table = Tables().Find(name, "stats");
  nb::dict out, evicted;
  KeyIndex::Probes probes;
  std::map<std::string, uint64_t, std::less<>> evicted_rows;
  std::vector<std::pair<const char*, uint64_t>> numbers;
  HostCall(name, "stats", [&] {
    table->Observe([&](const Contents& c) {
      const RowStore& store = c.store;
      probes = store.index().SampleProbes();
      evicted_rows = c.counters.evicted;
      numbers = {{"size", store.size()},
                 {"capacity", store.index().room()},
                 {"places", store.index().capacity()},
                 {"index_bytes", store.index().bytes()},
                 {"value_bytes", store.value_bytes()},
                 {"header_bytes", store.header_bytes()},
                 {"slot_bytes", store.slot_bytes()},
                 {"admission_bytes", c.admission.bytes()},
                 {"tracked", c.admission.tracked()},
                 {"last_step", static_cast<uint64_t>(c.last_step)},
                 {"hits", c.counters.hits},
                 {"misses", c.counters.misses},
                 {"inserted", c.counters.inserted},
                 {"removed", c.counters.removed},
                 {"admitted", c.counters.admitted},
                 {"refused", c.counters.refused},
                 {"occurrences", c.counters.occurrences},
                 {"distinct", c.counters.distinct},
                 {"over_capacity", c.counters.over_capacity}};
    });
  });
  for (const auto& [field, value] : numbers) out[field] = value;
  for (const auto& [reason, rows] : evicted_rows) {
    if (rows > 0) evicted[reason.c_str()] = rows;
  }
  out["evicted"] = evicted;
  out["probe_mean"] = probes.mean;
  out["probe_longest"] = probes.longest;
  return out;
}

/// The number of rows and the version that they belong to.
inline std::tuple<size_t, uint32_t> Rows(const std::string& name) {
  const auto table = Tables().Find(name, "repr");
  return HostCall(name, "repr", [&] {
    return table->Observe([&](const Contents& c) { return std::tuple(c.store.size(), table->version()); });
  });
}

/// Slots as (name, type), in the optimizer's order.
inline std::vector<std::tuple<std::string, std::string>> TableSlots(const std::string& name) {
  const auto table = Tables().Find(name, "slot");
  return HostCall(name, "slot", [&] {
    return table->Observe([](const Contents& c) {
      std::vector<std::tuple<std::string, std::string>> slots;
      for (const Slot& slot : c.store.layout().slots()) slots.emplace_back(slot.name, slot.type);
      return slots;
    });
  });
}

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashStrings(const std::vector<nb::bytes>& items,
                                                                uint64_t salt) {
  std::vector<int64_t> out(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    out[i] = static_cast<int64_t>(HashBytes(items[i].c_str(), items[i].size(), salt));
  }
  return ToNumpy(std::move(out));
}

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashIntegers(HostArray<int64_t> items, uint64_t salt) {
  std::vector<int64_t> out(items.shape(0));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<int64_t>(Salted(static_cast<uint64_t>(items.data()[i]), salt));
  }
  return ToNumpy(std::move(out));
}

inline void BindHost(nb::module_& m) {
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
  m.def("create", &Create, nb::arg("name"), nb::arg("options"));
  m.def(
      "drop", [](const std::string& name) { Tables().Drop(name); }, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "version", [](const std::string& name) { return Tables().Find(name, "version")->SettledVersion(); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("size", [](const std::string& name, uint32_t version) {
    const auto table = Tables().Find(name, "size");
    return HostCall(name, "size", [&] { return table->Size(version); });
  });
  m.def("reserve", [](const std::string& name, uint32_t version, size_t n) {
    const auto table = Tables().Find(name, "reserve");
    HostCall(name, "reserve", [&] { table->Reserve(version, n); });
  });
  m.def("export_table", &ExportTable, nb::arg("name"), nb::arg("version"), nb::arg("with_slots"));
  m.def("load_table", &LoadTable, nb::arg("name"), nb::arg("version"), nb::arg("rows"));
  m.def("stats", &TableStats, nb::arg("name"));
  m.def("rows", &Rows, nb::arg("name"));
  m.def("slots", &TableSlots, nb::arg("name"));
  m.def(
      "set_sink",
      [](const std::string& name, nb::object sink) {
        const auto table = Tables().Find(name, "on_evict");
        Sink call = MakeSink(name, std::move(sink));
        HostCall(name, "on_evict", [&] { table->SetSink(std::move(call)); });
      },
      nb::arg("name"), nb::arg("sink").none());
  m.def("hash_strings", &HashStrings, nb::arg("items"), nb::arg("salt"));
  m.def("hash_integers", &HashIntegers, nb::arg("items"), nb::arg("salt"));
}

}  // namespace kvjax
