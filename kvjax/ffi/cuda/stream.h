// The queue that runs the device table's kernels on a CUDA stream. What starts kernels is in stream.cuh, for
// nvcc.
//
// Its twin in threads.h has the same functions and runs the same kernels on host threads. A kernel is a
// functor or a lambda [=] KVJAX_HD (...) {...}; nvcc takes such lambdas only from functions that are public
// and are themselves neither lambdas nor constructors. Everything runs in the order in which it was asked
// for, and only Wait waits.
#pragma once
#include <cuda_runtime_api.h>

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
  static constexpr int kTile = 8;
  static constexpr bool kSynchronous = false;

  explicit Stream(cudaStream_t stream) : on_(stream), stream_(stream) {}
  /// A queue for calls that do not come from a program, once everything else is done.
  static Stream Alone() {
    Check(cudaDeviceSynchronize(), "a wait");
    return Stream(cudaStreamPerThread);
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
  /// f(tile, i) for every i < n, eight i to a tile. The last tile's i go on to n and beyond: f must check.
  template <class F>
  void Tiles(size_t n, F f);
  /// f() once.
  template <class F>
  void Once(F f);

  /// From the host or the device to either.
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "a copy");
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
  void* Allocate(size_t bytes) {
    void* memory = nullptr;
    if (bytes > 0) {
      Check(cudaMallocFromPoolAsync(&memory, bytes, ScratchPool(on_.device()), stream_), "an allocation");
    }
    return memory;
  }
  /// Frees it once all that was asked of this stream so far is done.
  void Free(void* memory) noexcept {
    if (memory != nullptr) cudaFreeAsync(memory, stream_);
  }
  /// Frees it from outside of any stream, once the device is done: which cudaFree does not wait for, with
  /// memory of a pool.
  static void Release(void* memory) noexcept {
    cudaDeviceSynchronize();
    cudaFree(memory);
  }

  /// Host memory that kernels reach too, under the same address.
  static void* AllocateShared(size_t bytes) {
    void* memory = nullptr;
    Check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "pinned memory");
    return memory;
  }
  static void FreeShared(void* memory) noexcept { cudaFreeHost(memory); }

  /// Until all that was asked for is done.
  void Wait() { Check(cudaStreamSynchronize(stream_), "a wait"); }
  /// Until the device has told what the host waits for, or all is done: the host may stay ahead.
  template <class Known>
  void WaitUntil(Known known) {
    while (!known()) {
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state == cudaSuccess) return;
      if (state != cudaErrorNotReady) Check(state, "a wait");
      cudaGetLastError();  // that it is not ready is no error
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  template <class F>
  void Launch(void (*kernel)(size_t, F), size_t lanes, const F& f);
  template <class Call>
  void WithScratch(const char* what, size_t n, Call call);

  OnDeviceOf on_;
  cudaStream_t stream_;
};

}  // namespace kvjax::device
