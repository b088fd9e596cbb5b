// Who may call a table when: the version that orders its calls, and the lock behind it.
//
// Every call brings the version of the handle it was made through, and only the current one is let in. A
// write makes the next one. So a call through a stale handle is an error and never a race, whatever order XLA
// runs things in. Readers share the lock, a writer has it alone.
#pragma once
#include <atomic>
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

  explicit VersionGate(uint32_t first) : version_(first) {}

  [[nodiscard]] uint32_t version() const { return version_.load(); }

  /// Both throw if `version` is not the current one.
  [[nodiscard]] ReadLock Read(std::string_view table, std::string_view op, uint32_t version) const {
    CheckInside(table, op);
    ReadLock lock(mutex_);
    Check(table, op, version);
    return lock;
  }
  [[nodiscard]] WriteLock Write(std::string_view table, std::string_view op, uint32_t version) {
    CheckInside(table, op);
    WriteLock lock(mutex_);
    Check(table, op, version);
    return lock;
  }

  /// For what may be done through any handle. Such calls come from the host, and wait for a writer that calls
  /// the user's code, unless they come from there.
  [[nodiscard]] ReadLock ReadAny(std::string_view table, std::string_view op) const {
    if (caller_ == std::this_thread::get_id()) CheckInside(table, op);
    return ReadLock(mutex_);
  }
  [[nodiscard]] WriteLock WriteAny(std::string_view table, std::string_view op) {
    if (caller_ == std::this_thread::get_id()) CheckInside(table, op);
    return WriteLock(mutex_);
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
  void CheckInside(std::string_view table, std::string_view op) const {
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

  mutable std::shared_mutex mutex_;
  std::atomic<bool> outside_ = false;
  std::atomic<std::thread::id> caller_{};
  std::atomic<uint32_t> version_;  // written under the lock; version() reads it without
};

}  // namespace kvjax
