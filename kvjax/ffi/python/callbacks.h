// Calls from the core into Python: sinks of evicted rows, and the user's scores.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/python/columns.h"

namespace kvjax {

namespace nb = nanobind;

/// Hands a vector to NumPy without a copy.
template <class T, class A>
auto ToNumpy(std::vector<T, A>&& data) {
  using Item = std::conditional_t<std::is_same_v<T, std::byte>, uint8_t, T>;
  auto* owned = new std::vector<T, A>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T, A>*>(p); });
  return nb::ndarray<nb::numpy, Item, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

/// The flat arrays that kvjax._values.snapshot.from_native reads.
inline nb::dict SnapshotToNumpy(Snapshot&& s) {
  nb::dict out;
  out[column::kKeys] = ToNumpy(std::move(s.keys));
  out[column::kValues] = ToNumpy(std::move(s.values));
  out[column::kFrequencies] = ToNumpy(std::move(s.frequencies));
  out[column::kVersions] = ToNumpy(std::move(s.versions));
  out[column::kHasSlots] = ToNumpy(std::move(s.has_slots));
  out[column::kPinned] = ToNumpy(std::move(s.pinned));
  out[column::kOffsets] = ToNumpy(std::move(s.offsets));
  out[column::kLastStep] = s.last_step;
  nb::list slots;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const Slot& slot = s.layout.slots()[i];
    slots.append(nb::make_tuple(slot.name, slot.type, ToNumpy(std::move(s.slots[i]))));
  }
  out[column::kSlots] = slots;
  return out;
}

/// A Python object that may be released on any thread.
inline std::shared_ptr<nb::object> Shared(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* p) {
            const nb::gil_scoped_acquire gil;
            delete p;
          }};
}

/// What a Python function raises becomes the error of the operation that called it.
template <class Call>
auto CallPython(std::string_view table, std::string_view what, Call call) {
  const nb::gil_scoped_acquire gil;
  try {
    return call();
  } catch (nb::python_error& error) {
    const std::string text = nb::cast<std::string>(error.type().attr("__name__")) + ": " +
                             nb::cast<std::string>(nb::str(error.value()));
    throw MakeError(ErrorCode::kInvalidArgument, table, "evict",
                    std::string("a ").append(what).append(" that works"), text,
                    "mend it and begin again with table.refresh(): the table is as it was");
  }
}

/// sink(arrays, reason) for kvjax._table.contents, which gives the arrays their types.
inline Sink MakeSink(const std::string& table, nb::object sink) {
  if (sink.is_none()) return nullptr;
  return [table, sink = Shared(std::move(sink))](Snapshot rows, std::string_view reason) {
    CallPython(table, "sink", [&] { (*sink)(SnapshotToNumpy(std::move(rows)), std::string(reason)); });
  };
}

/// score(name, arrays) -> (n,) float64.
inline ScoreFunction MakeScore(const std::string& table, nb::object score) {
  return [table, score = Shared(std::move(score))](std::string_view name, const Snapshot& rows,
                                                   std::vector<double>& out) {
    CallPython(table, "score function", [&] {
      const auto scores = nb::cast<nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(
          (*score)(std::string(name), SnapshotToNumpy(Snapshot(rows))));
      std::copy_n(scores.data(), std::min(out.size(), scores.shape(0)), out.begin());
    });
  };
}

}  // namespace kvjax
