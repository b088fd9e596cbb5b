// The device table on host threads, under the CPU's names: so that every Python test can be run on it without
// a GPU.
#include <nanobind/nanobind.h>

#include "kvjax/ffi/device/backend.h"
#include "kvjax/ffi/handlers/targets.h"
#include "kvjax/ffi/python/shards.h"
#include "kvjax/ffi/python/tables.h"
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
static_assert(Backend<Emulated> && BagBackend<Emulated> && ShardedBackend<Emulated>);

}  // namespace
}  // namespace kvjax::device

NB_MODULE(_emulated, m) {
  using kvjax::device::Emulated;
  kvjax::BindCommon(m);
  kvjax::BindHost<Emulated::Table>(m);
  kvjax::BindShards<Emulated::Table>(m);
  m.def("handlers", [] {
    nanobind::dict handlers;
    for (const auto& targets : {kvjax::TableTargets<Emulated>(), kvjax::ShardedTargets<Emulated>(),
                                kvjax::BagTargets<Emulated>()}) {
      for (const auto& [target, handler] : targets) {
        handlers[target] = nanobind::capsule(reinterpret_cast<void*>(handler));
      }
    }
    return handlers;
  });
}
