// The Python module of the CUDA backend. It loads where there is no GPU and no driver too, so that programs
// can be lowered for CUDA there.
#include "kvjax/ffi/cuda/module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kvjax/ffi/python/backend.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  using namespace kvjax;
  BindBackend<device::DeviceTable<device::Stream>>(m, &device::CudaTargets);
  m.def("architectures", &device::Architectures, "The compute capabilities there is code for: 90 is 9.0.");
  m.def("devices", [] { return device::FindDevices().count; }, "How many GPUs can be used.");
  m.def("trouble", [] { return device::FindDevices().trouble; }, "Why there are none, or nothing.");
}
