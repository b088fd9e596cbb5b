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
#include <thread>

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

  /// Both throw if `version` is not the current one. A read without one is that of a following handle: it
  /// waits for the step that is under way, and throws if that does not go on for `patience`.
  [[nodiscard]] ReadLock Read(std::string_view table, std::string_view op, std::optional<uint32_t> version,
                              Duration patience = StepPatience(false)) const {
    WaitForUser(table, op);
    if (!version) return ReadLive(table, op, patience);
    ReadLock lock(mutex_);
    Check(table, op, *version);
    return lock;
  }
  [[nodiscard]] WriteLock Write(std::string_view table, std::string_view op, uint32_t version) {
    WaitForUser(table, op);
    // Readers that come one after the other would keep a writer out for ever, so it has a turn before those
    // to come; the calls of a step that has begun need none.
    std::unique_lock turn(turn_, std::defer_lock);
    if (!in_step_.load()) turn.lock();
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

  // ---- steps: writes of several calls ------------------------------------------------------------------
  //
  // A training step makes the next version with its first call and is done with its last. In between only the
  // step itself knows that version: whoever asks for the live one waits.

  /// Makes the next version current; its rows are whole once EndStep is called.
  uint32_t BeginStep() {
    Touch();
    in_step_ = true;
    return Next();
  }
  /// The step continues.
  void Touch() const { touched_ = Now(); }
  void EndStep() { in_step_ = false; }

  /// The live version, once its rows are whole. A step that has not continued for `patience` will not:
  /// something else in its program has failed. Then the next version is made, so that it cannot continue
  /// after all.
  ///
  /// Where `alone` is false others are in the same step, and none may end it for itself: that is an error
  /// then.
  [[nodiscard]] uint32_t Settled(Duration patience, std::string_view table = "", bool alone = true) {
    const auto stuck = [&] { return Now() - touched_.load() >= patience.count(); };
    for (;; std::this_thread::sleep_for(UserCode::kPause)) {
      const uint32_t version = version_.load();  // first: a step that begins after it makes another
      if (!in_step_.load()) return version;
      if (!stuck()) continue;
      const WriteLock lock(mutex_);
      if (!in_step_.load() || !stuck()) continue;
      if (!alone) throw HalfwayError(table);
      in_step_ = false;
      return Next();
    }
  }

  /// Lives while a writer calls the user's code.
  class CallingOut : UserCode::Call {
   public:
    explicit CallingOut(VersionGate& gate) : Call(gate.user_code_) {}
  };

  /// Makes the next version current; only a writer may.
  uint32_t Next() { return version_ += 1; }

 private:
  /// Whoever waits for a step has the turn meanwhile, so that the next step comes after it.
  [[nodiscard]] ReadLock ReadLive(std::string_view table, std::string_view op, Duration patience) const {
    const std::lock_guard turn(turn_);
    for (;; std::this_thread::sleep_for(UserCode::kPause)) {
      {
        ReadLock lock(mutex_);
        if (!in_step_.load()) return lock;
      }
      if (Now() - touched_.load() >= patience.count()) throw LiveError(table, op);
    }
  }
  static int64_t Now() { return UserCode::Now(); }
  void WaitForUser(std::string_view table, std::string_view op) const { user_code_.Wait(table, op); }
  void Check(std::string_view table, std::string_view op, uint32_t version) const {
    const uint32_t live = version_.load();
    if (version != live) throw VersionError(table, op, version, live);
  }

  UserCode user_code_;
  mutable std::mutex turn_;
  mutable std::shared_mutex mutex_;
  std::atomic<bool> in_step_ = false;
  mutable std::atomic<int64_t> touched_ = 0;  // milliseconds
  std::atomic<uint32_t> version_;             // written under the lock; version() reads it without
};

}  // namespace kvjax
