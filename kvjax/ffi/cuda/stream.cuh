// The kernel launches of a stream, for nvcc.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/cuda/stream.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

// A kernel reads its functor where the arguments of the launch are: without __grid_constant__ each lane
// copies all of it to memory of its own wherever the address of a part is taken.

template <class F>
__global__ void EachKernel(size_t n, const __grid_constant__ F f) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) f(i);
}

template <class F>
__global__ void TilesKernel(size_t lanes, const __grid_constant__ F f) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < lanes) f(Stream::Tile(), i);
}

/// memory: of all lanes together, or nullptr for that of the processors.
template <class F>
__global__ void __launch_bounds__(Stream::kTilesBlock, Stream::kTilesBlocks)
    TilesWithMemoryKernel(size_t lanes, std::byte* memory, const __grid_constant__ F f) {
  extern __shared__ __align__(16) uint64_t shared[];
  const size_t all = size_t{gridDim.x} * blockDim.x, me = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  LaneMemory mine{memory, static_cast<uint32_t>(all), static_cast<uint32_t>(me)};  // some thousand lanes
  if (memory == nullptr) mine = {reinterpret_cast<std::byte*>(shared), blockDim.x, threadIdx.x};
  for (size_t i = me; i < lanes; i += all) f(Stream::Tile(), i, mine);
}

template <class F>
__global__ void OnceKernel(size_t, const __grid_constant__ F f) {
  f();
}

constexpr size_t kBlock = 256;  // lanes

/// Every block counts its share in its own memory. The last one to be done sums up, and the others wait for
/// it: they may, as a cooperative launch has all blocks run at once. bins: (kBins + 2,) zeros.
template <class Work>
__global__ void __launch_bounds__(kBlock) CountBinsKernel(uint32_t* bins, Work work) {
  constexpr uint32_t kBins = Work::kBins, kEach = kBins / kBlock;
  static_assert(kBins % kBlock == 0);
  using Scan = cub::BlockScan<uint64_t, kBlock>;
  __shared__ uint32_t counts[kBins];
  __shared__ typename Scan::TempStorage scan;
  __shared__ bool is_last;
  const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> done(bins[kBins]), settled(bins[kBins + 1]);
  const size_t lanes = size_t{gridDim.x} * kBlock;
  uint32_t round = 0;
  for (size_t n; (n = work.size()) > 0;) {
    ++round;
    for (uint32_t b = threadIdx.x; b < kBins; b += kBlock) counts[b] = 0;
    __syncthreads();
    for (size_t i = size_t{blockIdx.x} * kBlock + threadIdx.x; i < n; i += lanes) {
      const uint32_t bin = work(i);
      if (bin < kBins) atomicAdd(&counts[bin], 1u);
    }
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < kBins; b += kBlock) {
      if (counts[b] != 0) atomicAdd(&bins[b], counts[b]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = done.fetch_add(1, cuda::memory_order_acq_rel) == round * gridDim.x - 1;
    __syncthreads();
    if (is_last) {
      uint32_t mine[kEach];
      uint64_t sum = 0, before = 0, total = 0;
      for (uint32_t k = 0; k < kEach; ++k) sum += mine[k] = __ldcg(&bins[threadIdx.x * kEach + k]);
      Scan(scan).ExclusiveSum(sum, before, total);
      const uint64_t wanted = work.wanted();
      __syncthreads();  // before one lane changes what is wanted
      if (total <= wanted) {
        if (threadIdx.x == 0) work.SettleAll();
      } else if (before < wanted && wanted <= before + sum) {
        uint32_t k = 0;
        for (; before + mine[k] < wanted; ++k) before += mine[k];
        work.Settle(threadIdx.x * kEach + k, before, mine[k]);
      }
      for (uint32_t b = threadIdx.x; b < kBins; b += kBlock) bins[b] = 0;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) settled.store(round, cuda::memory_order_release);
    } else if (threadIdx.x == 0) {
      while (settled.load(cuda::memory_order_acquire) != round) __nanosleep(100);
    }
    __syncthreads();
  }
}

/// CUB counts items in 32 bits, and a grid has no more blocks.
inline uint32_t Items(size_t n) {
  if (n <= INT32_MAX) return static_cast<uint32_t>(n);
  throw ItemsError(n);
}

template <class F>
void Stream::Launch(void (*kernel)(size_t, F), size_t lanes, const F& f) {
  if (lanes == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(Items((lanes + kBlock - 1) / kBlock));
  config.blockDim = dim3(static_cast<uint32_t>(lanes < kBlock ? lanes : kBlock));
  config.stream = stream_;
  Check(cudaLaunchKernelEx(&config, kernel, lanes, f), "the start of a kernel");
}
template <class F>
void Stream::Each(size_t n, F f) {
  Launch(EachKernel<F>, n, f);
}
template <class F>
void Stream::Tiles(size_t n, F f) {
  Launch(TilesKernel<F>, (n + kTile - 1) / kTile * kTile, f);
}
template <class F>
void Stream::Tiles(size_t n, TileMemoryView memory, F f) {
  if (n == 0) return;
  const size_t lanes = (n + kTile - 1) / kTile * kTile;
  const auto [lanes_each, pieces] = memory.sharing;
  const size_t block = pieces == 0 ? lanes_each : kTilesBlock;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(Items(pieces == 0 ? (lanes + block - 1) / block : lanes_each / block));
  config.blockDim = dim3(static_cast<uint32_t>(block));
  config.dynamicSmemBytes = pieces == 0 ? lanes_each * memory.bytes : 0;
  config.stream = stream_;
  const auto kernel = TilesWithMemoryKernel<F>;
  // Always the same: other threads start the same kernel with more and with less.
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(SharedMemory())),
        "the memory of a kernel");
  Check(cudaLaunchKernelEx(&config, kernel, lanes, memory.scratch, f), "the start of a kernel");
}
template <class F>
void Stream::Once(F f) {
  Launch(OnceKernel<F>, 1, f);
}

template <class Work>
void Stream::CountBins(size_t most, const Work& work) {
  constexpr int kBlocks = 4;  // to a multiprocessor, which keep it busy
  int blocks = 0, processors = 0;
  Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, CountBinsKernel<Work>, kBlock, 0), "a kernel");
  Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, on_.device()), "a device");
  const size_t at_once = size_t{1} * std::min(blocks, kBlocks) * processors;
  const Scratch<Stream, uint32_t> bins(*this, Work::kBins + 2);
  Fill(bins.data(), 0, (Work::kBins + 2) * sizeof(uint32_t));
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(std::clamp<size_t>(most / kBlock, 1, at_once)));
  config.blockDim = dim3(kBlock);
  config.stream = stream_;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  Check(cudaLaunchKernelEx(&config, CountBinsKernel<Work>, bins.data(), work), "the start of a kernel");
}

/// CUB's way: the first call says how many bytes the second needs.
template <class Call>
void Stream::WithScratch(const char* what, size_t n, Call call) {
  if (n == 0) return;
  size_t bytes = 0;
  Check(call(nullptr, bytes), what);
  const Scratch<Stream, std::byte> scratch(*this,
                                           bytes + 1);  // with no address the second call would ask again
  Check(call(scratch.data(), bytes), what);
}

inline void Stream::ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
  const uint32_t items = Items(n);
  WithScratch("a prefix sum", n, [&](void* scratch, size_t& bytes) {
    return cub::DeviceScan::ExclusiveSum(scratch, bytes, in, out, items, stream_);
  });
}

template <class Key>
void Stream::SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
  const Scratch<Stream, Key> other_keys(*this, n);
  const Scratch<Stream, uint32_t> other_values(*this, n);
  cub::DoubleBuffer<Key> k(keys, other_keys.data());
  cub::DoubleBuffer<uint32_t> v(values, other_values.data());
  const uint32_t items = Items(n);
  WithScratch("a sort", n, [&](void* scratch, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, k, v, items, 0, end_bit, stream_);
  });
  if (k.Current() != keys) Copy(keys, k.Current(), n * sizeof(Key));
  if (v.Current() != values) Copy(values, v.Current(), n * sizeof(uint32_t));
}

}  // namespace kvjax::device
