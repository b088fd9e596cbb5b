// The bindings that every module has and that concern no table: errors, constants, hashes.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/shard_summary.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/python/callbacks.h"
#include "kvjax/ffi/python/without_gil.h"

namespace kvjax {

namespace nb = nanobind;

template <class T>
using HostArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// nanobind's casters of std::string and std::vector end the process where there is no memory. So bound
// functions take std::string_view and sequences, and these make of them what can be kept.

inline std::string ToString(nb::handle text) { return std::string(nb::cast<std::string_view>(text)); }

template <class T>
std::vector<T> ToVector(const nb::sequence& items) {
  std::vector<T> out;
  out.reserve(nb::len(items));
  for (const nb::handle item : items) out.push_back(nb::cast<T>(item));
  return out;
}

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashStrings(const nb::sequence& items, uint64_t salt) {
  std::vector<int64_t> out;
  out.reserve(nb::len(items));
  for (const nb::handle item : items) {
    std::string_view bytes;
    if (PyBytes_Check(item.ptr())) {
      bytes = {PyBytes_AsString(item.ptr()), static_cast<size_t>(PyBytes_Size(item.ptr()))};
    } else {
      Py_ssize_t size = 0;
      const char* const text = PyUnicode_AsUTF8AndSize(item.ptr(), &size);
      if (text == nullptr) throw nb::python_error();  // TypeError or UnicodeEncodeError
      bytes = {text, static_cast<size_t>(size)};
    }
    out.push_back(static_cast<int64_t>(HashBytes(bytes.data(), bytes.size(), salt)));
  }
  return ToNumpy(std::move(out));
}

/// The hashes of spans of bytes, as of strings that stand in one buffer; other threads of Python run
/// meanwhile.
inline nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashSpans(HostArray<uint8_t> data,
                                                              HostArray<int64_t> begins,
                                                              HostArray<int64_t> ends, uint64_t salt) {
  std::vector<int64_t> out(begins.shape(0));
  {
    const WithoutGil others_run;
    const auto size = static_cast<int64_t>(data.shape(0));
    if (ends.shape(0) != out.size()) throw SpansError();
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t begin = begins.data()[i], end = ends.data()[i];
      if (begin < 0 || end < begin || end > size) throw SpansError();
      out[i] = static_cast<int64_t>(HashBytes(data.data() + begin, static_cast<size_t>(end - begin), salt));
    }
  }
  return ToNumpy(std::move(out));
}

inline uint64_t Digest(HostArray<uint8_t> data) {
  const WithoutGil others_run;
  return HashBytes(data.data(), data.shape(0), 0);
}

inline nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> HashIntegers(HostArray<int64_t> items, uint64_t salt) {
  std::vector<int64_t> out(items.shape(0));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<int64_t>(Salted(static_cast<uint64_t>(items.data()[i]), salt));
  }
  return ToNumpy(std::move(out));
}

/// The shard of each key by its virtual bucket.
inline nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> Owners(HostArray<int64_t> keys, uint32_t shards) {
  std::vector<int32_t> out(keys.shape(0));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<int32_t>(OwnerOf(static_cast<uint64_t>(keys.data()[i]), shards));
  }
  return ToNumpy(std::move(out));
}

inline void BindCommon(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      PyObject* type = error.code() == ErrorCode::kInvalidArgument     ? PyExc_ValueError
                       : error.code() == ErrorCode::kNotFound          ? PyExc_KeyError
                       : error.code() == ErrorCode::kResourceExhausted ? PyExc_MemoryError
                                                                       : PyExc_RuntimeError;
      PyErr_SetString(type, error.what());
    } catch (const std::bad_alloc&) {
      PyErr_SetString(PyExc_MemoryError, kNoMemory);
    }
  });
  m.attr("MAX_DIM") = kMaxDim;
  m.attr("CANARY") = kCanary;
  m.attr("NUM_BUCKETS") = kNumBuckets;
  m.attr("TALLY_WORDS") = Tally::kWords;
  m.attr("SUMMARY_WORDS") = ShardSummary::kWords;
  m.def(
      "set_process", [](uint32_t process) { Failures::Get().SetProcess(process); }, nb::arg("process"),
      "Says which of several processes this is, so that the numbers of their failures differ.");
  m.def(
      "left_failures",
      [] {
        nb::list found;
        for (const Failures::Left& left : Failures::Get().left()) {
          nb::list tables;
          for (const std::string& table : left.tables) tables.append(ToStr(table));
          found.append(nb::make_tuple(left.number, nb::str(left.error.what()), tables, left.others));
        }
        return found;
      },
      nb::sig("def left_failures() -> list[tuple[int, str, list[str], bool]]"),
      "Failures nobody has asked for: numbers, texts, tables whose steps they were, whether others "
      "followed.");
  m.def(
      "forget_failures", [](std::string_view table) { Failures::Get().Forget(table); }, nb::arg("table"),
      "Says that a table is gone, and with it those whose steps were refused.");
  m.def(
      "ask_failure",
      [](uint32_t number) {
        if (const std::optional<Error> error = Failures::Get().Ask(number)) throw *error;
      },
      nb::arg("number"), "Raises the failure of a number, unless somebody has asked for it before.");
  m.def("owners", &Owners, nb::arg("keys"), nb::arg("shards"),
        nb::sig("def owners(keys: numpy.typing.NDArray[numpy.int64], shards: int) -> "
                "numpy.typing.NDArray[numpy.int32]"),
        "The shard (n,) of each key by its virtual bucket.");
  m.def("hash_strings", &HashStrings, nb::arg("items"), nb::arg("salt"),
        nb::sig("def hash_strings(items: collections.abc.Sequence[str | bytes], salt: int) -> "
                "numpy.typing.NDArray[numpy.int64]"),
        "A key (n,) for each of n strings, as UTF-8.");
  m.def("hash_spans", &HashSpans, nb::arg("data"), nb::arg("begins"), nb::arg("ends"), nb::arg("salt"),
        nb::sig("def hash_spans(data: numpy.typing.NDArray[numpy.uint8], begins: "
                "numpy.typing.NDArray[numpy.int64], ends: numpy.typing.NDArray[numpy.int64], salt: int) -> "
                "numpy.typing.NDArray[numpy.int64]"),
        "A key (n,) for each of n strings in one buffer, as UTF-8.");
  m.def("digest", &Digest, nb::arg("data"),
        nb::sig("def digest(data: numpy.typing.NDArray[numpy.uint8]) -> int"), "The XXH64 of bytes (n,).");
  m.def("hash_integers", &HashIntegers, nb::arg("items"), nb::arg("salt"),
        nb::sig("def hash_integers(items: numpy.typing.NDArray[numpy.int64], salt: int) -> "
                "numpy.typing.NDArray[numpy.int64]"),
        "A key (n,) for each of n numbers.");
}

}  // namespace kvjax
