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

/// Contents that have been read for a table; nothing has changed yet.
template <class T>
struct Prepared {
  std::shared_ptr<T> table;
  typename T::Loaded loaded;
};

/// Reads contents for a table. in: what ExportTable gives, as flat arrays; slots as (name, type, bytes of
/// one, bytes of all).
template <class T>
Prepared<T> PrepareLoad(const std::shared_ptr<T>& table, uint32_t version, const nb::dict& in) {
  const std::string& name = table->spec().name;
  const auto expect = [&](bool ok, const std::string& what, size_t got) {
    if (!ok) throw ColumnError(name, what, got);
  };
  SnapshotView view;
  view.n = nb::cast<HostArray<int64_t>>(in["keys"]).shape(0);
  view.last_step = nb::cast<int64_t>(in[field::kLastStep]);
  std::vector<std::any> arrays;  // what the view points into
  const auto borrow = [&]<class E>(const char* column, size_t width, const E*& to) {
    const auto array = nb::cast<HostArray<NumpyElement<E>>>(in[column]);
    const char* const unit = std::same_as<E, std::byte> ? " bytes of " : " ";
    expect(array.shape(0) == view.n * width, std::to_string(view.n * width) + unit + column, array.shape(0));
    to = reinterpret_cast<const E*>(array.data());
    arrays.emplace_back(array);
  };
  EachColumn(table->row_bytes(), borrow, view);
  const bool with_counts = in.contains(field::kPendingKeys);  // else those of the table stay
  HostArray<int64_t> pending_keys, pending_counts;
  HostArray<uint16_t> sketch;
  if (with_counts) {
    pending_keys = nb::cast<HostArray<int64_t>>(in[field::kPendingKeys]);
    pending_counts = nb::cast<HostArray<int64_t>>(in[field::kPendingCounts]);
    sketch = nb::cast<HostArray<uint16_t>>(in[field::kSketch]);
    expect(pending_keys.shape(0) == pending_counts.shape(0), "one count per pending key",
           pending_counts.shape(0));
  }
  for (const nb::handle each : nb::cast<nb::sequence>(in[field::kSlots])) {
    const auto width = nb::cast<size_t>(each[2]);
    const auto array = nb::cast<HostArray<uint8_t>>(each[3]);
    const std::string slot = ToString(each[0]);
    const size_t bytes = view.n * width;
    expect(array.shape(0) == bytes, std::to_string(bytes) + " bytes of slot " + slot, array.shape(0));
    view.layout.Add(slot, ToString(each[1]), width);
    view.slots.push_back(reinterpret_cast<const std::byte*>(array.data()));
    arrays.emplace_back(array);
  }
  return HostCall(name, "load", [&] {
    const AdmissionState admission =
        with_counts ? AdmissionState{{pending_keys.data(), pending_keys.data() + pending_keys.shape(0)},
                                     {pending_counts.data(), pending_counts.data() + pending_counts.shape(0)},
                                     {sketch.data(), sketch.data() + sketch.shape(0)}}
                    : table->ExportAdmission(version);
    return Prepared<T>{table, table->PrepareLoad(version, view, admission)};
  });
}

/// Contents for one of the shards of this process.
template <class T>
Prepared<T> PrepareLive(std::string_view name, size_t shard, uint32_t version, const nb::dict& in) {
  return WithMemory(name, "load", [&] { return PrepareLoad(ShardOf<T>(name, "load", shard), version, in); });
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

/// As Create, but for handles of later versions than `version`, and filled: contents[i] are those of shard i.
/// The shards in `originals` get the sink.
template <class T>
Staged<T> Stage(std::string_view name, std::string_view op, const nb::dict& o, const nb::sequence& devices,
                const nb::sequence& shards, const nb::sequence& owns_shared, uint32_t version,
                const nb::sequence& contents, const nb::sequence& originals, const nb::object& sink) {
  return WithMemory(name, op, [&] {
    const uint32_t first = Registry<T>::VersionBehind(version);
    Staged<T> staged{ToVector<int32_t>(devices), {}};
    auto make = ShardMaker<T>(name, o, staged.devices, ToVector<uint32_t>(shards),
                              ToVector<bool>(owns_shared), first);
    for (size_t i = 0; i < staged.devices.size(); ++i) {
      staged.tables.push_back(HostCall(name, op, [&] { return make(i); }));
      Prepared<T> prepared = PrepareLoad(staged.tables[i], first, nb::cast<nb::dict>(contents[i]));
      CommitLoad(prepared);
    }
    for (const size_t i : ToVector<size_t>(originals)) staged.tables.at(i)->SetSink(MakeSink(name, sink));
    return staged;
  });
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
  nb::class_<Prepared<T>>(m, "Prepared",
                          "Contents that have been read for a table; nothing has changed yet.");
  nb::class_<Staged<T>>(m, "Staged", "Shards that no call finds yet.");
  m.def("prepare_load", &PrepareLive<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        nb::arg("rows"),
        nb::sig("def prepare_load(name: str, shard: int, version: int, rows: dict[str, object]) -> Prepared"),
        "Reads the contents of a shard: what export_table gives, with slots as (name, type, bytes of one, "
        "bytes).\n"
        "Without pending_keys the shard keeps its admission.");
  m.def("commit_load", &CommitLoad<T>, nb::arg("prepared"),
        "Replaces the contents of the shard that these were read for. Returns its next version.");
  m.def(
      "stage", &Stage<T>, nb::arg("name"), nb::arg("op"), nb::arg("options"), nb::arg("devices"),
      nb::arg("shards"), nb::arg("owns_shared"), nb::arg("version"), nb::arg("contents"),
      nb::arg("originals"), nb::arg("sink").none(),
      nb::sig("def stage(name: str, op: str, options: dict[str, object], devices: "
              "collections.abc.Sequence[int], shards: "
              "collections.abc.Sequence[int], owns_shared: collections.abc.Sequence[bool], version: int, "
              "contents: collections.abc.Sequence[dict[str, object]], "
              "originals: collections.abc.Sequence[int], sink: collections.abc.Callable[[dict[str, object], "
              "str], None] | None) -> Staged"),
      "Makes and fills shards, for handles of later versions than `version`; arguments as those of create.\n"
      "contents: of each shard; the shards in `originals` get the sink.");
  m.def("replace", &Replace<T>, nb::arg("name"), nb::arg("op"), nb::arg("version"), nb::arg("staged"),
        "Replaces the shards of a table, unless it has been written since `version`.");
  m.def("adopt", &Adopt<T>, nb::arg("name"), nb::arg("op"), nb::arg("staged"),
        "Makes a table of the shards, where there is none of the name.");
}

}  // namespace kvjax
