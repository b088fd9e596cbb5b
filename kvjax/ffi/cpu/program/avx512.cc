// The kernels of row programs for processors with AVX-512.
#include "kvjax/ffi/cpu/program/interpret.h"

namespace kvjax::program {

// Initial rows in wider vectors take a tenth to a third longer: they wait for divisions and for what was just
// stored.
Kernels Avx512Kernels() { return {"avx512", &Find, &Sum, Avx2Kernels().elements}; }

}  // namespace kvjax::program
