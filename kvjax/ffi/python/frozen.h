// A shard that is copied out part by part while writes go on, for Python.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kvjax/ffi/python/tables.h"

namespace kvjax {

/// The rows of a shard as they were. What holds this keeps them, and the table.
template <class T>
struct FrozenShard {
  using Rows = std::remove_reference_t<decltype(*std::declval<T&>().Freeze(0, true).first)>;
  std::shared_ptr<T> table;
  std::shared_ptr<Rows> rows;
};

/// What is known at once, and as "frozen" what gives the rows.
template <class T>
nb::dict Freeze(std::string_view name, size_t shard, uint32_t version, bool with_slots) {
  return WithMemory(name, "save", [&] {
    auto table = ShardOf<T>(name, "save", shard);
    auto [rows, admission] = HostCall(name, "save", [&] { return table->Freeze(version, with_slots); });
    nb::dict out;
    out["rows"] = rows->size();
    out["pinned"] = rows->pinned();
    out[field::kLastStep] = rows->last_step();
    out[field::kOffsets] = ToNumpy(std::vector<int64_t>(rows->offsets()));
    nb::list slots;
    for (const Slot& slot : rows->layout().slots())
      slots.append(nb::make_tuple(ToStr(slot.name), ToStr(slot.type)));
    out[field::kSlots] = slots;
    AdmissionToNumpy(std::move(admission), out);
    out["frozen"] = nb::cast(FrozenShard<T>{std::move(table), std::move(rows)});
    return out;
  });
}

template <class T>
nb::dict NextPart(FrozenShard<T>& frozen) {
  const std::string& name = frozen.table->spec().name;
  return WithMemory(name, "save", [&] {
    nb::dict out =
        SnapshotToNumpy(HostCall(name, "save", [&] { return frozen.table->NextOf(*frozen.rows); }));
    out["pause"] = frozen.rows->pause();
    return out;
  });
}

template <WholeTable T>
void BindFrozen(nb::module_& m) {
  nb::class_<FrozenShard<T>>(m, "Frozen", "The rows of a shard as they were at one moment.");
  m.def("freeze", &Freeze<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"), nb::arg("with_slots"),
        nb::sig("def freeze(name: str, shard: int, version: int, with_slots: bool) -> dict[str, typing.Any]"),
        "What export_table gives, but for the columns: rows, whether one is pinned, offsets, last_step, "
        "slots as\n"
        "(name, type), the admission; and as frozen what next_part gives the columns of. Writes may go on.");
  m.def("next_part", &NextPart<T>, nb::arg("frozen"),
        nb::sig("def next_part(frozen: Frozen) -> dict[str, object]"),
        "The columns of the next rows, as export_table gives them, in the end of none; and how many seconds "
        "to\n"
        "pause before the next, so that writes go on at about their pace.");
}

}  // namespace kvjax
