// Who may call a table when: the version that orders its calls, and the lock behind it.
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
#include <thread>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/refusals.h"

namespace kvjax {

/// The user's code, sinks and scores, that a write calls: other calls wait for it, and such as come back from
/// there would wait for ever, and are errors instead.
class UserCode {
 public:
  using Duration = std::chrono::milliseconds;
  static constexpr std::chrono::microseconds kPause{200};

  explicit UserCode(Duration patience = std::chrono::seconds(20)) : patience_(patience) {}

  class Call {
   public:
    explicit Call(UserCode& code) : code_(code) {
      code_.caller_ = std::this_thread::get_id();
      code_.outside_ = true;
    }
    ~Call() {
      code_.outside_ = false;
      code_.caller_ = std::thread::id();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    UserCode& code_;
  };

  /// Calls of others wait for the user's code to be done. One from inside it never could; if it comes by way
  /// of another thread, it cannot be told from the others, and gives up after a while.
  void Wait(std::string_view table, std::string_view op) const {
    for (const int64_t since = Now(); outside_.load(); std::this_thread::sleep_for(kPause)) {
      if (caller_.load() == std::this_thread::get_id() || Now() - since > patience_.count()) break;
    }
    if (!outside_.load()) return;
    throw MakeError(ErrorCode::kFailedPrecondition, table, op, "a call after the eviction",
                    "one from the sink or score function that it has called",
                    "use the rows that the function is given");
  }

  static int64_t Now() {
    return std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  const Duration patience_;
  std::atomic<bool> outside_ = false;
  std::atomic<std::thread::id> caller_{};
};

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
  /// The step goes on.
  void Touch() const { touched_ = Now(); }
  void EndStep() { in_step_ = false; }

  /// The live version, once its rows are whole. A step that has not gone on for `patience` will not:
  /// something else in its program has failed. Then the next version is made, so that it cannot go on after
  /// all.
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
  static int64_t Now() { return UserCode::Now(); }
  void WaitForUser(std::string_view table, std::string_view op) const { user_code_.Wait(table, op); }
  void Check(std::string_view table, std::string_view op, uint32_t version) const {
    const uint32_t live = version_.load();
    if (version != live) throw VersionError(table, op, version, live);
  }

  UserCode user_code_;
  mutable std::shared_mutex mutex_;
  std::atomic<bool> in_step_ = false;
  mutable std::atomic<int64_t> touched_ = 0;  // milliseconds
  std::atomic<uint32_t> version_;             // written under the lock; version() reads it without
};

}  // namespace kvjax
