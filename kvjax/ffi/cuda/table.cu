// The device table on CUDA, as nvcc compiles it: all of its kernels, and nothing of XLA.
#include "kvjax/ffi/cuda/stream.cuh"
#include "kvjax/ffi/cuda/table.h"
#include "kvjax/ffi/device/apply.h"
#include "kvjax/ffi/device/delta.h"
#include "kvjax/ffi/device/evict.h"
#include "kvjax/ffi/device/reads.h"
#include "kvjax/ffi/device/sharded.h"
#include "kvjax/ffi/device/whole.h"
#include "kvjax/ffi/device/writes.h"

namespace kvjax::device {

template class DeviceTable<Stream>;

}  // namespace kvjax::device
