// Shards from Python: contents that are read in full before they replace any, and shards that are made to
// replace those of a table.
#pragma once
#include <nanobind/nanobind.h>

#include <any>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/python/callbacks.h"
#include "kvjax/ffi/python/tables.h"

namespace kvjax {

/// Contents that are read for a table; nothing has changed yet.
template <class T>
struct Prepared {
  std::shared_ptr<T> table;
  typename T::Loaded loaded;
  size_t left;  // rows to come
};

inline void ExpectColumn(bool ok, const std::string& name, const std::string& what, size_t got) {
  if (!ok) throw ColumnError(name, what, got);
}

/// Begins to read contents. in: last_step, rows, slots as (name, type, bytes of one), and what ExportTable
/// gives of the admission.
template <class T>
Prepared<T> BeginLoad(const std::shared_ptr<T>& table, uint32_t version, const nb::dict& in) {
  const std::string& name = table->spec().name;
  LoadHead head;
  head.rows = nb::cast<size_t>(in["rows"]);
  head.last_step = nb::cast<int64_t>(in[field::kLastStep]);
  const bool with_counts = in.contains(field::kPendingKeys);  // else those of the table stay
  if (with_counts) {
    const auto keys = nb::cast<HostArray<int64_t>>(in[field::kPendingKeys]);
    const auto counts = nb::cast<HostArray<int64_t>>(in[field::kPendingCounts]);
    const auto sketch = nb::cast<HostArray<uint16_t>>(in[field::kSketch]);
    ExpectColumn(keys.shape(0) == counts.shape(0), name, "one count per pending key", counts.shape(0));
    head.admission = {{keys.data(), keys.data() + keys.shape(0)},
                      {counts.data(), counts.data() + counts.shape(0)},
                      {sketch.data(), sketch.data() + sketch.shape(0)}};
  }
  for (const nb::handle each : nb::cast<nb::sequence>(in[field::kSlots])) {
    head.layout.Add(ToString(each[0]), ToString(each[1]), nb::cast<size_t>(each[2]));
  }
  return HostCall(name, "load", [&] {
    if (!with_counts) head.admission = table->ExportAdmission(version, "load");
    return Prepared<T>{table, table->BeginLoad(version, head), head.rows};
  });
}

/// For one of the shards of this process.
template <class T>
Prepared<T> BeginLive(std::string_view name, size_t shard, uint32_t version, const nb::dict& in) {
  return WithMemory(name, "load", [&] { return BeginLoad(ShardOf<T>(name, "load", shard), version, in); });
}

/// Reads some of the rows. in: what ExportTable gives, as flat arrays; slots as (name, type, bytes of one,
/// bytes of all).
template <class T>
void AddRows(Prepared<T>& prepared, const nb::dict& in) {
  const T& table = *prepared.table;
  const std::string& name = table.spec().name;
  SnapshotView view;
  view.n = nb::cast<HostArray<int64_t>>(in["keys"]).shape(0);
  ExpectColumn(view.n <= prepared.left, name, std::to_string(prepared.left) + " rows more", view.n);
  std::vector<std::any> arrays;  // what the view points into
  const auto borrow = [&]<class E>(const char* column, size_t width, const E*& to) {
    const auto array = nb::cast<HostArray<NumpyElement<E>>>(in[column]);
    const char* const unit = std::same_as<E, std::byte> ? " bytes of " : " ";
    ExpectColumn(array.shape(0) == view.n * width, name, std::to_string(view.n * width) + unit + column,
                 array.shape(0));
    to = reinterpret_cast<const E*>(array.data());
    arrays.emplace_back(array);
  };
  EachColumn(table.row_bytes(), borrow, view);
  for (const nb::handle each : nb::cast<nb::sequence>(in[field::kSlots])) {
    const auto width = nb::cast<size_t>(each[2]);
    const auto array = nb::cast<HostArray<uint8_t>>(each[3]);
    const std::string slot = ToString(each[0]);
    const size_t bytes = view.n * width;
    ExpectColumn(array.shape(0) == bytes, name, std::to_string(bytes) + " bytes of slot " + slot,
                 array.shape(0));
    view.layout.Add(slot, ToString(each[1]), width);
    view.slots.push_back(reinterpret_cast<const std::byte*>(array.data()));
    arrays.emplace_back(array);
  }
  HostCall(name, "load", [&] { prepared.table->AddLoaded(prepared.loaded, view); });
  prepared.left -= view.n;
}

template <class T>
void AddLoad(Prepared<T>& prepared, const nb::dict& in) {
  WithMemory(prepared.table->spec().name, "load", [&] { AddRows(prepared, in); });
}

/// Once all rows are there.
template <class T>
void EndLoad(Prepared<T>& prepared) {
  const std::string& name = prepared.table->spec().name;
  ExpectColumn(prepared.left == 0, name, std::to_string(prepared.left) + " rows more", 0);
  HostCall(name, "load", [&] { prepared.table->EndLoad(prepared.loaded); });
}

/// Replaces the contents of the table that these were read for; gives its next version.
template <class T>
uint32_t CommitLoad(Prepared<T>& prepared) {
  const std::string& name = prepared.table->spec().name;
  return HostCall(name, "load", [&] {
    Registry<T>::Get().CheckProcess(name, "load");
    return prepared.table->CommitLoad(std::move(prepared.loaded));
  });
}

/// Shards that no call finds yet.
template <class T>
struct Staged {
  std::vector<int32_t> devices;
  std::vector<std::shared_ptr<T>> tables;
};

/// As Create, but for handles of later versions than `version`. The shards in `originals` get the sink.
template <class T>
Staged<T> Stage(std::string_view name, std::string_view op, const nb::dict& o, const nb::sequence& devices,
                const nb::sequence& shards, const nb::sequence& owns_shared, uint32_t version,
                const nb::sequence& originals, const nb::object& sink) {
  return WithMemory(name, op, [&] {
    const uint32_t first = Registry<T>::VersionBehind(version);
    Staged<T> staged{ToVector<int32_t>(devices), {}};
    auto make = ShardMaker<T>(name, o, staged.devices, ToVector<uint32_t>(shards),
                              ToVector<bool>(owns_shared), first);
    for (size_t i = 0; i < staged.devices.size(); ++i) {
      staged.tables.push_back(HostCall(name, op, [&] { return make(i); }));
    }
    for (const size_t i : ToVector<size_t>(originals)) staged.tables.at(i)->SetSink(MakeSink(name, sink));
    return staged;
  });
}

/// Contents for one of them.
template <class T>
Prepared<T> BeginStaged(const Staged<T>& staged, size_t shard, const nb::dict& in) {
  const std::shared_ptr<T>& table = staged.tables.at(shard);
  return WithMemory(table->spec().name, "load", [&] { return BeginLoad(table, table->version(), in); });
}

/// Replaces the shards by them, unless these have been written since `version`.
template <class T>
void Replace(std::string_view name, std::string_view op, uint32_t version, const Staged<T>& staged) {
  HostCall(name, op, [&] { Registry<T>::Get().Replace(name, op, version, staged.devices, staged.tables); });
}

/// Puts them where no table of the name is.
template <class T>
void Adopt(std::string_view name, std::string_view op, const Staged<T>& staged) {
  HostCall(name, op, [&] {
    Registry<T>::Get().Create(std::string(name), staged.devices, [&](size_t i) { return staged.tables[i]; });
  });
}

template <WholeTable T>
void BindShards(nb::module_& m) {
  nb::class_<Prepared<T>>(m, "Prepared", "Contents that are read for a table; nothing has changed yet.");
  nb::class_<Staged<T>>(m, "Staged", "Shards that no call finds yet.");
  m.def(
      "begin_load", &BeginLive<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"), nb::arg("head"),
      nb::sig("def begin_load(name: str, shard: int, version: int, head: dict[str, object]) -> Prepared"),
      "Begins to read the contents of a shard: the number of rows, last_step, slots as (name, type, bytes of "
      "one),\n"
      "and pending_keys, pending_counts and sketch, without which the shard keeps its admission.");
  m.def("begin_staged", &BeginStaged<T>, nb::arg("staged"), nb::arg("shard"), nb::arg("head"),
        nb::sig("def begin_staged(staged: Staged, shard: int, head: dict[str, object]) -> Prepared"),
        "The same for a shard that no call finds yet.");
  m.def(
      "add_load", &AddLoad<T>, nb::arg("prepared"), nb::arg("rows"),
      nb::sig("def add_load(prepared: Prepared, rows: dict[str, object]) -> None"),
      "Reads some of the rows: columns as export_table gives them, with slots as (name, type, bytes of one, "
      "bytes).");
  m.def("end_load", &EndLoad<T>, nb::arg("prepared"), "Once all rows have been added.");
  m.def("commit_load", &CommitLoad<T>, nb::arg("prepared"),
        "Replaces the contents of the shard that these were read for. Returns its next version.");
  m.def(
      "stage", &Stage<T>, nb::arg("name"), nb::arg("op"), nb::arg("options"), nb::arg("devices"),
      nb::arg("shards"), nb::arg("owns_shared"), nb::arg("version"), nb::arg("originals"),
      nb::arg("sink").none(),
      nb::sig("def stage(name: str, op: str, options: dict[str, object], devices: "
              "collections.abc.Sequence[int], shards: "
              "collections.abc.Sequence[int], owns_shared: collections.abc.Sequence[bool], version: int, "
              "originals: collections.abc.Sequence[int], sink: collections.abc.Callable[[dict[str, object], "
              "str], None] | None) -> Staged"),
      "Makes shards, for handles of later versions than `version`; arguments as those of create.\n"
      "The shards in `originals` get the sink.");
  m.def("replace", &Replace<T>, nb::arg("name"), nb::arg("op"), nb::arg("version"), nb::arg("staged"),
        "Replaces the shards of a table, unless it has been written since `version`.");
  m.def("adopt", &Adopt<T>, nb::arg("name"), nb::arg("op"), nb::arg("staged"),
        "Makes a table of the shards, where there is none of the name.");
}

}  // namespace kvjax
