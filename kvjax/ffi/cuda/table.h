// The device table on CUDA, for those who call it: its kernels are in table.cu.
#pragma once
#include "kvjax/ffi/cuda/stream.h"
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

extern template class DeviceTable<Stream>;

}  // namespace kvjax::device
