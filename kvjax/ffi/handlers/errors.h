// Nothing is thrown across the FFI: Guard turns what the core throws into an ffi::Error.
#pragma once
#include <exception>
#include <new>
#include <string>

#include "kvjax/ffi/core/error.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

namespace ffi = xla::ffi;

inline ffi::ErrorCode ToFfi(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return ffi::ErrorCode::kInvalidArgument;
    case ErrorCode::kNotFound:
      return ffi::ErrorCode::kNotFound;
    case ErrorCode::kFailedPrecondition:
      return ffi::ErrorCode::kFailedPrecondition;
    case ErrorCode::kResourceExhausted:
      return ffi::ErrorCode::kResourceExhausted;
  }
  return ffi::ErrorCode::kInternal;
}

/// Runs body() for the op on the named table.
template <class Body>
ffi::Error Guard(std::string_view table, std::string_view op, Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const Error& error) {
    return ffi::Error(ToFfi(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      MakeError(ErrorCode::kResourceExhausted, table, op, "memory for the call", "none",
                                "the table is as it was before: remove rows or give the process more memory")
                          .what());
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      std::string("kvjax: ").append(op).append(": ").append(error.what()));
  }
}

}  // namespace kvjax
