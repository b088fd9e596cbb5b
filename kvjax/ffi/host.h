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
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/core/storage.h"
#include "kvjax/ffi/core/table.h"
#include "kvjax/ffi/handlers/errors.h"
#include "kvjax/ffi/handlers/registry.h"
#include "kvjax/ffi/handlers/training.h"

namespace kvjax {

namespace nb = nanobind;

inline Registry<Table>& Tables() { return Registry<Table>::Get(); }

template <class T>
using HostArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// One of the shards of this process; a table that is not spread is its own shard 0.
inline std::shared_ptr<Table> ShardOf(std::string_view name, std::string_view op, size_t shard) {
  const auto all = Tables().All(name, op);
  if (shard < all.size()) return all[shard];
  throw MakeError(ErrorCode::kNotFound, name, op,
                  "one of the " + std::to_string(all.size()) + " shards of this process",
                  std::to_string(shard), "call kvjax's Python functions");
}

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

/// make(first_version, i) builds shard shards[i] of a table. options: what kvjax._spec.TableSpec.host_options
/// says; owns_shared: which of them have the row that unadmitted keys share.
inline auto ShardMaker(const std::string& name, const nb::dict& o, const std::vector<uint32_t>& shards,
                       const std::vector<bool>& owns_shared) {
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
  spec.spread = nb::cast<bool>(o["spread"]);
  const auto capacity = nb::cast<size_t>(o["capacity"]);
  const auto storage = nb::cast<std::string>(o["storage"]);
  ScoreFunction score = MakeScore(name, nb::object(o["score"]));
  return [=](uint32_t first_version, size_t i) mutable {
    spec.shard = shards[i];
    spec.owns_shared = owns_shared[i];
    auto table = std::make_shared<Table>(spec, MakeSlabs(storage, name), first_version);
    table->Reserve(first_version, capacity);
    table->SetScore(score);  // a copy: the last reference must not go under the registry's lock
    return table;
  };
}

/// The shards of this process: devices, where they live, [EVERY_DEVICE] for a table that is not spread; and
/// as above.
inline void Create(const std::string& name, const nb::dict& o, const std::vector<int32_t>& devices,
                   const std::vector<uint32_t>& shards, const std::vector<bool>& owns_shared) {
  auto make = ShardMaker(name, o, shards, owns_shared);
  HostCall(name, "get_table", [&] { Tables().Create(name, devices, make); });
}

inline nb::dict ExportTable(const std::string& name, size_t shard, uint32_t version, bool with_slots) {
  const auto table = ShardOf(name, "export", shard);
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

/// Everything that kvjax.Stats says, by its names.
inline nb::dict TableStats(const std::string& name, size_t shard) {
  const auto table = ShardOf(name, "stats", shard);
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
                 {"exchanged_keys", c.counters.exchanged_keys},
                 {"bytes_to_owners", c.counters.bytes_to_owners},
                 {"bytes_from_owners", c.counters.bytes_from_owners},
                 {"rounds", c.counters.rounds},
                 {"extra_rounds", c.counters.extra_rounds},
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
inline std::tuple<size_t, uint32_t> Rows(const std::string& name, size_t shard) {
  const auto table = ShardOf(name, "repr", shard);
  return HostCall(name, "repr", [&] {
    return table->Observe([&](const Contents& c) { return std::tuple(c.store.size(), table->version()); });
  });
}

/// Slots as (name, type), in the optimizer's order.
inline std::vector<std::tuple<std::string, std::string>> TableSlots(const std::string& name, size_t shard) {
  const auto table = ShardOf(name, "slot", shard);
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

/// The shard of each key by its virtual bucket.
inline nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> Owners(HostArray<int64_t> keys, uint32_t shards) {
  std::vector<int32_t> out(keys.shape(0));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<int32_t>(OwnerOf(static_cast<uint64_t>(keys.data()[i]), shards));
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
  m.attr("TALLY_WORDS") = Tally::kWords;
  m.attr("FACT_WORDS") = ShardFacts::kWords;
  m.attr("EVERY_DEVICE") = Registry<Table>::kEveryDevice;
  m.def("create", &Create, nb::arg("name"), nb::arg("options"), nb::arg("devices"), nb::arg("shards"),
        nb::arg("owns_shared"));
  m.def("set_process", [](uint32_t process) { Failures::Get().SetProcess(process); });
  m.def("owners", &Owners, nb::arg("keys"), nb::arg("shards"));
  m.def(
      "drop", [](const std::string& name) { Tables().Drop(name); }, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "version",
      [](const std::string& name, size_t shard) { return ShardOf(name, "version", shard)->SettledVersion(); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("size", [](const std::string& name, size_t shard, uint32_t version) {
    const auto table = ShardOf(name, "size", shard);
    return HostCall(name, "size", [&] { return table->Size(version); });
  });
  m.def("reserve", [](const std::string& name, size_t shard, uint32_t version, size_t n) {
    const auto table = ShardOf(name, "reserve", shard);
    HostCall(name, "reserve", [&] { table->Reserve(version, n); });
  });
  m.def("export_table", &ExportTable, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        nb::arg("with_slots"));
  m.def("stats", &TableStats, nb::arg("name"), nb::arg("shard"));
  m.def("rows", &Rows, nb::arg("name"), nb::arg("shard"));
  m.def("slots", &TableSlots, nb::arg("name"), nb::arg("shard"));
  m.def(
      "set_sink",
      [](const std::string& name, size_t shard, nb::object sink) {
        const auto table = ShardOf(name, "on_evict", shard);
        Sink call = MakeSink(name, std::move(sink));
        HostCall(name, "on_evict", [&] { table->SetSink(std::move(call)); });
      },
      nb::arg("name"), nb::arg("shard"), nb::arg("sink").none());
  m.def("hash_strings", &HashStrings, nb::arg("items"), nb::arg("salt"));
  m.def("hash_integers", &HashIntegers, nb::arg("items"), nb::arg("salt"));
}

}  // namespace kvjax
