// How a stream starts kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <string>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/cuda/memory.h"
#include "kvjax/ffi/cuda/stream.h"

namespace kvjax::device {

template <class F>
__global__ void EachKernel(size_t n, F f) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) f(i);
}

template <class F>
__global__ void TilesKernel(size_t lanes, F f) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < lanes) f(Stream::Tile(), i);
}

template <class F>
__global__ void OnceKernel(size_t, F f) {
  f();
}

/// CUB counts items in 32 bits, and a grid has no more blocks.
inline uint32_t Items(size_t n) {
  if (n <= INT32_MAX) return static_cast<uint32_t>(n);
  throw MakeError(ErrorCode::kInvalidArgument, "", "a call on the GPU", "fewer than 2^31 items",
                  std::to_string(n), "split the call");
}

template <class F>
void Stream::Launch(void (*kernel)(size_t, F), size_t lanes, const F& f) {
  constexpr size_t kBlock = 256;
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
void Stream::Once(F f) {
  Launch(OnceKernel<F>, 1, f);
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
