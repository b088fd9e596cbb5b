// The kernels of row programs for processors with AVX2 and FMA.
#include "kvjax/ffi/cpu/program/interpret.h"

namespace kvjax::program {

Kernels Avx2Kernels() { return {"avx2", &Find, &Sum, &Elements}; }

}  // namespace kvjax::program
