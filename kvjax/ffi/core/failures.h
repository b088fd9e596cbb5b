// Failures: what has been thrown, as an error of ours, and the numbers of failures that other devices have to
// know of.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"

namespace kvjax {

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
  /// The number of a failure that a program finds by itself: rows are ahead of their optimizer's state.
  static constexpr uint32_t kAhead = UINT32_MAX;

  /// A number above 0 for the failure, and below kAhead.
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

  // Those that a step has kept to itself, for somebody to ask for: see kvjax/_table/commit.py.

  void Leave(uint32_t number) {
    const std::lock_guard lock(mutex_);
    if (asked_[number % kKept] != number) left_ = number;
  }
  /// The last of them that nobody has asked for, or 0.
  uint32_t left() {
    const std::lock_guard lock(mutex_);
    return left_;
  }
  void Ask(uint32_t number) {
    const std::lock_guard lock(mutex_);
    asked_[number % kKept] = number;
    if (left_ == number) left_ = 0;
  }
  bool IsAsked(uint32_t number) {
    const std::lock_guard lock(mutex_);
    return asked_[number % kKept] == number;
  }

 private:
  static constexpr uint32_t kKept = 1024, kLast = (1u << 20) - 2;
  std::mutex mutex_;
  uint32_t next_ = 0, process_ = 0;
  std::array<std::optional<std::pair<uint32_t, Error>>, kKept> kept_{};
  uint32_t left_ = 0;
  std::array<uint32_t, kKept> asked_{};
};

/// Runs body(), which may fail for this device alone: put(status) gets 0, or on a sharded table the number of
/// its failure. Returns the error that the call itself fails with, if so: on any other table this one, and
/// where even the status cannot be put, that. Nothing is thrown: whoever calls may be C.
template <class Put, class Body>
std::optional<Error> Attempt(std::string_view table, std::string_view op, bool sharded, Put put, Body body) {
  uint32_t number = 0;
  try {
    body();
  } catch (...) {
    Error error = Caught(table, op);
    if (!sharded) return error;
    number = Failures::Get().Keep(std::move(error));
  }
  try {
    put(number);
    return {};
  } catch (...) {
    return Caught(table, op);
  }
}

}  // namespace kvjax
