// The process that tables belong to: a fork has copies of the references to them, but not the tables.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace kvjax {

/// Remembers the process that it was made in; whoever is in another has a copy by fork.
class OwnProcess {
 public:
  [[nodiscard]] bool here() const { return forks_ == Forks(); }

 private:
  /// How many forks lead from the process that loaded this to the one that runs. Asking the system who one is
  /// would cost a system call for each call on a table.
  static uint32_t Forks() {
    static std::atomic<uint32_t> forks{0};
    [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, [] { ++forks; });
    return forks.load(std::memory_order_relaxed);
  }

  uint32_t forks_ = Forks();
};

}  // namespace kvjax
