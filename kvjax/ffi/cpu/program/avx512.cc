// The kernels of row programs for processors with AVX-512.
#include "kvjax/ffi/cpu/program/interpret.h"

namespace kvjax::program {

Kernels Avx512Kernels() { return {"avx512", &Find, &Sum}; }

}  // namespace kvjax::program
