// The whole-table calls that Python makes by itself, outside of compiled programs, on whatever type of table.
//
// All of them release the GIL while they work on a table, because a write may call Python (sinks, scores)
// from another thread.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/stats.h"
#include "kvjax/ffi/python/callbacks.h"
#include "kvjax/ffi/python/common.h"

namespace kvjax {

/// What these calls want of a table; cpu/table.h says what each of them means.
template <class T>
concept WholeTable = requires(T& table, const TableSpec& spec, const std::string& storage,
                              std::string_view name, uint32_t version, bool raises, size_t n,
                              const SnapshotView& rows, const SnapshotSpace& space, const LoadHead& head,
                              typename T::Loaded loaded, CursorToken token, Sink sink, ScoreFunction score) {
  { T::Make(spec, storage, version, n) } -> std::same_as<std::shared_ptr<T>>;
  { table.spec() } -> std::convertible_to<const TableSpec&>;
  { table.row_bytes() } -> std::convertible_to<size_t>;
  { table.version() } -> std::convertible_to<uint32_t>;
  table.Settle();
  { table.SettledVersion() } -> std::convertible_to<uint32_t>;
  { table.Size(version) } -> std::convertible_to<size_t>;
  { table.Export(version, true, name, raises) } -> std::same_as<Snapshot>;
  { table.ExportAdmission(version, name, raises) } -> std::same_as<AdmissionState>;
  { table.NextOf(*table.Freeze(version, true, name, raises).first, space) } -> std::same_as<size_t>;
  { table.BeginLoad(version, head) } -> std::same_as<typename T::Loaded>;
  table.AddLoaded(loaded, rows);
  table.EndLoad(loaded);
  { table.CommitLoad(std::move(loaded)) } -> std::convertible_to<uint32_t>;
  { table.OpenCursor(version) } -> std::same_as<CursorToken>;
  table.CloseCursor(token);
  { table.ExportSince(version, token, true) } -> std::same_as<Delta>;
  { table.Stats(raises) } -> std::same_as<Statistics>;
  { table.Rows() } -> std::convertible_to<std::tuple<size_t, uint32_t>>;
  { table.Layout() } -> std::convertible_to<SlotLayout>;
  table.Reserve(version, n);
  table.SetSink(std::move(sink));
  table.SetScore(std::move(score));
};

/// One of the shards of this process; a table that is not sharded is its own shard 0.
template <class T>
std::shared_ptr<T> ShardOf(std::string_view name, std::string_view op, size_t shard) {
  return Registry<T>::Get().At(name, op, shard);
}

/// Runs body(); running out of memory or disk names the table and the operation, as inside XLA.
template <class Body>
auto WithMemory(std::string_view name, std::string_view op, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw Caught(name, op);
  }
}

/// The same for a call on a table, without the GIL.
template <class Body>
auto HostCall(std::string_view name, std::string_view op, Body body) {
  return WithMemory(name, op, [&] {
    const WithoutGil others_run;
    return body();
  });
}

/// body(table) on a shard.
template <class T, class Body>
auto OnShard(std::string_view name, std::string_view op, size_t shard, Body body) {
  const auto table = ShardOf<T>(name, op, shard);
  return HostCall(name, op, [&] { return body(*table); });
}

inline AdmissionSpec ParseAdmission(const nb::dict& o) {
  AdmissionSpec spec;
  spec.kind = AdmissionSpec::ParseKind(ToString(o["kind"]));
  spec.unadmitted = AdmissionSpec::ParseUnadmitted(ToString(o["unadmitted"]));
  spec.shared_key = static_cast<uint64_t>(nb::cast<int64_t>(o["shared_key"]));
  spec.threshold = nb::cast<uint32_t>(o["threshold"]);
  spec.cells = nb::cast<uint32_t>(o["cells"]);
  spec.halve_every = nb::cast<int64_t>(o["halve_every"]);
  spec.max_age = nb::cast<int64_t>(o["max_age"]);
  spec.max_waiting = nb::cast<uint64_t>(o["max_waiting"]);
  spec.probability = nb::cast<double>(o["probability"]);
  spec.seed = nb::cast<uint64_t>(o["seed"]);
  return spec;
}

inline Initializer ParseInitializer(std::string_view name, int64_t dim, const nb::dict& o) {
  Initializer made;
  made.kind = Initializer::ParseKind(ToString(o["kind"]));
  made.seed = nb::cast<uint64_t>(o["seed"]);
  const auto segments = nb::cast<nb::list>(o["segments"]);
  const size_t n = segments.size();
  if (n > Generator::kMostSegments) throw InitializerError(std::to_string(n) + " segments");
  for (size_t i = 0; i < n; ++i) {
    const auto each = nb::cast<nb::tuple>(segments[i]);  // end, kind, a, b
    const Distribution of = {ParseDistribution(ToString(each[1])), nb::cast<double>(each[2]),
                             nb::cast<double>(each[3])};
    made.Set(i, {nb::cast<int64_t>(each[0]), of});
  }
  if (n > 0 && made.segments[n - 1].end != dim) throw InitializerError("segments of rows of another width");
  const auto pool = nb::cast<HostArray<float>>(o["pool"]);
  if (made.kind == Initializer::Kind::kPool) {
    if (pool.shape(0) == 0 || pool.shape(0) % static_cast<size_t>(dim) != 0)
      throw PoolError(name, pool.shape(0));
    made.pool = std::make_shared<const std::vector<float>>(pool.data(), pool.data() + pool.shape(0));
  }
  return made;
}

/// make(i) builds shard shards[i] of a table for devices[i]. options: what _spec.native.native_options
/// says; owns_shared: which of them have the row that unadmitted keys share.
template <class T>
auto ShardMaker(std::string_view name, const nb::dict& o, const std::vector<int32_t>& devices,
                const std::vector<uint32_t>& shards, const std::vector<bool>& owns_shared,
                uint32_t first_version) {
  const auto dim = nb::cast<int64_t>(o["dim"]);
  if (dim < 1 || dim > kMaxDim) throw DimError(name, kMaxDim, dim);
  TableSpec spec{.name = std::string(name), .dim = dim, .type = ParseRowType(ToString(o["dtype"]))};
  spec.initializer = ParseInitializer(name, dim, o);
  if (!o["admit"].is_none()) spec.admission = ParseAdmission(nb::cast<nb::dict>(o["admit"]));
  spec.max_capacity = nb::cast<size_t>(o["max_capacity"]);
  spec.on_full = ParseOnFull(ToString(o["on_full"]));
  spec.policy = Policy::Parse(ToString(o["policy"]));
  spec.evict_every = nb::cast<int64_t>(o["evict_every"]);
  spec.count_batches = nb::cast<bool>(o["count_batches"]);
  spec.placement = nb::cast<int64_t>(o["placement"]);
  spec.sharded = nb::cast<bool>(o["sharded"]);
  const auto capacity = nb::cast<size_t>(o["capacity"]);
  const auto storage = ToString(o["storage"]);
  ScoreFunction score = MakeScore(name, nb::object(o["score"]));
  const auto engine =
      o["engine"].is_none() ? std::nullopt : std::optional(MakeEngine(name, nb::object(o["engine"])));
  return [=](size_t i) mutable {
    spec.device = devices[i];
    spec.shard = shards[i];
    spec.owns_shared = owns_shared[i];
    auto table = T::Make(spec, storage, first_version, capacity);
    if constexpr (requires { table->SetEngine(*engine); }) {
      if (engine) table->SetEngine(*engine);
    }
    table->SetScore(score);  // a copy: the last reference must not be freed under the registry's lock
    return table;
  };
}

/// The shards of this process: devices, where they live, [HOME] for a table that is not sharded; and
/// as above.
template <class T>
void Create(std::string_view name, const nb::dict& o, const nb::sequence& devices, const nb::sequence& shards,
            const nb::sequence& owns_shared, uint32_t first_version) {
  WithMemory(name, "get_table", [&] {
    const auto where = ToVector<int32_t>(devices);
    auto make =
        ShardMaker<T>(name, o, where, ToVector<uint32_t>(shards), ToVector<bool>(owns_shared), first_version);
    HostCall(name, "get_table", [&] { Registry<T>::Get().Create(std::string(name), where, make); });
  });
}

inline void AdmissionToNumpy(AdmissionState&& admission, nb::dict& out) {
  out[field::kPendingKeys] = ToNumpy(std::move(admission.keys));
  out[field::kPendingCounts] = ToNumpy(std::move(admission.counts));
  out[field::kSketch] = ToNumpy(std::move(admission.cells));
}

template <class T>
nb::dict ExportTable(std::string_view name, size_t shard, uint32_t version, bool with_slots,
                     std::string_view op, bool raises) {
  return WithMemory(name, op, [&] {
    const auto table = ShardOf<T>(name, op, shard);
    Snapshot s;
    AdmissionState admission;
    HostCall(name, op, [&] {
      s = table->Export(version, with_slots, op, raises);
      admission = table->ExportAdmission(version, op, raises);
    });
    nb::dict out = SnapshotToNumpy(std::move(s));
    AdmissionToNumpy(std::move(admission), out);
    return out;
  });
}

/// Everything that kvjax.Stats says, by its names.
template <class T>
nb::dict TableStats(std::string_view name, size_t shard, bool raises) {
  const Statistics stats = OnShard<T>(name, "stats", shard, [&](const T& t) { return t.Stats(raises); });
  nb::dict out, evicted;
  for (const auto& [field, number] : kStatistics) out[field] = stats.*number;
  for (const auto& [reason, rows] : stats.evicted) {
    if (rows > 0) evicted[reason.c_str()] = rows;
  }
  out["evicted"] = evicted;
  out["probe_mean"] = stats.probe_mean;
  out["probe_longest"] = stats.probe_longest;
  return out;
}

/// The number of rows and the version that they belong to.
template <class T>
std::tuple<size_t, uint32_t> Rows(std::string_view name, size_t shard) {
  return OnShard<T>(name, "repr", shard, [](const T& table) { return table.Rows(); });
}

/// Slots as (name, type), in the optimizer's order.
template <class T>
nb::list TableSlots(std::string_view name, size_t shard) {
  const SlotLayout layout = OnShard<T>(name, "slot", shard, [](const T& table) { return table.Layout(); });
  nb::list slots;
  for (const Slot& slot : layout.slots()) slots.append(nb::make_tuple(ToStr(slot.name), ToStr(slot.type)));
  return slots;
}

template <class T>
void SetSink(std::string_view name, size_t shard, nb::object sink) {
  WithMemory(name, "on_evict", [&] {
    Sink call = MakeSink(name, std::move(sink));
    OnShard<T>(name, "on_evict", shard, [&](T& table) { table.SetSink(std::move(call)); });
  });
}

template <WholeTable T>
void BindTables(nb::module_& m) {
  m.attr("HOME") = T::kHome;
  m.def(
      "create", &Create<T>, nb::arg("name"), nb::arg("options"), nb::arg("devices"), nb::arg("shards"),
      nb::arg("owns_shared"), nb::arg("first_version"),
      nb::sig("def create(name: str, options: dict[str, object], devices: collections.abc.Sequence[int], "
              "shards: collections.abc.Sequence[int], "
              "owns_shared: collections.abc.Sequence[bool], first_version: int) -> None"),
      "Makes the shards of a table that live in this process.\n\n"
      "options: what a table is, by the keys dim, dtype, kind, segments, pool, seed (of the initializer), "
      "storage,\n"
      "placement, sharded, capacity, max_capacity, on_full, admit (None, or a dict of kvjax.admit), policy,\n"
      "evict_every, count_batches, score and engine (of storage.External).\n"
      "devices, shards, owns_shared: for each shard the device it lives on, its number,\n"
      "and whether it has the row that unadmitted keys share; [HOME], [0], [True] for a table in one place.");
  m.def(
      "drop",
      [](std::string_view name, std::string_view op, std::optional<uint32_t> only_at) {
        return HostCall(name, op, [&] { return Registry<T>::Get().Drop(name, op, only_at); });
      },
      nb::arg("name"), nb::arg("op") = "drop_table", nb::arg("only_at") = nb::none(),
      "Forgets a table, unless it has been written since version `only_at`. Returns the first version of a "
      "later\n"
      "table of the name.");
  m.def(
      "version",
      [](std::string_view name, size_t shard) {
        return OnShard<T>(name, "version", shard, [](const T& table) { return table.SettledVersion(); });
      },
      nb::arg("name"), nb::arg("shard"), "The live version, once no write is under way.");
  m.def(
      "size",
      [](std::string_view name, size_t shard, uint32_t version, std::string_view op) {
        return OnShard<T>(name, op, shard, [&](const T& table) { return table.Size(version, op); });
      },
      nb::arg("name"), nb::arg("shard"), nb::arg("version"), nb::arg("op") = "size",
      "The number of rows of a shard. op: of the call that asks, for errors.");
  m.def(
      "reserve",
      [](std::string_view name, size_t shard, uint32_t version, size_t n) {
        OnShard<T>(name, "reserve", shard, [&](T& table) { table.Reserve(version, n); });
      },
      nb::arg("name"), nb::arg("shard"), nb::arg("version"), nb::arg("n"), "Makes space for n rows in all.");
  m.def("export_table", &ExportTable<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        nb::arg("with_slots"), nb::arg("op") = "export", nb::arg("raises") = true,
        nb::sig("def export_table(name: str, shard: int, version: int, with_slots: bool, op: str = 'export', "
                "raises: bool = True) -> dict[str, object]"),
        "The snapshot of a shard as flat arrays, sorted by (bucket, key): keys, values, freqs, versions, "
        "has_slots,\n"
        "pinned, offsets, last_step, slots as (name, type, bytes), and of its admission pending_keys,\n"
        "pending_counts and sketch. op: of the call that wants it, for errors. raises: whether to raise what "
        "other\n"
        "calls have been refused for, which a device says late.");
  m.def("stats", &TableStats<T>, nb::arg("name"), nb::arg("shard"), nb::arg("raises") = true,
        nb::sig("def stats(name: str, shard: int, raises: bool = True) -> dict[str, typing.Any]"),
        "What a shard holds and has done, by name; \"evicted\" is a dict of rows by reason. raises: as of\n"
        "export_table.");
  m.def("rows", &Rows<T>, nb::arg("name"), nb::arg("shard"),
        "The number of rows, and the version they belong to.");
  m.def("slots", &TableSlots<T>, nb::arg("name"), nb::arg("shard"),
        nb::sig("def slots(name: str, shard: int) -> list[tuple[str, str]]"),
        "The optimizer's slots as (name, type), in its order.");
  m.def("set_sink", &SetSink<T>, nb::arg("name"), nb::arg("shard"), nb::arg("sink").none(),
        nb::sig("def set_sink(name: str, shard: int, sink: collections.abc.Callable[[dict[str, object], "
                "str], None] | None) "
                "-> None"),
        "Sets the function that is given evicted rows, as (snapshot, reason).");
}

}  // namespace kvjax
