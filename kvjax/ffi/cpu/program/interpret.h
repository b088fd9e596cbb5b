// The kernels of one instruction set: included by the file that is compiled for it.
//
// Everything here is in an anonymous namespace or inlined by force: a function that is compiled for one set
// must never be linked into another's code.
#pragma once
#include <cstddef>
#include <cstdint>

#define KVJAX_HD [[gnu::always_inline]]
#include "kvjax/ffi/core/half.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/rounding.h"
#include "kvjax/ffi/cpu/program/elements.h"
#include "kvjax/ffi/cpu/program/kernels.h"
#include "kvjax/ffi/cpu/program/sums.h"

namespace kvjax::program {
namespace {

// The words of a register are read as what an instruction takes them for.
using Float [[gnu::may_alias]] = float;
using Int [[gnu::may_alias]] = int32_t;
using Double [[gnu::may_alias]] = double;

template <class T>
struct Aliased;
template <>
struct Aliased<float> {
  using Type = Float;
};
template <>
struct Aliased<int32_t> {
  using Type = Int;
};
template <>
struct Aliased<double> {
  using Type = Double;
};
template <class T>
using Words = typename Aliased<T>::Type;

/// The lanes of a sum, so that its bits are the same whatever the set.
constexpr int32_t kLanes = 16;

inline uint32_t Bits(int32_t x) { return static_cast<uint32_t>(x); }
inline int32_t Word(uint32_t x) { return static_cast<int32_t>(x); }

/// Where the elements of a row begin.
inline char* Place(float* const* rows, int32_t r, size_t offset) {
  return reinterpret_cast<char*>(rows[r]) + offset;
}

template <class T>
const Words<T>* Read(const Source& source, int32_t r, bool vector) {
  return vector ? reinterpret_cast<const Words<T>*>(Place(source.rows, r, source.offset))
                : reinterpret_cast<const Words<T>*>(source.cells + r * source.stride);
}
template <class T>
Words<T>* Write(const Step& step, int32_t r, bool vector) {
  return vector ? reinterpret_cast<Words<T>*>(Place(step.out_rows, r, step.out_offset))
                : reinterpret_cast<Words<T>*>(step.out + r);
}

// ---- element by element
// ------------------------------------------------------------------------------------

template <class F, int kVectors, int kArity, class In, class Out>
void MapVectors(const Step& s, int32_t rows, int32_t dim) {
  for (int32_t r = 0; r < rows; ++r) {
    const auto* a = Read<In>(s.arg[0], r, kVectors & 1);
    const auto* b = kArity > 1 ? Read<In>(s.arg[1], r, kVectors & 2) : a;
    const auto* c = kArity > 2 ? Read<In>(s.arg[2], r, kVectors & 4) : a;
    const auto* d = kArity > 3 ? Read<In>(s.arg[3], r, kVectors & 8) : a;
    const auto* e = kArity > 4 ? Read<In>(s.arg[4], r, kVectors & 16) : a;
    auto* const out = Write<Out>(s, r, true);
    const In a0 = *a, b0 = *b, c0 = *c, d0 = *d, e0 = *e;
    const auto element = [&](int32_t i) {
      return F::Of(kVectors & 1 ? In(a[i]) : a0, kVectors & 2 ? In(b[i]) : b0, kVectors & 4 ? In(c[i]) : c0,
                   kVectors & 8 ? In(d[i]) : d0, kVectors & 16 ? In(e[i]) : e0);
    };
    KVJAX_INDEPENDENT
    for (int32_t i = 0; i < dim; ++i) out[i] = element(i);
  }
}

/// Whatever the shape, one element at a time.
template <class In, class Out>
void MapElements(const Step& s, int32_t rows, int32_t dim) {
  const auto of = reinterpret_cast<Out (*)(In, In, In, In, In)>(s.element);
  const int32_t n = s.out_rows != nullptr ? dim : 1;
  for (int32_t r = 0; r < rows; ++r) {
    const Words<In>* arg[3];
    bool vector[3];
    for (int j = 0; j < 3; ++j) {
      const Source& source = s.arg[j].rows != nullptr || s.arg[j].cells != nullptr ? s.arg[j] : s.arg[0];
      vector[j] = source.rows != nullptr;
      arg[j] = Read<In>(source, r, vector[j]);
    }
    auto* const out = Write<Out>(s, r, s.out_rows != nullptr);
    for (int32_t i = 0; i < n; ++i)
      out[i] =
          of(arg[0][vector[0] ? i : 0], arg[1][vector[1] ? i : 0], arg[2][vector[2] ? i : 0], In(), In());
  }
}

// Single elements lie one to a cell of 8 bytes: some rows at a time are brought together, so that they are
// computed side by side.
constexpr int32_t kBlock = 16;

template <class T>
void ReadBlock(const Source& source, int32_t r, int32_t n, T* to) {
  const T first = *Read<T>(source, r, false);
  for (int32_t i = 0; i < kBlock; ++i) to[i] = first;
  if (source.stride == 0) return;
  if (n == kBlock) {
    for (int32_t i = 0; i < kBlock; ++i)
      to[i] = *Read<T>(Source{.cells = source.cells, .stride = 1}, r + i, false);
  } else {
    for (int32_t i = 1; i < n; ++i) to[i] = *Read<T>(source, r + i, false);
  }
}

/// of(a, b, c) of single elements of all rows.
template <int kArity, class In, class Out, class Of>
[[gnu::always_inline]] inline void MapBlocks(const Step& s, int32_t rows, Of of) {
  alignas(64) In a[kBlock], b[kBlock], c[kBlock];
  alignas(64) Out out[kBlock];
  for (int32_t r = 0; r < rows; r += kBlock) {
    const int32_t n = rows - r < kBlock ? rows - r : kBlock;
    ReadBlock(s.arg[0], r, n, a);
    if constexpr (kArity > 1) ReadBlock(s.arg[1], r, n, b);
    if constexpr (kArity > 2) ReadBlock(s.arg[2], r, n, c);
    for (int32_t i = 0; i < kBlock; ++i)
      out[i] = of(a[i], kArity > 1 ? b[i] : a[i], kArity > 2 ? c[i] : a[i]);
    for (int32_t i = 0; i < n; ++i) *Write<Out>(s, r + i, false) = out[i];
  }
}

template <class F, int kArity, class In, class Out>
void MapScalars(const Step& s, int32_t rows, int32_t) {
  MapBlocks<kArity, In, Out>(s, rows, [](In a, In b, In c) { return F::Of(a, b, c, In(), In()); });
}

/// The same by a call for each.
template <int kArity, class In, class Out>
void CallScalars(const Step& s, int32_t rows, int32_t) {
  const auto of = reinterpret_cast<Out (*)(In, In, In, In, In)>(s.element);
  for (int32_t r = 0; r < rows; ++r) {
    const In a = *Read<In>(s.arg[0], r, false);
    const In b = kArity > 1 ? In(*Read<In>(s.arg[1], r, false)) : a;
    *Write<Out>(s, r, false) = of(a, b, a, In(), In());
  }
}

template <class F, int kArity, class In, class Out>
void FindCall(bool vector, Step& step) {
  step.element = reinterpret_cast<Element>(&F::Of);
  step.kernel = vector || kArity > 2 ? &MapElements<In, Out> : &CallScalars<kArity, In, Out>;
}

template <class F, int kArity, class In, class Out, int kVectors = (1 << kArity) - 1>
void FindMap(Shape shape, Step& step) {
  if (!shape.vector) {
    step.kernel = &MapScalars<F, kArity, In, Out>;
  } else if (shape.vectors == kVectors) {
    step.kernel = &MapVectors<F, kVectors, kArity, In, Out>;
  } else if constexpr (kVectors > (kArity == 1 ? 0 : 1)) {
    FindMap<F, kArity, In, Out, kVectors - 1>(shape, step);
  } else {
    FindCall<F, kArity, In, Out>(true, step);  // a row of equal elements
  }
}

template <class F, Opcode kOp, class In, class Out>
void FindFused(Step& step) {
  constexpr InstructionForm kForm = kInstructionForms[static_cast<size_t>(kOp)];
  if constexpr (kForm.vectors() != 0) {
    step.kernel = &MapVectors<F, kForm.vectors(), kForm.arity, In, Out>;
  } else {
    step.kernel = &MapScalars<F, kForm.arity, In, Out>;
  }
}

/// Powers of one base, as of 0.999 ** count: the counts of rows are few, and a power is slow.
template <class F, class T>
void PowersOfShared(const Step& s, int32_t rows, int32_t) {
  struct Power {
    uint64_t known;
    T base, exponent, value;
  };
  constexpr uint32_t kPowers = Step::kMemory / sizeof(Power);
  auto* const powers = static_cast<Power*>(s.memory);
  const T base = *Read<T>(s.arg[0], 0, false);
  for (int32_t r = 0; r < rows; ++r) {
    const T exponent = *Read<T>(s.arg[1], r, false);
    const bool small = exponent >= 0 && exponent < T(1e9);
    Power& p = powers[(small ? static_cast<uint32_t>(exponent) : 0u) % kPowers];
    if (p.known == 0 || p.base != base || p.exponent != exponent)
      p = {1, base, exponent, F::Of(base, exponent, exponent, T(), T())};
    *Write<T>(s, r, false) = p.value;
  }
}

// ---- one of a row's elements
// -------------------------------------------------------------------------------

template <class F, class T>
void Reduce(const Step& s, int32_t rows, int32_t dim) {
  for (int32_t r = 0; r < rows; ++r) {
    const auto* in = Read<T>(s.arg[0], r, true);
    T lane[kLanes];
    for (T& x : lane) x = F::Zero();
    int32_t i = 0;
    for (; i + kLanes <= dim; i += kLanes)
      for (int32_t l = 0; l < kLanes; ++l) lane[l] = F::Of(lane[l], in[i + l]);
    for (int32_t l = 0; i + l < dim; ++l) lane[l] = F::Of(lane[l], in[i + l]);
    for (int32_t w = kLanes / 2; w > 0; w /= 2)
      for (int32_t l = 0; l < w; ++l) lane[l] = F::Of(lane[l], lane[l + w]);
    *Write<T>(s, r, false) = lane[0];
  }
}

// ---- between registers and rows
// ----------------------------------------------------------------------------

enum Type : int32_t { kWord, kBFloat16, kFloat16, kBool };  // as Field::Type

template <int kType>
inline void Get(const void* from, int32_t i, Float* to) {
  if constexpr (kType == kWord) __builtin_memcpy(to + i, static_cast<const char*>(from) + 4 * i, 4);
  if constexpr (kType == kBool) reinterpret_cast<Int*>(to)[i] = static_cast<const char*>(from)[i] != 0;
  if constexpr (kType == kBFloat16 || kType == kFloat16) {
    uint16_t half;
    __builtin_memcpy(&half, static_cast<const char*>(from) + 2 * i, 2);
    to[i] = kType == kBFloat16 ? FromBFloat16(half) : FromFloat16(half);
  }
}
template <int kType>
inline void Put(const Float* from, int32_t i, void* to) {
  if constexpr (kType == kWord) __builtin_memcpy(static_cast<char*>(to) + 4 * i, from + i, 4);
  if constexpr (kType == kBool)
    static_cast<char*>(to)[i] = static_cast<char>(reinterpret_cast<const Int*>(from)[i] != 0);
  if constexpr (kType == kBFloat16 || kType == kFloat16) {
    const uint16_t half = kType == kBFloat16 ? ToBFloat16(from[i]) : ToFloat16(from[i]);
    __builtin_memcpy(static_cast<char*>(to) + 2 * i, &half, 2);
  }
}

/// A register of single elements has one of each row: a loop of so many would be set up for each.
template <bool kLoad, int kType, bool kVector>
void Move(const Step& s, int32_t rows, int32_t) {
  const int32_t width = kVector ? s.width : 1;
  for (int32_t r = 0; r < rows; ++r) {
    if constexpr (kLoad) {
      const void* const from = Place(s.arg[0].rows, r, s.arg[0].offset);
      Float* const to = Write<float>(s, r, kVector);
      KVJAX_INDEPENDENT
      for (int32_t i = 0; i < width; ++i) Get<kType>(from, i, to);
    } else {
      const Float* const from = Read<float>(s.arg[0], r, kVector);
      void* const to = Place(s.out_rows, r, s.out_offset);
      KVJAX_INDEPENDENT
      for (int32_t i = 0; i < width; ++i) Put<kType>(from, i, to);
    }
  }
}

template <bool kLoad, int kType>
void FindMove(Shape shape, Step& step) {
  if (shape.type == kType)
    step.kernel = shape.vector ? &Move<kLoad, kType, true> : &Move<kLoad, kType, false>;
  if constexpr (kType < kBool) FindMove<kLoad, kType + 1>(shape, step);
}

/// One of a row of constants, the same for all rows: the first or the last of them for an index beyond.
inline void Pick(const Step& s, int32_t rows, int32_t width) {
  const auto* const from = reinterpret_cast<const Int*>(Place(s.arg[0].rows, 0, s.arg[0].offset));
  for (int32_t r = 0; r < rows; ++r) {
    const int32_t index = *Read<int32_t>(s.arg[1], r, false);
    *Write<int32_t>(s, r, false) = from[index < 0 ? 0 : index < width ? index : width - 1];
  }
}

/// Elements of rows as a type of 16 bits holds them, see core/rounding.h.
template <bool kHalf>
void Stochastic(const Step& s, int32_t rows, int32_t dim) {
  for (int32_t r = 0; r < rows; ++r) {
    const uint32_t state = RandomState(s.random->seed, s.random->step, *s.random->keys[r]);
    const auto before = static_cast<uint32_t>(*Read<int32_t>(s.arg[1], r, false));  // columns
    const Float* const in = Read<float>(s.arg[0], r, s.arg[0].rows != nullptr);
    Float* const out = Write<float>(s, r, s.out_rows != nullptr);
    KVJAX_INDEPENDENT
    for (int32_t i = 0; i < dim; ++i)
      out[i] = RoundedAtRandom<kHalf>(state, before + static_cast<uint32_t>(i), in[i]);
  }
}

// ---- all of them ------------------------------------------------------------------------------------------

#define KVJAX_MOVE(name, arity)
#define KVJAX_MAP(name, arity, In, Out, expression)                                              \
  struct name##_map {                                                                            \
    static Out Of([[maybe_unused]] In a, [[maybe_unused]] In b, [[maybe_unused]] In c, In, In) { \
      return expression;                                                                         \
    }                                                                                            \
  };                                                                                             \
  [[maybe_unused]] inline Out name(In a, In b = In(), In c = In()) {                             \
    return name##_map::Of(a, b, c, In(), In());                                                  \
  }
#define KVJAX_FUSED(name, kinds, In, Out, calls)                                             \
  struct name##_fused {                                                                      \
    static Out Of(In a, [[maybe_unused]] In b, [[maybe_unused]] In c, [[maybe_unused]] In d, \
                  [[maybe_unused]] In e) {                                                   \
      return calls;                                                                          \
    }                                                                                        \
  };
#define KVJAX_REDUCE(name, T, zero, expression)  \
  struct name##_reduce {                         \
    static T Zero() { return zero; }             \
    static T Of(T x, T y) { return expression; } \
  };
KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MAP
#undef KVJAX_REDUCE
#undef KVJAX_FUSED

void Find(Opcode op, Shape shape, Step& step) {
  if (!shape.vector && shape.shared_base) {
    if (op == Opcode::k_pow_f) step.kernel = &PowersOfShared<pow_f_map, float>;
    if (op == Opcode::k_pow_d) step.kernel = &PowersOfShared<pow_d_map, double>;
    if (step.kernel != nullptr) return;
  }
  switch (op) {
#define KVJAX_MAP(name, arity, In, Out, expression) \
  case Opcode::k_##name:                            \
    return FindMap<name##_map, arity, In, Out>(shape, step);
#define KVJAX_CALL(name, arity, In, Out, expression) \
  case Opcode::k_##name:                             \
    return FindCall<name##_map, arity, In, Out>(shape.vector, step);
#define KVJAX_REDUCE(name, T, zero, expression) \
  case Opcode::k_##name:                        \
    step.kernel = &Reduce<name##_reduce, T>;    \
    return;
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  case Opcode::k_##name:                         \
    return FindFused<name##_fused, Opcode::k_##name, In, Out>(step);
    KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_CALL, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_FUSED
#undef KVJAX_MAP
#undef KVJAX_CALL
#undef KVJAX_REDUCE
#undef KVJAX_MOVE
    case Opcode::k_load:
      return FindMove<true, kWord>(shape, step);
    case Opcode::k_store:
      return FindMove<false, kWord>(shape, step);
    case Opcode::k_pick:
      step.kernel = &Pick;
      return;
    case Opcode::k_stochastic_bfloat16:
      step.kernel = &Stochastic<false>;
      return;
    case Opcode::k_stochastic_float16:
      step.kernel = &Stochastic<true>;
      return;
    case Opcode::k_loop:  // where a program goes on, the machine knows
    case Opcode::k_leave:
    case Opcode::k_again:
    case Opcode::kCount:
      return;
  }
}

}  // namespace
}  // namespace kvjax::program
