// VersionGate: the version that orders the calls of a table, and the lock behind it.
//
// Every call brings the version of the handle it was made through, and only the current one is let in. A
// write makes the next one. So a call through a stale handle is an error and never a race, whatever order XLA
// runs things in. Readers share the lock, a writer has it alone.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/user_code.h"

namespace kvjax {

class VersionGate {
 public:
  using ReadLock = std::shared_lock<std::shared_mutex>;
  using WriteLock = std::unique_lock<std::shared_mutex>;

  using Duration = UserCode::Duration;

  /// `user` is how long calls wait for the user's code.
  explicit VersionGate(uint32_t first, Duration user = std::chrono::seconds(20))
      : user_code_(user), version_(first) {}

  [[nodiscard]] uint32_t version() const { return version_.load(); }

  /// Both throw if `version` is not the current one.
  [[nodiscard]] ReadLock Read(std::string_view table, std::string_view op, uint32_t version) const {
    WaitForUser(table, op);
    ReadLock lock(mutex_);
    Check(table, op, version);
    return lock;
  }
  [[nodiscard]] WriteLock Write(std::string_view table, std::string_view op, uint32_t version) {
    WaitForUser(table, op);
    WriteLock lock(mutex_);
    Check(table, op, version);
    return lock;
  }

  /// For what may be done through any handle.
  [[nodiscard]] ReadLock ReadAny(std::string_view table, std::string_view op) const {
    WaitForUser(table, op);
    return ReadLock(mutex_);
  }
  [[nodiscard]] WriteLock WriteAny(std::string_view table, std::string_view op) {
    WaitForUser(table, op);
    return WriteLock(mutex_);
  }

  /// Lives while a writer calls the user's code.
  class CallingOut : UserCode::Call {
   public:
    explicit CallingOut(VersionGate& gate) : Call(gate.user_code_) {}
  };

  /// Makes the next version current; only a writer may.
  uint32_t Next() { return version_ += 1; }

 private:
  void WaitForUser(std::string_view table, std::string_view op) const { user_code_.Wait(table, op); }
  void Check(std::string_view table, std::string_view op, uint32_t version) const {
    const uint32_t live = version_.load();
    if (version != live) throw VersionError(table, op, version, live);
  }

  UserCode user_code_;
  mutable std::shared_mutex mutex_;
  std::atomic<uint32_t> version_;  // written under the lock; version() reads it without
};

}  // namespace kvjax
