// Failures: what has been thrown, as one of kvjax's errors, and the numbers of failures for other devices.
#pragma once
#include <algorithm>
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
#include <vector>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/secret.h"

namespace kvjax {

/// What has just been thrown, as an error of ours.
inline Error Caught(std::string_view table, std::string_view op) {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const NoDisk& disk) {
    return DiskError(table, op, disk);
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
    // Not from the heap, which may have nothing left when the first one fails; and never destroyed.
    alignas(Failures) static std::byte memory[sizeof(Failures)];
    static auto* const failures = new (memory) Failures();
    return *failures;
  }
  /// The number of a failure that a program finds by itself: rows are ahead of their optimizer's state.
  static constexpr uint32_t kAhead = UINT32_MAX;

  /// A number above 0 for the failure, and below that. Without an error it is one for which there was not
  /// even memory to say it. Takes none.
  uint32_t Keep(std::optional<Error> error) {
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
    return FindKept(number);
  }

  // Those that a step has kept to itself, for somebody to ask for: see kvjax/_table/commit.py.

  /// A failure that nobody has asked for, and the tables whose steps were refused for it.
  struct Left {
    uint32_t number;
    Error error;
    std::vector<std::string> tables;
    bool others = false;  // whether steps after it have been refused for it, too
  };

  void Leave(uint32_t number, std::string_view table) {
    const std::lock_guard lock(mutex_);
    if (asked_[number % kKept] == number) return;
    auto left = FindLeft(number);
    if (left == left_.end()) {
      left_.push_back({number, FindKept(number).value_or(ElsewhereError(table, "apply")), {}});
      left = left_.end() - 1;
    }
    if (std::find(left->tables.begin(), left->tables.end(), table) == left->tables.end()) {
      left->tables.emplace_back(table);
    }
  }
  /// In the order in which they came.
  std::vector<Left> left() {
    const std::lock_guard lock(mutex_);
    return left_;
  }
  /// A table of that name is gone, and what was refused to it no longer keeps anybody from it.
  void Forget(std::string_view table) {
    const std::lock_guard lock(mutex_);
    for (Left& left : left_) std::erase(left.tables, table);
  }
  /// Whether the step that begins now is refused for it, too. A number of another process is for that one to
  /// say, and one that this process never gave is from a checkpoint.
  bool RefusesAnother(uint32_t number) {
    const std::lock_guard lock(mutex_);
    const auto left = FindLeft(number);
    if (left == left_.end()) return FindKept(number) && asked_[number % kKept] != number;
    return left->others = true;
  }
  /// The failure, for the first who asks.
  std::optional<Error> Ask(uint32_t number) {
    const std::lock_guard lock(mutex_);
    std::optional<Error> error;
    if (number == 0) return error;
    if (const auto left = FindLeft(number); left != left_.end()) {
      error = std::move(left->error);
      left_.erase(left);
    } else if (asked_[number % kKept] != number) {
      error = FindKept(number);
      if (!error && number >> 20 != process_) error = ElsewhereError("", "commit");
    }
    asked_[number % kKept] = number;
    return error;
  }

 private:
  static constexpr uint32_t kKept = 1024, kLast = (1u << 20) - 2;

  struct Kept {
    uint32_t number = 0;
    std::optional<Error> error;
  };

  std::optional<Error> FindKept(uint32_t number) {
    const Kept& kept = kept_[number % kKept];
    if (number == 0 || kept.number != number) return std::nullopt;
    return kept.error ? kept.error : SpeechlessError();
  }
  std::vector<Left>::iterator FindLeft(uint32_t number) {
    return std::find_if(left_.begin(), left_.end(), [&](const Left& left) { return left.number == number; });
  }

  std::mutex mutex_;
  // Not from 1, so that a number in a checkpoint is not soon that of a failure of another run.
  uint32_t next_ = static_cast<uint32_t>(Secret() % kLast), process_ = 0;
  std::array<Kept, kKept> kept_{};
  std::vector<Left> left_;
  uint32_t asked_[kKept] = {};  // nvcc does not read the size of a second std::array
};

/// Runs body(), which may fail for this device alone: put(status) gets 0, or on a sharded table the number of
/// its failure. Returns the error that the call itself fails with, if so: on any other table this one, and
/// where even the status cannot be put, that. Nothing is thrown, as whoever calls may be C, but where there
/// is no memory for the text of an error: XLA makes one of its own of that.
template <class Put, class Body>
std::optional<Error> Attempt(std::string_view table, std::string_view op, bool sharded, Put put, Body body) {
  uint32_t number = 0;
  try {
    body();
  } catch (...) {
    try {
      Error error = Caught(table, op);
      if (!sharded) return error;
      number = Failures::Get().Keep(std::move(error));
    } catch (const std::bad_alloc&) {
      if (!sharded) throw;
      number = Failures::Get().Keep({});
    }
  }
  try {
    put(number);
    return {};
  } catch (...) {
    return Caught(table, op);
  }
}

}  // namespace kvjax
