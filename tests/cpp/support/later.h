// A queue that does what it is asked for later, as a GPU does.
#pragma once
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <utility>

#include "tests/cpp/support/device.h"

namespace later {

using device::Bytes;
using kvjax::device::Threads;

/// All queues of this kind are one, which lags behind by up to `lag` tasks.
class Later : public Threads {
 public:
  static constexpr bool kSynchronous = false;
  static inline size_t lag = 0;
  static inline size_t asked = 0;  // tasks
  static inline size_t waits = 0;  // however short

  Later() : Threads(1) {}
  static Later Alone(int /*device*/ = 0) {
    Run(0);
    return {};
  }
  template <class F>
  void Each(size_t n, F f) {
    Ask([=] { Threads(1).Each(n, f); });
  }
  template <class F>
  void Tiles(size_t n, F f) {
    Ask([=] { Threads(1).Tiles(n, f); });
  }
  template <class F>
  void Once(F f) {
    Ask(f);
  }
  template <class Work>
  void CountBins(size_t most, Work work) {
    Ask([=] { Threads(1).CountBins(most, work); });
  }
  /// What comes from the host is read at once.
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    if (OnDevice(from)) return Ask([=] { std::memcpy(to, from, bytes); });
    const auto* const begin = static_cast<const std::byte*>(from);
    Ask([to, copy = Bytes(begin, begin + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
  }
  void Fill(void* to, int byte, size_t bytes) {
    Ask([=] { Threads(1).Fill(to, byte, bytes); });
  }
  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
    Ask([=] { Threads(1).ExclusiveSum(in, out, n); });
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
    Ask([=] { Threads(1).SortPairs(keys, values, n, end_bit); });
  }
  static void* Allocate(size_t bytes, kvjax::device::Use /*use*/ = kvjax::device::Use::kRows) {
    void* const memory = Threads::Allocate(bytes);
    ranges[memory] = static_cast<std::byte*>(memory) + bytes;
    return memory;
  }
  static void Free(void* memory) noexcept {
    Ask([=] { FreeNow(memory); });
  }
  static void Release(void* memory) noexcept {
    Run(0);
    FreeNow(memory);
  }
  static void* AllocateShared(size_t bytes) { return Allocate(bytes); }
  static void FreeShared(void* memory) noexcept { Release(memory); }
  static void Wait() {
    ++waits;
    Run(0);
  }
  static bool Pause() {
    ++waits;
    if (!tasks.empty()) Run(tasks.size() - 1);
    return !tasks.empty();
  }
  /// How often the device has had nothing to do.
  static inline size_t idle = 0;

 private:
  static void Ask(std::function<void()> task) {
    ++asked;
    tasks.push_back(std::move(task));
    Run(lag);
  }
  /// Until no more than so many tasks are left.
  static void Run(size_t left) {
    while (tasks.size() > left) {
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      task();
      if (tasks.empty()) ++idle;
    }
  }
  static void FreeNow(void* memory) noexcept {
    ranges.erase(memory);
    Threads::Free(memory);
  }
  static bool OnDevice(const void* address) {
    auto it = ranges.upper_bound(address);
    return it != ranges.begin() && (--it)->second > address;
  }

  static inline std::deque<std::function<void()>> tasks;
  static inline std::map<const void*, const void*> ranges;
};

}  // namespace later
