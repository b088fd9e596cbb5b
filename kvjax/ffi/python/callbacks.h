// Calls from the core into Python: sinks of evicted rows, and the user's scores.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/snapshot.h"

namespace kvjax {

namespace nb = nanobind;

/// What a snapshot has beside its columns (EachColumn), by the names that Python gives and gets.
namespace field {
inline constexpr const char* kSlots = "slots";      // a list of (name, type, [bytes of one,] bytes of all)
inline constexpr const char* kOffsets = "offsets";  // (NUM_BUCKETS + 1,) int64, the first row of each bucket
inline constexpr const char* kLastStep = "last_step";            // int
inline constexpr const char* kPendingKeys = "pending_keys";      // (p,) int64, keys that wait for admission
inline constexpr const char* kPendingCounts = "pending_counts";  // (p,) int64
inline constexpr const char* kSketch = "sketch";                 // (NUM_BUCKETS * cells,) uint16
}  // namespace field

/// The element by which NumPy knows T: bytes are uint8.
template <class T>
using NumpyElement = std::conditional_t<std::same_as<T, std::byte>, uint8_t, T>;

/// Hands a vector to NumPy without a copy.
template <class T, class Allocator>
nb::ndarray<nb::numpy, NumpyElement<T>, nb::ndim<1>> ToNumpy(std::vector<T, Allocator>&& data) {
  using Vector = std::vector<T, Allocator>;
  auto* owned = new Vector(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Vector*>(p); });
  return {owned->data(), {owned->size()}, owner};
}

/// The flat arrays that kvjax._values.snapshot.from_native reads.
inline nb::dict SnapshotToNumpy(Snapshot&& s) {
  nb::dict out;
  const auto add = [&](const char* name, size_t, auto& column) { out[name] = ToNumpy(std::move(column)); };
  EachColumn(0, add, s);
  out[field::kOffsets] = ToNumpy(std::move(s.offsets));
  out[field::kLastStep] = s.last_step;
  nb::list slots;
  for (size_t i = 0; i < s.slots.size(); ++i) {
    const Slot& slot = s.layout.slots()[i];
    slots.append(nb::make_tuple(slot.name, slot.type, ToNumpy(std::move(s.slots[i]))));
  }
  out[field::kSlots] = slots;
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
