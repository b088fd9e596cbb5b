// The interface between the kernels of the CUDA backend and its Python module, which nvcc does not compile.
#pragma once
#include <string>
#include <vector>

#include "kvjax/ffi/cuda/table.h"
#include "kvjax/ffi/handlers/targets.h"

namespace kvjax::device {

std::vector<NamedHandler> CudaTargets();

/// The compute capabilities that there is code for: 90 is 9.0.
std::vector<int> Architectures();

/// How many devices can run the backend's kernels, and if none why.
struct Devices {
  int count;
  std::string trouble;
};
Devices FindDevices();

}  // namespace kvjax::device
