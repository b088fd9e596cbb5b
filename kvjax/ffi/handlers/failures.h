// Errors of the core as those of XLA: Guard and Report turn what is thrown into an ffi::Error, as nothing may
// be thrown across the FFI.
#pragma once
#include <optional>
#include <string_view>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/failures.h"
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
    case ErrorCode::kInternal:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

inline ffi::Error ToFfi(const Error& error) { return ffi::Error(ToFfi(error.code()), error.what()); }

/// Runs body() for the op on the named table.
template <class Body>
ffi::Error Guard(std::string_view table, std::string_view op, Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (...) {
    return ToFfi(Caught(table, op));
  }
}

/// See Attempt.
template <class Put, class Body>
ffi::Error Report(std::string_view table, std::string_view op, bool sharded, Put put, Body body) {
  const std::optional<Error> error = Attempt(table, op, sharded, put, body);
  return error ? ToFfi(*error) : ffi::Error::Success();
}

}  // namespace kvjax
