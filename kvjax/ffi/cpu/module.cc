// The Python module of the CPU backend.
#include <nanobind/nanobind.h>

#include "kvjax/ffi/cpu/backend.h"
#include "kvjax/ffi/cpu/malloc.h"
#include "kvjax/ffi/python/backend.h"

static_assert(kvjax::EvictingBackend<kvjax::Cpu>);

NB_MODULE(_cpu, m) {
  kvjax::KeepBuffers();
  kvjax::BindBackend<kvjax::Cpu>(m);
}
