// The kernels of row programs for any processor.
#include "kvjax/ffi/cpu/program/interpret.h"

namespace kvjax::program {

Kernels BaselineKernels() { return {"baseline", &Find, &Sum, &Elements}; }

}  // namespace kvjax::program
