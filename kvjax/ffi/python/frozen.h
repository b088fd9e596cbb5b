// A shard that is copied out part by part while writes go on, for Python.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kvjax/ffi/python/tables.h"

namespace kvjax {

/// The rows of a shard as they were, for an operation. What holds this keeps them, and the table.
template <class T>
struct FrozenShard {
  using Rows = std::remove_reference_t<decltype(*std::declval<T&>().Freeze(0, true).first)>;
  std::shared_ptr<T> table;
  std::shared_ptr<Rows> rows;
  std::string op;
};

/// What is known at once, and as "frozen" what gives the rows.
template <class T>
nb::dict Freeze(std::string_view name, size_t shard, uint32_t version, bool with_slots, std::string_view op,
                bool raises) {
  return WithMemory(name, op, [&] {
    auto table = ShardOf<T>(name, op, shard);
    auto [rows, admission] =
        HostCall(name, op, [&] { return table->Freeze(version, with_slots, op, raises); });
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
    out["frozen"] = nb::cast(FrozenShard<T>{std::move(table), std::move(rows), std::string(op)});
    return out;
  });
}

/// The bytes of a column as Python gives them, and how many rows, each this wide, there is space for at most.
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
std::span<T> SpaceIn(nb::handle column, size_t width, size_t& rows) {
  const auto bytes = nb::cast<Bytes>(column);
  const std::span<T> space(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T));
  if (width > 0) rows = std::min(rows, space.size() / width);
  return space;
}

/// Copies the next rows to where there is space for some; returns how many, in the end 0, and seconds to
/// wait.
template <class T>
std::pair<size_t, double> NextPart(FrozenShard<T>& frozen, const nb::dict& columns,
                                   const nb::sequence& slots) {
  const std::string& name = frozen.table->spec().name;
  return WithMemory(name, frozen.op, [&] {
    SnapshotSpace to;
    to.n = std::numeric_limits<size_t>::max();
    EachColumn(
        frozen.table->row_bytes(),
        [&]<class U>(const char* column, size_t width, std::span<U>& space) {
          if (columns.contains(column)) space = SpaceIn<U>(columns[column], width, to.n);
        },
        to);
    for (const Slot& slot : frozen.rows->layout().slots()) {
      to.slots.push_back(SpaceIn<std::byte>(slots[to.slots.size()], slot.bytes, to.n));
    }
    const size_t rows = HostCall(name, frozen.op, [&] { return frozen.table->NextOf(*frozen.rows, to); });
    return std::pair(rows, frozen.rows->pause());
  });
}

template <WholeTable T>
void BindFrozen(nb::module_& m) {
  nb::class_<FrozenShard<T>>(m, "Frozen", "The rows of a shard as they were at one moment.");
  m.def("freeze", &Freeze<T>, nb::arg("name"), nb::arg("shard"), nb::arg("version"), nb::arg("with_slots"),
        nb::arg("op"), nb::arg("raises") = true,
        nb::sig("def freeze(name: str, shard: int, version: int, with_slots: bool, op: str, raises: bool = "
                "True) -> dict[str, typing.Any]"),
        "What export_table gives, but for the columns: rows, whether one is pinned, offsets, last_step, "
        "slots as\n"
        "(name, type), the admission; and as frozen what next_part gives the columns of. Writes may go on.");
  m.def("next_part", &NextPart<T>, nb::arg("frozen"), nb::arg("columns"), nb::arg("slots"),
        nb::sig("def next_part(frozen: Frozen, columns: dict[str, numpy.typing.NDArray[numpy.uint8]], "
                "slots: collections.abc.Sequence[numpy.typing.NDArray[numpy.uint8]]) -> tuple[int, float]"),
        "Copies the next rows, as export_table gives them, to the front of each column's bytes, as many as "
        "there is\n"
        "space for or fewer; pinned may be missing where no row is. Returns how many, in the end 0; and how "
        "many\n"
        "seconds to pause before the next, so that writes go on at about their pace.");
}

}  // namespace kvjax
