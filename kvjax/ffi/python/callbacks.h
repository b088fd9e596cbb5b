// Calls from the core into Python: sinks of evicted rows, and the user's scores.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/python/columns.h"

namespace kvjax {

namespace nb = nanobind;

/// Hands a vector to NumPy without a copy.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> ToNumpy(std::vector<T>&& data) {
  auto* owned = new std::vector<T>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {owned->data(), {owned->size()}, owner};
}
inline nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> BytesToNumpy(std::vector<std::byte>&& data) {
  auto* owned = new std::vector<std::byte>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  return {owned->data(), {owned->size()}, owner};
}

/// The flat arrays that kvjax._values.snapshot.from_native reads.
inline nb::dict SnapshotToNumpy(Snapshot&& s) {
  nb::dict out;
  out[column::kKeys] = ToNumpy(std::move(s.keys));
  out[column::kValues] = BytesToNumpy(std::move(s.values));
  out[column::kFrequencies] = ToNumpy(std::move(s.frequencies));
  out[column::kVersions] = ToNumpy(std::move(s.versions));
  out[column::kHasSlots] = BytesToNumpy(std::move(s.has_slots));
  out[column::kPinned] = BytesToNumpy(std::move(s.pinned));
  out[column::kOffsets] = ToNumpy(std::move(s.offsets));
  out[column::kLastStep] = s.last_step;
  nb::list slots;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const Slot& slot = s.layout.slots()[i];
    slots.append(nb::make_tuple(slot.name, slot.type, BytesToNumpy(std::move(s.slots[i]))));
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
    throw UserError(table, what, text);
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
