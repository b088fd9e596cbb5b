// See pinned.h. A file of its own, because nvcc would have kernels use this `new`.
#include "tests/cpp/support/pinned.h"

#include <pthread.h>

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include "kvjax/ffi/cuda/runtime.h"

namespace {

/// Pieces of one block of pinned memory, by powers of two; all before and after it is malloc's.
class Pinned {
 public:
  static constexpr size_t kBytes = size_t{3} << 30, kStack = size_t{64} << 20, kLeast = 64;

  void Open() {
    void* memory = nullptr;
    kvjax::device::Check(cudaHostAlloc(&memory, kBytes, cudaHostAllocMapped | cudaHostAllocPortable),
                         "the arena");
    next_ = begin_ = static_cast<std::byte*>(memory);
    end_ = begin_ + kBytes;
  }
  void* Take(size_t bytes) {
    if (begin_ == nullptr) return std::malloc(bytes > 0 ? bytes : 1);
    const int power = PowerOf(bytes + kLeast);
    const std::lock_guard lock(mutex_);
    std::byte* piece = free_[power];
    if (piece != nullptr) {
      free_[power] = *reinterpret_cast<std::byte**>(piece + kLeast);
    } else {
      if (next_ + (size_t{1} << power) > end_) throw std::bad_alloc();
      piece = next_;
      next_ += size_t{1} << power;
    }
    *reinterpret_cast<int*>(piece) = power;
    return piece + kLeast;
  }
  void Give(void* memory) {
    auto* const at = static_cast<std::byte*>(memory);
    if (at < begin_ || at >= end_) return std::free(memory);
    const std::lock_guard lock(mutex_);
    std::byte* const piece = at - kLeast;
    const int power = *reinterpret_cast<int*>(piece);
    *reinterpret_cast<std::byte**>(at) = free_[power];
    free_[power] = piece;
  }

 private:
  static int PowerOf(size_t bytes) {
    int power = 7;
    while (size_t{1} << power < bytes) ++power;
    return power;
  }
  std::byte *begin_ = nullptr, *next_ = nullptr, *end_ = nullptr;
  std::byte* free_[64] = {};
  std::mutex mutex_;
};
Pinned all;

}  // namespace

void* operator new(size_t bytes) { return all.Take(bytes); }
void operator delete(void* p) noexcept { all.Give(p); }
void operator delete(void* p, size_t) noexcept { all.Give(p); }

int pinned::Run(int (*function)()) {
  all.Open();
  std::pair<int (*)(), int> call{function, 1};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstack(&attributes, operator new(Pinned::kStack), Pinned::kStack);
  const auto run = [](void* of) -> void* {
    auto& [f, result] = *static_cast<decltype(call)*>(of);
    result = f();
    return nullptr;
  };
  pthread_t thread;
  if (pthread_create(&thread, &attributes, run, &call) == 0) pthread_join(thread, nullptr);
  return call.second;
}
