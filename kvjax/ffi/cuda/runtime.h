// Wrappers of the CUDA runtime, in the form the table needs: errors as exceptions, the device of a stream,
// the pool that scratch comes from, and host memory that kernels write.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// "cudaErrorNoDevice: no CUDA-capable device is detected"
inline std::string ErrorText(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

/// Throws if the CUDA call `what` has failed: std::bad_alloc where memory is short, else kvjax::Error.
inline void Check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call that asks would hear of this one
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw CudaError(what, ErrorText(error));
}

inline int DeviceOf(cudaStream_t stream) {
  int device = 0;
  Check(cudaStreamGetDevice(stream, &device), "the device of a stream");
  return device;
}

/// While it lasts, calls of this thread neither end the capture of a stream that another thread has under way
/// nor are refused because of it: none of them is about a stream that is captured.
class UncapturedCalls {
 public:
  UncapturedCalls() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~UncapturedCalls() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  UncapturedCalls(const UncapturedCalls&) = delete;
  UncapturedCalls& operator=(const UncapturedCalls&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one before
};

/// Makes a device the current one, and the one before it again at the end.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    Check(cudaGetDevice(&before_), "the current device");
    if (device_ != before_) Check(cudaSetDevice(device_), "a change of device");
  }
  ~OnDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  [[nodiscard]] int device() const { return device_; }

 private:
  int device_, before_ = 0;
};

/// A pool of a device. That of scratch keeps what was freed, up to a small share of the memory, so that a
/// step finds the scratch of the last: a pool without gives it back whenever the host waits. Rows have a pool
/// of their own, as what is in use counts as kept.
inline cudaMemPool_t PoolOf(int device, Use use) {
  constexpr size_t kKept = 64;  // one part in so many of the device's memory
  static std::mutex mutex;
  static auto* const pools = new std::map<std::pair<int, Use>, cudaMemPool_t>;  // as long as the process
  const std::lock_guard lock(mutex);
  cudaMemPool_t& pool = (*pools)[{device, use}];
  if (pool != nullptr) return pool;
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  cudaMemPool_t made = nullptr;
  Check(cudaMemPoolCreate(&made, &props), "a memory pool");
  size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total), "the size of memory");
  uint64_t kept = use == Use::kScratch ? total / kKept : 0;
  Check(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &kept), "a memory pool");
  return pool = made;
}

}  // namespace kvjax::device
