// The user's functions that a table calls, sinks and scores, and the calls of others that wait for them.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <thread>

#include "kvjax/ffi/core/error_texts.h"

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
      ++code_.calls_;
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
  /// of another thread, it cannot be distinguished from the others, and all of them give up after a while.
  void Wait(std::string_view table, std::string_view op) const {
    for (const int64_t since = Now(); outside_.load(); std::this_thread::sleep_for(kPause)) {
      if (caller_.load() == std::this_thread::get_id()) throw UserCodeError(table, op);
      if (Now() - since > patience_.count()) throw SlowUserCodeError(table, op, patience_.count());
    }
  }

  /// Takes a lock that others hold while they call the user's code. It may have begun since Wait, and wait
  /// for the call that wants the lock: that gives up once it has run for so long.
  template <class Lock>
  void Take(Lock& lock, std::string_view table, std::string_view op) const {
    using Clock = std::chrono::system_clock;  // ThreadSanitizer sees no lock that is taken by the steady one
    for (bool taken = lock.try_lock(); !taken;) {
      const uint64_t call = calls_;
      for (const int64_t since = Now(); !taken && Now() - since <= patience_.count();)
        taken = lock.try_lock_until(Clock::now() + patience_);
      if (!taken && outside_ && calls_ == call) throw SlowUserCodeError(table, op, patience_.count());
    }
  }

  /// For a call that would take away what the user's code is about, and that need not wait for it.
  void CheckOutside(std::string_view table, std::string_view op) const {
    if (caller_.load() == std::this_thread::get_id()) throw UserCodeError(table, op);
  }

  static int64_t Now() {
    return std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  const Duration patience_;
  std::atomic<bool> outside_ = false;
  std::atomic<uint64_t> calls_ = 0;
  std::atomic<std::thread::id> caller_{};
};

}  // namespace kvjax
