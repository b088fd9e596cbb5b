// The Python module of the CPU backend.
#include <nanobind/nanobind.h>

#include "kvjax/ffi/cpu/backend.h"
#include "kvjax/ffi/handlers/targets.h"
#include "kvjax/ffi/python/common.h"
#include "kvjax/ffi/python/shards.h"
#include "kvjax/ffi/python/tables.h"

namespace nb = nanobind;

namespace kvjax {

static_assert(Backend<Cpu> && BagBackend<Cpu> && RoomBackend<Cpu>);

namespace {

nb::dict Handlers() {
  nb::dict handlers;
  for (const auto& targets :
       {TableTargets<Cpu>(), ShardedTargets<Cpu>(), RoomTargets<Cpu>(), BagTargets<Cpu>()}) {
    for (const auto& [target, handler] : targets) {
      handlers[target] = nb::capsule(reinterpret_cast<void*>(handler));
    }
  }
  return handlers;
}

}  // namespace
}  // namespace kvjax

NB_MODULE(_cpu, m) {
  using namespace kvjax;
  BindCommon(m);
  BindHost<Table>(m);
  BindShards<Table>(m);
  m.def("handlers", &Handlers, "XLA FFI handlers by target name.");
}
