// The Python module of the emulated backend: the device table on host threads, so that every Python test can
// be run on it without a GPU.
#include <nanobind/nanobind.h>

#include "kvjax/ffi/device/backend.h"
#include "kvjax/ffi/python/backend.h"
#include "kvjax/ffi/threads/threads.h"

namespace kvjax::device {
namespace {

struct OnThreads {
  using Ctx = xla::ffi::ThreadPool;
  using Exec = xla::ffi::ThreadPool;
  using Queue = Threads;
  static Threads Make(Exec&) { return Threads(); }
};
using Emulated = DeviceBackend<OnThreads>;
static_assert(Backend<Emulated>);

}  // namespace
}  // namespace kvjax::device

NB_MODULE(_emulated, m) { kvjax::BindBackend<kvjax::device::Emulated>(m); }
