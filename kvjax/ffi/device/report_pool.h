// ReportPool: memory that both sides see, for the reports of all tables of a process. It is reused and never
// given back, because a driver that takes back pinned memory may wait for all that its device is doing.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "kvjax/ffi/device/control.h"

namespace kvjax::device {

template <class Q>
class ReportPool {
 public:
  struct Return {
    void operator()(Report* report) const {
      ReportPool& pool = Get();
      const std::lock_guard lock(pool.mutex_);
      pool.free_.push_back(report);  // for which there is space
    }
  };
  using Pointer = std::unique_ptr<Report, Return>;

  /// All zeros. Throws std::bad_alloc.
  static Pointer Take() {
    ReportPool& pool = Get();
    const std::lock_guard lock(pool.mutex_);
    if (pool.free_.empty()) {
      pool.free_.reserve(pool.made_ + kAtOnce);
      auto* const block = static_cast<Report*>(Q::AllocateShared(kAtOnce * sizeof(Report)));
      for (size_t i = 0; i < kAtOnce; ++i) pool.free_.push_back(block + i);
      pool.made_ += kAtOnce;
    }
    Pointer report(pool.free_.back());
    pool.free_.pop_back();
    *report = {};
    return report;
  }

 private:
  static constexpr size_t kAtOnce = 64;

  static ReportPool& Get() {
    static auto* pool = new ReportPool;  // as long as the process: tables may be dropped at exit
    return *pool;
  }

  std::mutex mutex_;
  std::vector<Report*> free_;
  size_t made_ = 0;
};

}  // namespace kvjax::device
