// The workers of row passes: what a thread needs to run a program on rows.
//
// Tables whose steps are under way together and have the same program share them: a machine that has just run
// is in the caches, and one of each table's own would not be.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cpu/program/machine.h"

namespace kvjax {

/// One thread's: a machine, and what belongs to its two tiles.
struct RowWorker {
  /// A gradient that is to be summed, and where to.
  struct Repeated {
    uint32_t gradient;
    float* sum;
  };

  explicit RowWorker(const program::Kind& kind) : machine(kind, program::BestKernels()) {
    const auto rows = static_cast<size_t>(machine.rows());
    for (std::vector<Repeated>& some : repeated) some.reserve(rows);
    for (std::vector<float>& memory : sums) memory.resize(rows * 2 * static_cast<size_t>(kind.program.dim));
    for (std::vector<RowFacts>& some : facts) some.resize(kind.program.wants_facts() ? rows : 0);
  }

  program::Machine machine;
  std::vector<float> sums[2];
  std::vector<Repeated> repeated[2];
  std::vector<RowFacts> facts[2];
};

/// Those of one program on rows of one layout; there is one at least. Any thread may call at any time.
class RowWorkers {
 public:
  /// Those of all row passes that there are now and do the same. Throws std::bad_alloc.
  static std::shared_ptr<RowWorkers> Of(const Program& program, const SlotLayout& layout,
                                        size_t value_bytes) {
    static auto& mutex = *new std::mutex();  // never destroyed: threads may run when the process ends
    static auto& all = *new std::vector<std::weak_ptr<RowWorkers>>();
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](const auto& some) { return some.expired(); });
    for (const auto& some : all) {
      auto workers = some.lock();
      if (workers != nullptr && workers->kind_.Is(program, layout, value_bytes)) return workers;
    }
    auto workers = std::make_shared<RowWorkers>(program, layout, value_bytes);
    all.push_back(workers);
    return workers;
  }

  RowWorkers(const Program& program, const SlotLayout& layout, size_t value_bytes)
      : kind_{program, layout, value_bytes} {
    idle_.push_back(std::make_unique<RowWorker>(kind_));
  }

  /// An idle worker, or another; where there is no memory for one, the first that becomes idle.
  std::unique_ptr<RowWorker> Take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty()) {
      lock.unlock();
      try {
        auto worker = std::make_unique<RowWorker>(kind_);
        lock.lock();
        idle_.reserve(workers_ + 1);  // so that Give cannot fail
        ++workers_;
        return worker;
      } catch (const std::bad_alloc&) {
        if (!lock.owns_lock()) lock.lock();
      }
    }
    given_.wait(lock, [&] { return !idle_.empty(); });
    auto worker = std::move(idle_.back());
    idle_.pop_back();
    return worker;
  }
  void Give(std::unique_ptr<RowWorker> worker) {
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(worker));
    }
    given_.notify_one();
  }

 private:
  const program::Kind kind_;
  std::mutex mutex_;
  std::condition_variable given_;
  std::vector<std::unique_ptr<RowWorker>> idle_;
  size_t workers_ = 1;
};

}  // namespace kvjax
