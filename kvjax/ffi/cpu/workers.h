// Workers: threads that help calls on CPU tables, and look for work for a moment before they sleep.
//
// A call takes a millisecond or less, and to wake a core that sleeps takes a good part of that where the
// system is a guest of another. So who has just helped looks a little longer than the pause between two
// calls of a training loop. It is not for long: the cores are XLA's too.
#pragma once
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "kvjax/ffi/core/parallel.h"

namespace kvjax {

class Workers {
 public:
  /// Those of the process. They are never joined, and outlive what is destroyed at its end.
  static Workers& Own() {
    static auto* const own = new Workers();
    return *own;
  }

  /// ParallelFor on `threads` threads, which calls at the same time have together: the calling one, and
  /// workers for those that are not calling too. Workers round, and take subnormal numbers, as the caller
  /// does.
  void Run(size_t threads, size_t n, size_t grain, const std::function<void(size_t, size_t)>& body) {
    const Caller caller(callers_);
    const size_t free = threads - std::min(threads, caller.callers);
    std::fenv_t floats;
    std::fegetenv(&floats);
    const auto schedule = [&](auto work) {
      Schedule(threads - 1, [floats, work = std::move(work)] {
        std::fesetenv(&floats);
        work();
      });
    };
    Share(free + 1, schedule, n, grain, body);
  }

 private:
  static constexpr std::chrono::microseconds kPatience{50};

  struct Caller {
    explicit Caller(std::atomic<size_t>& all) : all(all), callers(++all) {}
    ~Caller() { --all; }
    Caller(const Caller&) = delete;
    std::atomic<size_t>& all;
    const size_t callers;  // with this one
  };

  /// Has one of up to `most` workers call work. Throws std::bad_alloc, and std::system_error if there is none
  /// and the system gives no thread.
  void Schedule(size_t most, std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      if (workers_ < most) {
        try {
          std::thread([this] { Work(); }).detach();
          ++workers_;
        } catch (const std::system_error&) {
          if (workers_ == 0) throw;
        }
      }
      queue_.push_back(std::move(work));
      queued_.store(queue_.size());
      if (asleep_ == 0) return;
    }
    wake_.notify_one();
  }

  [[noreturn]] void Work() {
    for (;;) {
      LookForWork();
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        ++asleep_;
        wake_.wait(lock, [this] { return !queue_.empty(); });
        --asleep_;
        work = std::move(queue_.front());
        queue_.pop_front();
        queued_.store(queue_.size());
      }
      work();
    }
  }

  void LookForWork() const {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (size_t i = 1; queued_.load() == 0; ++i) {
      Pause();
      if (i % 64 == 0 && std::chrono::steady_clock::now() > until) return;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  std::atomic<size_t> queued_{0};   // the length of the queue, for who looks at it without the lock
  std::atomic<size_t> callers_{0};  // calls of Run under way
  size_t workers_ = 0, asleep_ = 0;
};

}  // namespace kvjax
