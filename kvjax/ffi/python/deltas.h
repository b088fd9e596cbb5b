// The calls about what has changed in a table since a cursor.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string_view>
#include <utility>

#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/python/callbacks.h"
#include "kvjax/ffi/python/tables.h"

namespace kvjax {

template <class T>
CursorToken OpenCursor(std::string_view name, size_t shard, uint32_t version) {
  return OnShard<T>(name, "save", shard, [&](T& table) { return table.OpenCursor(version); });
}

template <class T>
void CloseCursor(std::string_view name, size_t shard, CursorToken token) {
  OnShard<T>(name, "save", shard, [&](T& table) { table.CloseCursor(token); });
}

template <class T>
nb::object ExportSince(std::string_view name, size_t shard, uint32_t version, CursorToken token) {
  return WithMemory(name, "save", [&]() -> nb::object {
    Delta delta = OnShard<T>(name, "save", shard, [&](T& t) { return t.ExportSince(version, token, true); });
    if (delta.whole) return nb::none();
    nb::dict out = SnapshotToNumpy(std::move(delta.rows));
    out["removed"] = ToNumpy(std::move(delta.removed));
    out["counts_of_all"] = delta.counts_of_all;
    AdmissionToNumpy(std::move(delta.admission), out);
    return out;
  });
}

template <WholeTable T>
void BindDeltas(nb::module_& m) {
  m.def("open_cursor", &OpenCursor<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
        "Has a shard remember what it is now, to know what changes. Returns the cursor's token.");
  m.def("close_cursor", &CloseCursor<T>, nb::arg("name"), nb::arg("shard"), nb::arg("token"),
        "Forgets a cursor, if the shard has it.");
  m.def(
      "export_since", &ExportSince<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"),
      nb::arg("token"),
      nb::sig(
          "def export_since(name: str, shard: int, version: int, token: int) -> dict[str, object] | None"),
      "What has changed in a shard since a cursor: as export_table, of the rows that may be others, with\n"
      "removed, keys that have none any more, and counts_of_all, whether pending_keys are all that wait and "
      "not\n"
      "only those among them. None if the shard does not know, and all of it is to be taken.");
}

}  // namespace kvjax
