// The calls about what has changed in a table since a cursor; tables that keep none say so.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string_view>
#include <utility>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/python/callbacks.h"
#include "kvjax/ffi/python/tables.h"

namespace kvjax {

template <class T>
concept DeltaTable = requires(T& table, uint32_t version, uint64_t token) {
  { table.OpenCursor(version) } -> std::convertible_to<uint64_t>;
  table.CloseCursor(token);
  table.ExportSince(version, token, true);
};

/// body(table) on a shard that keeps cursors.
template <class T, class Body>
auto OnDeltaTable(std::string_view name, size_t shard, Body body) {
  const auto table = ShardOf<T>(name, "save", shard);
  return HostCall(name, "save", [&] { return body(*table); });
}

template <class T>
uint64_t OpenCursor(std::string_view name, size_t shard, uint32_t version) {
  if constexpr (DeltaTable<T>) {
    return OnDeltaTable<T>(name, shard, [&](T& table) { return table.OpenCursor(version); });
  } else {
    throw DeltaError(name);
  }
}

template <class T>
void CloseCursor(std::string_view name, size_t shard, uint64_t token) {
  if constexpr (DeltaTable<T>) {
    OnDeltaTable<T>(name, shard, [&](T& table) { table.CloseCursor(token); });
  } else {
    throw DeltaError(name);
  }
}

template <class T>
nb::object ExportSince(std::string_view name, size_t shard, uint32_t version, uint64_t token) {
  if constexpr (DeltaTable<T>) {
    return WithMemory(name, "save", [&]() -> nb::object {
      auto delta = OnDeltaTable<T>(name, shard, [&](T& t) { return t.ExportSince(version, token, true); });
      if (delta.whole) return nb::none();
      nb::dict out = SnapshotToNumpy(std::move(delta.rows));
      out["removed"] = ToNumpy(std::move(delta.removed));
      out["counts_of_all"] = delta.counts_of_all;
      AdmissionToNumpy(std::move(delta.admission), out);
      return out;
    });
  } else {
    throw DeltaError(name);
  }
}

template <WholeTable T>
void BindDeltas(nb::module_& m) {
  m.def("open_cursor", &OpenCursor<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        "Has a shard remember which keys are touched from now on. Returns the cursor's token.");
  m.def("close_cursor", &CloseCursor<T>, nb::arg("name"), nb::arg("shard"), nb::arg("token"),
        "Forgets a cursor, if the shard has it.");
  m.def("export_since", &ExportSince<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        nb::arg("token"),
        nb::sig(
            "def export_since(name: str, shard: int, version: int, token: int) -> dict[str, object] | None"),
        "What has changed in a shard since a cursor: as export_table, of the rows that were touched, with "
        "removed,\n"
        "the keys that were and have none, and counts_of_all, whether pending_keys are all that wait and not "
        "only\n"
        "those among them. None if the shard does not know, and all of it is to be taken.");
}

}  // namespace kvjax
