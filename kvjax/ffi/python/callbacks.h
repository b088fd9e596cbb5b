// Calls from the core into Python: sinks of evicted rows, and the user's scores.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/away.h"
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

inline nb::str ToStr(std::string_view text) { return nb::str(text.data(), text.size()); }

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
    slots.append(nb::make_tuple(ToStr(slot.name), ToStr(slot.type), ToNumpy(std::move(s.slots[i]))));
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

/// The type of an exception and what it says, if it can say it.
inline std::string Describe(const nb::python_error& error) {
  std::string text;
  try {
    text = nb::cast<std::string_view>(error.type().attr("__name__"));
    const nb::str said(error.value());
    const auto what = nb::cast<std::string_view>(said);
    if (!what.empty()) text.append(": ").append(what);
  } catch (const nb::python_error&) {  // of its __str__
    text += ", which cannot say why";
  } catch (const std::bad_cast&) {
    text += ", whose text is not Unicode";
  }
  std::replace(text.begin(), text.end(), '\0', ' ');  // with which the text of an error would end
  return text;
}

/// What a Python function raises becomes the error of the operation that called it. That error is none where
/// an operation ends all the same, and of another type. So an interrupt (Ctrl-C) that Python has handed to
/// the function is made again: the main thread gets it once the operation is over.
template <class Call>
auto CallPython(std::string_view table, std::string_view op, std::string_view what, Call call) {
  const nb::gil_scoped_acquire gil;
  try {
    return call();
  } catch (nb::python_error& error) {
    const std::string said = Describe(error);  // which runs Python code, and that would get the interrupt
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    throw UserError(table, op, what, said);
  } catch (const std::bad_cast&) {
    throw UserError(table, op, what, "a result of another type");
  }
}

/// sink(arrays, reason) for kvjax._table.contents, which gives the arrays their types.
inline Sink MakeSink(std::string_view table, nb::object sink) {
  if (sink.is_none()) return nullptr;
  return
      [table = std::string(table), sink = Shared(std::move(sink))](Snapshot rows, std::string_view reason) {
        CallPython(table, "evict", "sink", [&] { (*sink)(SnapshotToNumpy(std::move(rows)), ToStr(reason)); });
      };
}

/// engine.get(column, keys, width) -> (n * width,) uint8, engine.put(column, keys, width, bytes) and
/// engine.delete(keys), with keys (n,) uint64: kvjax._spec.engines.
inline Engine MakeEngine(std::string_view table, nb::object engine) {
  const auto call = [table = std::string(table), engine = Shared(std::move(engine))](auto body) {
    CallPython(table, "storage", "storage engine", [&] { body(*engine); });
  };
  const auto keys_of = [](Engine::Keys keys) {
    return ToNumpy(std::vector<uint64_t>(keys.begin(), keys.end()));
  };
  return {
      .get =
          [=](std::string_view column, Engine::Keys keys, size_t width, std::byte* rows) {
            call([&](nb::object& o) {
              const auto got =
                  nb::cast<nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(
                      o.attr("get")(ToStr(column), keys_of(keys), width));
              std::memcpy(rows, got.data(), std::min(keys.size() * width, got.shape(0)));
            });
          },
      .put =
          [=](std::string_view column, Engine::Keys keys, size_t width, std::vector<std::byte> rows) {
            call([&](nb::object& o) {
              o.attr("put")(ToStr(column), keys_of(keys), width, ToNumpy(std::move(rows)));
            });
          },
      .remove = [=](Engine::Keys keys) { call([&](nb::object& o) { o.attr("delete")(keys_of(keys)); }); },
  };
}

/// score(name, arrays) -> (n,) float64.
inline ScoreFunction MakeScore(std::string_view table, nb::object score) {
  return [table = std::string(table), score = Shared(std::move(score))](
             std::string_view name, const Snapshot& rows, std::vector<double>& out) {
    CallPython(table, "evict", "score function", [&] {
      const auto scores = nb::cast<nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(
          (*score)(ToStr(name), SnapshotToNumpy(Snapshot(rows))));
      std::copy_n(scores.data(), std::min(out.size(), scores.shape(0)), out.begin());
    });
  };
}

}  // namespace kvjax
