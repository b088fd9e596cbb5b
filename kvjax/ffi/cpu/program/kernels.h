// The kernels of an instruction set: one function per instruction and shape of its operands, sums, and
// initial rows.
//
// Each set is compiled by itself, with the compiler's flags for it (CMakeLists.txt), from interpret.h; the
// machine (machine.h) takes the best that the processor has. All of them give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/distribution.h"
#include "kvjax/ffi/core/instructions.h"

namespace kvjax::program {

/// Holds one element of any type, at its beginning.
struct Cell {
  uint64_t word;
};

/// What is read: a pointer for each row, and how many bytes behind it its elements begin, or one element for
/// each row (stride 1) or all (0).
struct Source {
  float* const* rows = nullptr;
  size_t offset = 0;
  const Cell* cells = nullptr;
  int32_t stride = 0;
};

/// What stochastic rounding draws its bits from.
struct Random {
  uint64_t seed = 0;
  int64_t step = 0;
  const uint64_t* const* keys = nullptr;  // of the rows of a tile
};

/// Computes one element, cast to its type when it is called.
using Element = void (*)();

struct Step;
/// Runs one instruction on some rows of `width` elements.
using Kernel = void (*)(const Step& step, int32_t rows, int32_t width);

/// An instruction, bound to where its registers are.
struct Step {
  Kernel kernel = nullptr;
  Source arg[kMostOperands];
  float* const* out_rows = nullptr;  // one of the two
  size_t out_offset = 0;
  Cell* out = nullptr;
  int32_t width = 1;          // elements of a row that it works on
  Element element = nullptr;  // what the kernel calls for each element, if it does
  const Random* random = nullptr;
  void* memory = nullptr;  // of the kernel, kMemory bytes, zeros at first
  static constexpr size_t kMemory = 2048;
};

/// How an instruction's operands lie.
struct Shape {
  bool vector = false;       // whether the result has a row's elements
  int32_t vectors = 0;       // a bit for each operand that has
  bool shared_base = false;  // the first operand is the same for all rows
  int32_t type = 0;          // of the field that is loaded or stored
};

struct Kernels {
  const char* name;
  /// Sets the kernel of a step.
  void (*find)(Opcode op, Shape shape, Step& step);
  /// Sums those of the rows (n, dim) that `which` (count,) names, one after the other.
  void (*sum)(float* to, const float* rows, const uint32_t* which, size_t count, size_t dim);
  /// Makes the elements of columns begin to end of the initial rows of keys (n,), each to where rows (n,)
  /// says.
  void (*elements)(const Distribution& of, uint64_t seed, size_t n, const uint64_t* keys, float* const* rows,
                   int64_t begin, int64_t end);
};

Kernels BaselineKernels();
#if defined(__x86_64__)
Kernels Avx2Kernels();
Kernels Avx512Kernels();
#endif

/// The best that this processor has.
inline const Kernels& BestKernels() {
  static const Kernels best = [] {
#if defined(__x86_64__)
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
      return Avx512Kernels();
    if (fma) return Avx2Kernels();
#endif
    return BaselineKernels();
  }();
  return best;
}

}  // namespace kvjax::program
