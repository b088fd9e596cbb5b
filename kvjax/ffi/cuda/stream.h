// Stream: the queue that runs the kernels of the device table on a CUDA stream. The kernel launches are in
// stream.cuh, for nvcc.
//
// Threads (threads/threads.h) has the same functions and runs the same kernels on host threads. A kernel is a
// functor or a lambda [=] KVJAX_HD (...) {...}; nvcc takes such lambdas only from functions that are public
// and are themselves neither lambdas nor constructors. Everything runs in the order in which it was asked
// for, and only Wait waits. Nothing waits for a whole device, which other streams, and other devices through
// them, may depend on.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/cuda/runtime.h"

namespace kvjax::device {

class Stream {
 public:
  static constexpr int kTile = 8, kWarp = 32;
  /// Lanes of a block that has memory, and such blocks of a processor: so many that each lane has registers.
  static constexpr int kTilesBlock = 128, kTilesBlocks = 4;
  static constexpr bool kEveryDevice = false;  // whether its kernels reach the memory of every device

  explicit Stream(cudaStream_t stream) : Stream(DeviceOf(stream), stream) {}
  /// A queue for calls that do not come from a program. Without a device, below 0, it is the first.
  static Stream Alone(int device) { return Stream(std::max(device, 0), cudaStreamPerThread); }
  /// What was done alone is done when the call returns.
  ~Stream() {
    if (stream_ == cudaStreamPerThread) cudaStreamSynchronize(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// A point in the order of a stream.
  class Event {
   public:
    Event() = default;
    ~Event() {
      if (event_ != nullptr) cudaEventDestroy(event_);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    /// Until the device has come to where it was last recorded.
    void Wait() const {
      const UncapturedCalls calls;
      if (event_ != nullptr) Check(cudaEventSynchronize(event_), "a wait");
    }

   private:
    friend Stream;
    std::atomic<cudaEvent_t> event_ = nullptr;
  };
  /// Which stream it is: another one never has the same id, also if it gets the same address.
  [[nodiscard]] uint64_t id() const { return id_; }
  /// The event is here, now.
  void Record(Event& event) {
    if (event.event_ == nullptr) {
      cudaEvent_t made = nullptr;
      Check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "an event");
      event.event_ = made;
    }
    Check(cudaEventRecord(event.event_, stream_), "an event");
  }
  /// What is asked of this stream from here on comes after the event. The host does not wait.
  void WaitFor(const Event& event) {
    if (event.event_ != nullptr) Check(cudaStreamWaitEvent(stream_, event.event_, 0), "an event");
  }

  /// Eight lanes of a warp that work on one thing. All of them make each call below, together.
  struct Tile {
    KVJAX_HD static constexpr int size() { return kTile; }
    /// Which lane of the tile this is.
    [[nodiscard]] KVJAX_HD int rank() const {
#ifdef __CUDA_ARCH__
      return threadIdx.x % kTile;
#else
      return 0;
#endif
    }
    /// The x of another lane.
    template <class T>
    [[nodiscard]] KVJAX_HD T Shuffle(T x, [[maybe_unused]] int lane) const {
      static_assert(std::is_trivially_copyable_v<T>);
#ifdef __CUDA_ARCH__
      uint32_t words[(sizeof(T) + 3) / 4] = {};
      memcpy(words, &x, sizeof(T));
      for (uint32_t& word : words) word = __shfl_sync(Lanes(), word, lane, kTile);
      memcpy(&x, words, sizeof(T));
#endif
      return x;
    }
    /// What each lane has written, all of them see from here on.
    KVJAX_HD void Sync() const {
#ifdef __CUDA_ARCH__
      __syncwarp(Lanes());
#endif
    }
    /// How many lanes say yes.
    [[nodiscard]] KVJAX_HD int Count(bool yes) const {
#ifdef __CUDA_ARCH__
      return __popc(__ballot_sync(Lanes(), yes) & Lanes());
#else
      return yes ? 1 : 0;
#endif
    }

#ifdef __CUDACC__
   private:
    [[nodiscard]] __device__ uint32_t First() const { return threadIdx.x % 32 / kTile * kTile; }
    [[nodiscard]] __device__ uint32_t Lanes() const { return ((1u << kTile) - 1) << First(); }
#endif
  };

  /// f(i) for every i < n, in parallel.
  template <class F>
  void Each(size_t n, F f);
  /// f(tile, i) for every i < n, eight i to a tile. The last tile's i reach n and beyond: f must check.
  template <class F>
  void Tiles(size_t n, F f);
  /// Blocks have shared memory, which is enough for some kilobytes a lane: a block has as many lanes as let
  /// several of them run on a processor. Else there is scratch, for as many lanes as a kernel then has.
  [[nodiscard]] Sharing SharingOf(size_t bytes, size_t n) const {
    constexpr size_t kMost = kTilesBlock, kBlocks = kTilesBlocks;  // lanes, blocks of a processor
    constexpr size_t kScratch = size_t{64} << 20, kFewest = 512;   // bytes, lanes
    const size_t shared = SharedMemory();
    size_t lanes = kMost;
    while (lanes > kWarp && kBlocks * lanes * bytes > shared) lanes /= 2;
    if (lanes * bytes <= shared) return {lanes, 0};
    return {std::min((n + kMost - 1) / kMost * kMost, std::max(kScratch / bytes / kMost * kMost, kFewest)),
            1};
  }
  /// Whether so many tiles whose lanes have as many bytes each can keep the device busy.
  [[nodiscard]] bool KeepBusy(size_t tiles, size_t bytes) const {
    constexpr size_t kLanes = kTilesBlock * kTilesBlocks;  // of a processor
    int processors = 0;
    Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, on_.device()), "a device");
    return kLanes * bytes <= SharedMemory() && tiles * kTile >= kLanes * static_cast<size_t>(processors);
  }
  /// f(tile, i, memory): the same with memory for each lane.
  template <class F>
  void Tiles(size_t n, TileMemoryView memory, F f);
  /// f() once.
  template <class F>
  void Once(F f);

  /// While work.size() is not 0, counts the i below it by their bins; see Threads.
  template <class Work>
  void CountBins(size_t most, const Work& work);

  /// From the host or the device to either. Waits where memory of the host might be freed before it has been
  /// read.
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "a copy");
    cudaPointerAttributes of = {};
    Check(cudaPointerGetAttributes(&of, from), "a look at memory");
    if (of.type != cudaMemoryTypeDevice) Wait();
  }
  void Fill(void* to, int byte, size_t bytes) {
    if (bytes > 0) Check(cudaMemsetAsync(to, byte, bytes, stream_), "a fill");
  }

  /// out[i] = in[0] + ... + in[i - 1]. Both may be the same array.
  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n);
  /// Sorts by the bits below end_bit of the keys; what is equal there keeps its order.
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit);

  /// Memory for what is asked of this stream from here on. Throws std::bad_alloc.
  void* Allocate(size_t bytes, Use use = Use::kRows) {
    void* memory = nullptr;
    if (bytes > 0) {
      Check(cudaMallocFromPoolAsync(&memory, bytes, PoolOf(on_.device(), use), stream_), "an allocation");
    }
    return memory;
  }
  /// Frees it once all that was asked of this stream so far is done.
  void Free(void* memory) noexcept {
    if (memory != nullptr) cudaFreeAsync(memory, stream_);
  }
  /// Frees it from outside of any stream: what has used it is done. cudaFree waits for nothing where memory
  /// is from a pool.
  static void Release(void* memory) noexcept {
    const UncapturedCalls calls;
    cudaFree(memory);
  }

  /// Host memory that kernels reach too, under the same address.
  static void* AllocateShared(size_t bytes) {
    const UncapturedCalls calls;
    void* memory = nullptr;
    Check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "pinned memory");
    return memory;
  }
  /// What has used it is done: this memory is not in the order of a stream. The driver may wait for more.
  static void FreeShared(void* memory) noexcept {
    const UncapturedCalls calls;
    cudaFreeHost(memory);
  }

  /// Until all that was asked for is done.
  void Wait() { Check(cudaStreamSynchronize(stream_), "a wait"); }
  /// The same where nobody can be told of an error.
  void Settle() noexcept { cudaStreamSynchronize(stream_); }
  /// For a moment. Returns whether something that was asked for is still to be done.
  bool Pause() {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) Check(state, "a wait");
    if (state == cudaSuccess) return false;
    cudaGetLastError();  // that it is not ready is no error
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return true;
  }

 private:
  Stream(int device, cudaStream_t stream) : on_(device), stream_(stream) {
    unsigned long long id = 0;
    Check(cudaStreamGetId(stream_, &id), "the id of a stream");
    id_ = id + 1;  // 0 is none
  }
  /// Bytes that a block may have.
  [[nodiscard]] size_t SharedMemory() const {
    int bytes = 0;
    Check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, on_.device()), "a device");
    return static_cast<size_t>(bytes);
  }
  template <class F>
  void Launch(void (*kernel)(size_t, F), size_t lanes, const F& f);
  template <class Call>
  void WithScratch(const char* what, size_t n, Call call);

  UncapturedCalls calls_;
  OnDevice on_;
  cudaStream_t stream_;
  uint64_t id_ = 0;
};

}  // namespace kvjax::device
