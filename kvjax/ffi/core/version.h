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

namespace kvjax {

class VersionGate {
 public:
  using ReadLock = std::shared_lock<std::shared_mutex>;
  using WriteLock = std::unique_lock<std::shared_mutex>;

  using Duration = std::chrono::milliseconds;

  /// `user` is how long calls wait for the user's code.
  explicit VersionGate(uint32_t first, Duration user = std::chrono::seconds(20))
      : user_(user), version_(first) {}

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
    for (;; std::this_thread::sleep_for(kPause)) {
      const uint32_t version = version_.load();  // first: a step that begins after it makes another
      if (!in_step_.load()) return version;
      if (!stuck()) continue;
      const WriteLock lock(mutex_);
      if (!in_step_.load() || !stuck()) continue;
      if (!alone) {
        throw MakeError(ErrorCode::kFailedPrecondition, table, "refresh", "a training step that goes on",
                        "one that has stopped half-way",
                        "kvjax.drop_table(name) and restore the last checkpoint");
      }
      in_step_ = false;
      return Next();
    }
  }

  /// While one of these lives a writer calls the user's code; calls that come back from there would wait for
  /// the lock for ever, and are errors instead.
  class CallingOut {
   public:
    explicit CallingOut(VersionGate& gate) : gate_(gate) {
      gate_.caller_ = std::this_thread::get_id();
      gate_.outside_ = true;
    }
    ~CallingOut() {
      gate_.outside_ = false;
      gate_.caller_ = std::thread::id();
    }
    CallingOut(const CallingOut&) = delete;
    CallingOut& operator=(const CallingOut&) = delete;

   private:
    VersionGate& gate_;
  };

  /// Makes the next version current; only a writer may.
  uint32_t Next() { return version_ += 1; }

 private:
  static constexpr std::chrono::microseconds kPause{200};

  static int64_t Now() {
    return std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  /// Calls of others wait for the user's code to be done. One from inside it never could; if it comes by way
  /// of another thread, it cannot be told from the others, and gives up after a while.
  void WaitForUser(std::string_view table, std::string_view op) const {
    for (const int64_t since = Now(); outside_.load(); std::this_thread::sleep_for(kPause)) {
      if (caller_.load() == std::this_thread::get_id() || Now() - since > user_.count()) break;
    }
    if (!outside_.load()) return;
    throw MakeError(ErrorCode::kFailedPrecondition, table, op, "a call after the eviction",
                    "one from the sink or score function that it has called",
                    "use the rows that the function is given");
  }
  void Check(std::string_view table, std::string_view op, uint32_t version) const {
    if (version == version_.load()) return;
    if (static_cast<int32_t>(version - version_.load()) > 0) {
      throw MakeError(
          ErrorCode::kFailedPrecondition, table, op,
          "a handle made in this process (live: version " + std::to_string(version_.load()) + ")",
          "one that no write here has made (version " + std::to_string(version) + ")",
          "rows are not part of a handle: save them with kvjax.orbax.split and TableSave, restore them "
          "with TableRestore; and do no arithmetic on a tree that holds tables");
    }
    throw MakeError(ErrorCode::kFailedPrecondition, table, op,
                    "the live handle (version " + std::to_string(version_.load()) + ")",
                    "a stale one (version " + std::to_string(version) + ")",
                    "use the Table that the last write returned, as an argument of the jitted function, or "
                    "table.refresh(); a read that must come before a write is ordered by table.after(x)");
  }

  const Duration user_;
  mutable std::shared_mutex mutex_;
  std::atomic<bool> outside_ = false;
  std::atomic<std::thread::id> caller_{};
  std::atomic<bool> in_step_ = false;
  mutable std::atomic<int64_t> touched_ = 0;  // milliseconds
  std::atomic<uint32_t> version_;             // written under the lock; version() reads it without
};

}  // namespace kvjax
