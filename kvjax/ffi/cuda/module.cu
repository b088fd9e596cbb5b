// The CUDA backend: handlers for XLA over the device table, as nvcc compiles them. The table itself is in
// table.cu.
#include <algorithm>
#include <string>
#include <vector>

#include "kvjax/ffi/cuda/module.h"
#include "kvjax/ffi/cuda/stream.cuh"
#include "kvjax/ffi/device/backend.h"

namespace kvjax::device {
namespace {

struct OnStream {
  using Ctx = xla::ffi::PlatformStream<cudaStream_t>;
  using Exec = cudaStream_t;
  using Queue = Stream;
  static Stream Make(Exec stream) { return Stream(stream); }
};

}  // namespace

using Cuda = DeviceBackend<OnStream>;
static_assert(Backend<Cuda>);

std::vector<NamedHandler> CudaTargets() { return Targets<Cuda>(); }

std::vector<int> Architectures() {
  std::vector<int> all = {__CUDA_ARCH_LIST__};
  for (int& architecture : all) architecture /= 10;
  return all;
}

Devices FindDevices() {
  const std::vector<int> built_for = Architectures();
  const int oldest = *std::min_element(built_for.begin(), built_for.end());
  int driver = 0, all = 0, usable = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) return {0, "there is no CUDA driver"};  // which CUDA calls one that is too old
  const cudaError_t error = cudaGetDeviceCount(&all);
  if (error != cudaSuccess) return {0, ErrorText(error)};
  for (int device = 0; device < all; ++device) {  // asking for attributes makes no context
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (10 * major + minor >= oldest) ++usable;
  }
  if (usable > 0) return {usable, ""};
  return {0, "all of " + std::to_string(all) + " have a compute capability below " +
                 std::to_string(oldest / 10) + "." + std::to_string(oldest % 10)};
}

}  // namespace kvjax::device
