// Failures: Guard turns what the core throws into an ffi::Error, as nothing may be thrown across the FFI, and
// Failures numbers those that other devices have to know of.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
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

/// What has just been thrown, as an error of ours.
inline Error Caught(std::string_view table, std::string_view op) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return MemoryError(table, op);
  } catch (const std::exception& error) {
    return UnexpectedError(op, error.what());
  }
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

/// Failures whose numbers have been given to other devices, to be raised once all know of them.
///
/// A device that fails alone leaves the others waiting in their next collective, and XLA then ends the
/// process. So on a sharded table a call that can fail gives a status instead, 0 or the number of its
/// failure; the devices take the largest, and all of them fail, or none.
class Failures {
 public:
  static Failures& Get() {
    static auto* failures = new Failures();
    return *failures;
  }
  /// A number above 0 for the failure.
  uint32_t Keep(Error error) {
    const std::lock_guard lock(mutex_);
    next_ = next_ == kLast ? 1 : next_ + 1;
    const uint32_t number = next_ | process_ << 20;
    kept_[number % kKept] = {number, std::move(error)};
    return number;
  }
  /// Which of several processes this is, so that their numbers differ (those of 4,096 of them do).
  void SetProcess(uint32_t process) { process_ = process % 4096; }
  /// The failure of that number, if it was kept in this process.
  std::optional<Error> Find(uint32_t number) {
    const std::lock_guard lock(mutex_);
    const auto& kept = kept_[number % kKept];
    return kept && kept->first == number ? std::optional(kept->second) : std::nullopt;
  }

 private:
  static constexpr uint32_t kKept = 1024, kLast = (1u << 20) - 1;
  std::mutex mutex_;
  uint32_t next_ = 0, process_ = 0;
  std::array<std::optional<std::pair<uint32_t, Error>>, kKept> kept_{};
};

/// Runs body(), which may fail for this device alone: put(status) gets 0, or on a sharded table the number of
/// its failure. On any other table the call itself fails.
template <class Put, class Body>
ffi::Error Report(std::string_view table, std::string_view op, bool sharded, Put put, Body body) {
  uint32_t number = 0;
  try {
    body();
  } catch (...) {
    Error error = Caught(table, op);
    if (!sharded) return ToFfi(error);
    number = Failures::Get().Keep(std::move(error));
  }
  put(number);
  return ffi::Error::Success();
}

}  // namespace kvjax
