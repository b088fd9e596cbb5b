// Device memory: arrays that last, and scratch that goes with its scope.
#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>

namespace kvjax::device {

/// n elements of device memory that outlive the queue they were made on.
template <class Q, class T>
class Array {
 public:
  Array() = default;
  /// Throws std::bad_alloc.
  Array(Q& q, size_t n) : data_(static_cast<T*>(q.Allocate(std::max<size_t>(n, 1) * sizeof(T)))), n_(n) {}
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), n_(std::exchange(other.n_, 0)) {}
  Array& operator=(Array other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    return *this;
  }
  /// Waits for the device; Retire does not.
  ~Array() {
    if (data_ != nullptr) Q::Release(data_);
  }
  /// Gives the memory back once what is on the queue has been done.
  void Retire(Q& q) noexcept {
    if (data_ != nullptr) q.Free(std::exchange(data_, nullptr));
    n_ = 0;
  }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] size_t size() const { return n_; }
  [[nodiscard]] size_t bytes() const { return n_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t n_ = 0;
};

/// n elements for the calls that follow on a queue, as long as the scope lasts.
template <class Q, class T>
class Scratch {
 public:
  /// For none it has no address.
  Scratch(Q& q, size_t n) : q_(q), array_(n > 0 ? Array<Q, T>(q, n) : Array<Q, T>()) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { array_.Retire(q_); }

  [[nodiscard]] T* data() const { return array_.data(); }

 private:
  Q& q_;
  Array<Q, T> array_;
};

}  // namespace kvjax::device
