// Checks what XLA hands over and turns it into what the core takes. Element types and shapes are checked
// here and nowhere below: the core is given pointers it can trust.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/spec.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

namespace ffi = xla::ffi;

/// A check of one operand: an op on a table wants `what` to have `count` elements of `type`.
inline void Expect(bool ok, std::string_view table, std::string_view op, std::string_view want,
                   const ffi::AnyBuffer& got) {
  if (ok) return;
  std::string text = "element type " + std::to_string(static_cast<int>(got.element_type())) + ", shape (";
  for (const int64_t d : got.dimensions()) text += std::to_string(d) + ",";
  throw MakeError(ErrorCode::kInvalidArgument, table, op, want, text + ")",
                  "call kvjax's Python functions, which prepare the operands");
}

inline bool Holds(const ffi::AnyBuffer& buffer, ffi::DataType type, size_t count) {
  return buffer.element_type() == type && buffer.element_count() == count;
}

/// Keys arrive as pairs of 32-bit words, low word first, whatever jax_enable_x64 says: (..., 2) uint32.
inline KeySpan Keys(std::string_view table, std::string_view op, const ffi::AnyBuffer& keys, bool narrow) {
  const auto dims = keys.dimensions();
  Expect(keys.element_type() == ffi::U32 && dims.size() > 0 && dims.back() == 2, table, op,
         "keys (..., 2) uint32", keys);
  return {static_cast<const uint64_t*>(keys.untyped_data()), keys.element_count() / 2, narrow};
}

inline ffi::DataType DataTypeOf(RowType type) {
  switch (type) {
    case RowType::kFloat32:
      return ffi::F32;
    case RowType::kBFloat16:
      return ffi::BF16;
    case RowType::kFloat16:
      return ffi::F16;
  }
  return ffi::DataType::INVALID;
}

inline void ExpectRows(const TableSpec& spec, std::string_view op, const ffi::AnyBuffer& rows, size_t n) {
  Expect(Holds(rows, DataTypeOf(spec.type), n * static_cast<size_t>(spec.dim)), spec.name, op,
         "rows (" + std::to_string(n) + ", " + std::to_string(spec.dim) + ") of the table's dtype", rows);
}

inline void ExpectFloats(const TableSpec& spec, std::string_view op, const ffi::AnyBuffer& rows, size_t n) {
  Expect(Holds(rows, ffi::F32, n * static_cast<size_t>(spec.dim)), spec.name, op,
         "rows (" + std::to_string(n) + ", " + std::to_string(spec.dim) + ") float32", rows);
}

/// Which of n keys are meant: (n,) bool, or nothing for all of them.
inline const bool* Mask(std::string_view table, std::string_view op, const ffi::AnyBuffer& mask, size_t n) {
  const bool none = Holds(mask, ffi::PRED, 0);
  Expect(none || Holds(mask, ffi::PRED, n), table, op, "mask (n,) bool", mask);
  return none ? nullptr : static_cast<const bool*>(mask.untyped_data());
}

/// Rows that the table cannot make itself: (m, dim) of the table's dtype.
inline InitialRows Initial(const TableSpec& spec, std::string_view op, const ffi::AnyBuffer& rows) {
  const size_t n = rows.element_count() / static_cast<size_t>(spec.dim);
  ExpectRows(spec, op, rows, n);
  return {static_cast<const std::byte*>(rows.untyped_data()), n};
}

/// The version operand; vmap may have given it leading axes.
inline const uint32_t* Version(std::string_view table, std::string_view op, const ffi::AnyBuffer& version) {
  Expect(version.element_type() == ffi::U32 && version.element_count() >= 1, table, op, "a version () uint32",
         version);
  return static_cast<const uint32_t*>(version.untyped_data());
}

/// Where a call puts one word: () uint32, the version of the next handle or a seal.
inline uint32_t* Word(std::string_view table, ffi::Result<ffi::AnyBuffer>& next) {
  Expect(Holds(*next, ffi::U32, 1), table, "call", "one word () uint32", *next);
  return static_cast<uint32_t*>(next->untyped_data());
}

/// "mu|float32[64]|256;nu|float32[64]|256" as kvjax._rowwise writes it: name, type, bytes per row.
inline SlotLayout ParseLayout(std::string_view text) {
  SlotLayout layout;
  while (!text.empty()) {
    const size_t end = std::min(text.find(';'), text.size());
    const std::string_view item = text.substr(0, end);
    const size_t a = item.find('|'), b = item.find('|', a + 1);
    layout.Add(std::string(item.substr(0, a)), std::string(item.substr(a + 1, b - a - 1)),
               static_cast<size_t>(std::stoull(std::string(item.substr(b + 1)))));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return layout;
}

template <class T>
T* Data(ffi::Result<ffi::AnyBuffer>& result) {
  return static_cast<T*>(result->untyped_data());
}
template <class T>
const T* Data(const ffi::AnyBuffer& argument) {
  return static_cast<const T*>(argument.untyped_data());
}

/// Adds N > 0 operands, or results, of any type to a binding; the handlers check them.
template <size_t N, class Binding>
auto Args(Binding&& binding) {
  if constexpr (N == 1) {
    return std::move(binding).template Arg<ffi::AnyBuffer>();
  } else {
    return Args<N - 1>(std::move(binding).template Arg<ffi::AnyBuffer>());
  }
}
template <size_t N, class Binding>
auto Rets(Binding&& binding) {
  if constexpr (N == 1) {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  } else {
    return Rets<N - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  }
}

}  // namespace kvjax
