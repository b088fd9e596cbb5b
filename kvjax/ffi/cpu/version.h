// VersionGate: the version that orders the calls of a table, and the lock behind it.
//
// Every call brings the version of the handle it was made through, and only the current one is let in. A
// write makes the next one. So a call through a stale handle is an error and never a race, whatever order XLA
// runs things in. Readers share the lock, a writer has it alone. A following handle brings no version: its
// reads take turns with the writes, and see what the last one has finished.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/user_code.h"

namespace kvjax {

class VersionGate {
 public:
  using ReadLock = std::shared_lock<std::shared_timed_mutex>;
  using WriteLock = std::unique_lock<std::shared_timed_mutex>;

  using Duration = UserCode::Duration;

  /// `user` is how long calls wait for the user's code.
  explicit VersionGate(uint32_t first, Duration user = std::chrono::seconds(20))
      : user_code_(user), version_(first) {}

  [[nodiscard]] uint32_t version() const { return version_.load(); }

  /// Both throw if `version` is not the current one. A read without one is that of a following handle.
  [[nodiscard]] ReadLock Read(std::string_view table, std::string_view op,
                              std::optional<uint32_t> version) const {
    WaitForUser(table, op);
    std::unique_lock turn(turn_, std::defer_lock);
    if (!version) Take(turn, table, op);
    ReadLock lock(mutex_, std::defer_lock);
    Take(lock, table, op);
    if (version) Check(table, op, *version);
    return lock;
  }
  [[nodiscard]] WriteLock Write(std::string_view table, std::string_view op, uint32_t version) {
    WriteLock lock = WriteAny(table, op);
    Check(table, op, version);
    return lock;
  }

  /// For what may be done through any handle.
  [[nodiscard]] ReadLock ReadAny(std::string_view table, std::string_view op) const {
    WaitForUser(table, op);
    ReadLock lock(mutex_, std::defer_lock);
    Take(lock, table, op);
    return lock;
  }
  [[nodiscard]] WriteLock WriteAny(std::string_view table, std::string_view op) {
    WaitForUser(table, op);
    // Readers that come one after the other would keep a writer out for ever, so it has a turn before those
    // to come.
    std::unique_lock turn(turn_, std::defer_lock);
    Take(turn, table, op);
    WriteLock lock(mutex_, std::defer_lock);
    Take(lock, table, op);
    return lock;
  }

  /// Lives while a writer calls the user's code.
  class CallingOut : UserCode::Call {
   public:
    explicit CallingOut(VersionGate& gate) : Call(gate.user_code_) {}
  };

  /// See UserCode.
  template <class Lock>
  void Take(Lock& lock, std::string_view table, std::string_view op) const {
    user_code_.Take(lock, table, op);
  }
  void CheckOutside(std::string_view table, std::string_view op) const { user_code_.CheckOutside(table, op); }

  /// Makes the next version current; only a writer may.
  uint32_t Next() { return version_ += 1; }

 private:
  void WaitForUser(std::string_view table, std::string_view op) const { user_code_.Wait(table, op); }
  void Check(std::string_view table, std::string_view op, uint32_t version) const {
    const uint32_t live = version_.load();
    if (version != live) throw VersionError(table, op, version, live);
  }

  UserCode user_code_;
  mutable std::timed_mutex turn_;
  mutable std::shared_timed_mutex mutex_;
  std::atomic<uint32_t> version_;  // written under the lock; version() reads it without
};

}  // namespace kvjax
