// Order: how the calls on a table follow each other, whatever streams they come on, and what the host waits
// for before it gives the table's memory back.
#pragma once
#include <cstdint>
#include <mutex>
#include <utility>

#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// One event, recorded at the end of each call on the stream that the call came on. A call on another stream
/// waits for it, on the device, so nobody has to know which streams there are, or what else a device does.
template <class Q>
class Order {
 public:
  /// From the first kernel of a call to its last. Arrays that a call gives up go back in the order of its
  /// queue.
  class Turn {
   public:
    Turn(Order& order, Q& q) : order_(order), q_(q) {
      order_.Follow(q_);
      before_ = std::exchange(Calling<Q>::queue, &q_);
    }
    ~Turn() {
      Calling<Q>::queue = before_;
      order_.Record(q_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Order& order_;
    Q& q_;
    Q* before_ = nullptr;
  };

  /// Throws where the device has no event left: a call could not tell anybody, at its end.
  explicit Order(int32_t device) {
    Q q = Q::Alone(device);
    q.Record(done_);
    last_ = q.id();
  }

  /// Until all calls whose turn has ended are done.
  void Wait() const { done_.Wait(); }

 private:
  void Follow(Q& q) {
    const std::lock_guard lock(mutex_);
    if (last_ != q.id()) q.WaitFor(done_);
  }
  void Record(Q& q) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      if (last_ != q.id()) q.WaitFor(done_);  // another stream has had a turn meanwhile
      q.Record(done_);
      last_ = q.id();
    } catch (...) {  // a device that takes no events any more does nothing at all
    }
  }

  typename Q::Event done_;
  uint64_t last_ = 0;  // the id of a stream, which no other one gets
  std::mutex mutex_;
};

}  // namespace kvjax::device
