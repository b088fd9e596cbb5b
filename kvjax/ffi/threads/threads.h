// Threads: the queue that runs kernels on host threads, so that the device's algorithms can be tested without
// a GPU.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// Each call returns when its kernel is done.
class Threads {
 public:
  static constexpr bool kEveryDevice = true;  // whether its kernels reach the memory of every device

  /// `threads` share a kernel in pieces of `grain` lanes or more.
  explicit Threads(unsigned threads = 2, size_t grain = 512) : threads_(threads), grain_(grain) {}
  /// A queue for calls that do not come from a program.
  static Threads Alone(int /*device*/ = 0) { return Threads(); }

  /// A point in the order of a queue. What has been asked for is done, so nobody waits.
  struct Event {
    void Wait() const {}
  };
  static constexpr uint64_t id() { return 1; }
  static void Record(Event&) {}
  static void WaitFor(const Event&) {}

  /// One lane.
  struct Tile {
    static constexpr int size() { return 1; }
    static constexpr int rank() { return 0; }
    template <class T>
    T Shuffle(T x, int) const {
      return x;
    }
    /// What each lane has written, all of them see from here on.
    void Sync() const {}
    /// How many lanes say yes.
    static int Count(bool yes) { return yes ? 1 : 0; }
  };

  template <class F>
  void Each(size_t n, F f) {
    Share(n, [&](size_t i) { f(i); });
  }
  template <class F>
  void Tiles(size_t n, F f) {
    Share(n, [&](size_t i) { f(Tile{}, i); });
  }
  /// Who runs lanes has memory of its own.
  static Sharing SharingOf(size_t, size_t) { return {1, 0}; }
  /// Whether so many tiles whose lanes have as many bytes each can keep it busy.
  static bool KeepBusy(size_t, size_t) { return true; }
  template <class F>
  void Tiles(size_t n, TileMemoryView memory, F f) {
    OnNewThreads(threads_, n, grain_, [&](size_t begin, size_t end) {
      std::vector<uint64_t> words(memory.bytes / sizeof(uint64_t));  // of one lane at a time
      const LaneMemory own{reinterpret_cast<std::byte*>(words.data()), 1, 0};
      for (size_t i = begin; i < end; ++i) f(Tile{}, i, own);
    });
  }
  template <class F>
  void Once(F f) {
    f();
  }

  /// For as long as work.size(), which is at most `most`, is not 0: counts the i below it by the bin work(i),
  /// kBins for none; then work.Settle(bin, before, count) gets the bin that has the work.wanted()-th of them,
  /// and how many it and those before have, or work.SettleAll() that there are no more.
  template <class Work>
  void CountBins(size_t /*most*/, Work work) {
    for (size_t n; (n = work.size()) > 0;) {
      std::vector<uint32_t> bins(Work::kBins);
      Share(n, [&](size_t i) {
        const uint32_t bin = work(i);
        if (bin < Work::kBins) Add(bins[bin], 1u);
      });
      uint64_t before = 0, wanted = work.wanted();
      uint32_t bin = 0;
      while (bin < Work::kBins && before + bins[bin] < wanted) before += bins[bin++];
      if (std::accumulate(bins.begin(), bins.end(), uint64_t{0}) <= wanted) {
        work.SettleAll();
      } else {
        work.Settle(bin, before, bins[bin]);
      }
    }
  }

  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void Fill(void* to, int byte, size_t bytes) {
    if (bytes > 0) std::memset(to, byte, bytes);
  }

  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
    uint32_t sum = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t next = in[i];
      out[i] = sum;
      sum += next;
    }
  }
  /// Stable, by the bits below `end_bit`.
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
    const Key mask = end_bit >= static_cast<int>(8 * sizeof(Key)) ? ~Key{0} : (Key{1} << end_bit) - 1;
    std::vector<std::pair<Key, uint32_t>> pairs(n);
    for (size_t i = 0; i < n; ++i) pairs[i] = {keys[i], values[i]};
    std::stable_sort(pairs.begin(), pairs.end(),
                     [&](const auto& x, const auto& y) { return (x.first & mask) < (y.first & mask); });
    for (size_t i = 0; i < n; ++i) keys[i] = pairs[i].first, values[i] = pairs[i].second;
  }

  static void* Allocate(size_t bytes, Use /*use*/ = Use::kRows) {
    if (countdown_ > 0 && --countdown_ == 0) throw std::bad_alloc();
    void* memory = std::aligned_alloc(256, std::max<size_t>(256, bytes + (-bytes & 255)));
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  static void Free(void* memory) noexcept { std::free(memory); }
  /// As Free, from outside of any queue.
  static void Release(void* memory) noexcept { Free(memory); }
  /// Memory that both sides see.
  static void* AllocateShared(size_t bytes) { return Allocate(bytes); }
  static void FreeShared(void* memory) noexcept { Free(memory); }
  /// For tests: the n-th allocation from now on fails; 0 for none.
  static void FailAllocation(size_t n) { countdown_ = n; }

  void Wait() {}
  void Settle() noexcept {}
  static bool Pause() { return false; }

 private:
  template <class Lane>
  void Share(size_t n, Lane lane) {
    OnNewThreads(threads_, n, grain_, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) lane(i);
    });
  }

  static inline thread_local size_t countdown_ = 0;
  unsigned threads_;
  size_t grain_;
};

}  // namespace kvjax::device
