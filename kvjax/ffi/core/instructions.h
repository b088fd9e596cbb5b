// Instructions: the one list of what a step of a row program can be.
//
// Python lowers an optimizer's update to these names, and every interpreter is made of them.
#pragma once
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/portable.h"

namespace kvjax {

// A register holds float32 (names in _f), or int32 for integers and booleans (0 or 1; _i); one that has a
// single element for a row may hold float64 (_d), for updates that count in it. MAP(name, arity, in, out,
// expression of a, b and c) works element by element, and so does CALL, for what is rare or takes a call of a
// function; REDUCE(name, type, neutral element, expression of x and y) makes one element of a row's;
// MOVE(name, arity) goes between registers and rows, needs to know the row, or says where the program goes
// on. FUSED(name, kinds, in, out, calls of MAPs) does several in one pass over its operands, which are rows
// (v) or single elements (s), with the same bits; where an update has what the calls say, Python takes it,
// the first in the list first.
// clang-format off
#define KVJAX_INSTRUCTIONS(MAP, CALL, REDUCE, MOVE, FUSED)                                        \
  MOVE(load, 1) MOVE(store, 1) MOVE(pick, 2) MOVE(stochastic_bfloat16, 2)                         \
  MOVE(stochastic_float16, 2) MOVE(loop, 0) MOVE(leave, 1) MOVE(again, 0)                         \
  MAP(mov, 1, float, float, a)                                                                    \
  MAP(neg_f, 1, float, float, -a)                                                                 \
  MAP(abs_f, 1, float, float, __builtin_fabsf(a))                                                 \
  MAP(sign_f, 1, float, float, a > 0 ? 1.0f : a < 0 ? -1.0f : a)                                  \
  MAP(sqrt_f, 1, float, float, __builtin_sqrtf(a))                                                \
  MAP(rsqrt_f, 1, float, float, 1.0f / __builtin_sqrtf(a))                                        \
  CALL(cbrt_f, 1, float, float, __builtin_cbrtf(a))                                               \
  CALL(exp_f, 1, float, float, __builtin_expf(a))                                                 \
  CALL(exp2_f, 1, float, float, __builtin_exp2f(a))                                               \
  CALL(expm1_f, 1, float, float, __builtin_expm1f(a))                                             \
  CALL(log_f, 1, float, float, __builtin_logf(a))                                                 \
  CALL(log1p_f, 1, float, float, __builtin_log1pf(a))                                             \
  CALL(tanh_f, 1, float, float, __builtin_tanhf(a))                                               \
  CALL(logistic_f, 1, float, float, 1.0f / (1.0f + __builtin_expf(-a)))                           \
  CALL(erf_f, 1, float, float, __builtin_erff(a))                                                 \
  CALL(sin_f, 1, float, float, __builtin_sinf(a))                                                 \
  CALL(cos_f, 1, float, float, __builtin_cosf(a))                                                 \
  CALL(tan_f, 1, float, float, __builtin_tanf(a))                                                 \
  CALL(floor_f, 1, float, float, __builtin_floorf(a))                                             \
  CALL(ceil_f, 1, float, float, __builtin_ceilf(a))                                               \
  CALL(round_even_f, 1, float, float, __builtin_rintf(a))                                         \
  CALL(round_away_f, 1, float, float, __builtin_roundf(a))                                        \
  CALL(is_finite_f, 1, float, int32_t, __builtin_fabsf(a) <= 3.4028235e38f)                       \
  CALL(bfloat16_f, 1, float, float, FromBFloat16(ToBFloat16(a)))                                  \
  CALL(float16_f, 1, float, float, FromFloat16(ToFloat16(a)))                                     \
  MAP(i_to_f, 1, int32_t, float, static_cast<float>(a))                                          \
  CALL(u_to_f, 1, int32_t, float, static_cast<float>(static_cast<uint32_t>(a)))                   \
  CALL(f_to_i, 1, float, int32_t, a >= 2147483648.0f ? INT32_MAX : a < -2147483648.0f ? INT32_MIN\
                                 : a != a ? 0 : static_cast<int32_t>(a))                          \
  CALL(neg_i, 1, int32_t, int32_t, Word(0u - Bits(a)))                                            \
  CALL(abs_i, 1, int32_t, int32_t, a < 0 ? Word(0u - Bits(a)) : a)                                \
  CALL(sign_i, 1, int32_t, int32_t, (a > 0) - (a < 0))                                            \
  MAP(add_f, 2, float, float, a + b)                                                              \
  MAP(sub_f, 2, float, float, a - b)                                                              \
  MAP(mul_f, 2, float, float, a * b)                                                              \
  MAP(div_f, 2, float, float, a / b)                                                              \
  MAP(max_f, 2, float, float, Extreme<true>(a, b))                                                \
  MAP(min_f, 2, float, float, Extreme<false>(a, b))                                               \
  CALL(pow_f, 2, float, float, __builtin_powf(a, b))                                              \
  CALL(rem_f, 2, float, float, __builtin_fmodf(a, b))                                             \
  CALL(atan2_f, 2, float, float, __builtin_atan2f(a, b))                                          \
  MAP(eq_f, 2, float, int32_t, a == b)                                                            \
  MAP(ne_f, 2, float, int32_t, a != b)                                                            \
  MAP(lt_f, 2, float, int32_t, a < b)                                                             \
  MAP(le_f, 2, float, int32_t, a <= b)                                                            \
  MAP(gt_f, 2, float, int32_t, a > b)                                                             \
  MAP(ge_f, 2, float, int32_t, a >= b)                                                            \
  MAP(add_i, 2, int32_t, int32_t, Word(Bits(a) + Bits(b)))                                       \
  CALL(sub_i, 2, int32_t, int32_t, Word(Bits(a) - Bits(b)))                                       \
  CALL(mul_i, 2, int32_t, int32_t, Word(Bits(a) * Bits(b)))                                       \
  CALL(div_i, 2, int32_t, int32_t, b == 0 ? -1 : b == -1 ? Word(0u - Bits(a)) : a / b)            \
  CALL(rem_i, 2, int32_t, int32_t, b == 0 ? a : b == -1 ? 0 : a % b)                              \
  CALL(max_i, 2, int32_t, int32_t, a > b ? a : b)                                                 \
  CALL(min_i, 2, int32_t, int32_t, a < b ? a : b)                                                 \
  MAP(and_i, 2, int32_t, int32_t, a & b)                                                         \
  CALL(or_i, 2, int32_t, int32_t, a | b)                                                          \
  CALL(xor_i, 2, int32_t, int32_t, a ^ b)                                                         \
  CALL(shift_left_i, 2, int32_t, int32_t, Bits(b) < 32 ? Word(Bits(a) << b) : 0)                  \
  CALL(shift_right_logical_i, 2, int32_t, int32_t, Bits(b) < 32 ? Word(Bits(a) >> b) : 0)         \
  CALL(shift_right_arithmetic_i, 2, int32_t, int32_t, a >> (Bits(b) < 32 ? b : 31))               \
  CALL(eq_i, 2, int32_t, int32_t, a == b)                                                         \
  CALL(ne_i, 2, int32_t, int32_t, a != b)                                                         \
  MAP(lt_i, 2, int32_t, int32_t, a < b)                                                          \
  MAP(le_i, 2, int32_t, int32_t, a <= b)                                                         \
  CALL(gt_i, 2, int32_t, int32_t, a > b)                                                          \
  CALL(ge_i, 2, int32_t, int32_t, a >= b)                                                         \
  MAP(select, 3, int32_t, int32_t, a ? c : b)                                                     \
  MAP(fma_f, 3, float, float, __builtin_fmaf(a, b, c))                                            \
  MAP(fms_f, 3, float, float, __builtin_fmaf(a, b, -c))                                           \
  MAP(fnma_f, 3, float, float, __builtin_fmaf(-a, b, c))                                          \
  CALL(f_to_d, 1, float, double, static_cast<double>(a))                                          \
  CALL(i_to_d, 1, int32_t, double, static_cast<double>(a))                                        \
  CALL(d_to_f, 1, double, float, static_cast<float>(a))                                           \
  CALL(neg_d, 1, double, double, -a)                                                              \
  CALL(sqrt_d, 1, double, double, __builtin_sqrt(a))                                              \
  CALL(rsqrt_d, 1, double, double, 1.0 / __builtin_sqrt(a))                                       \
  CALL(exp_d, 1, double, double, __builtin_exp(a))                                                \
  CALL(log_d, 1, double, double, __builtin_log(a))                                                \
  CALL(add_d, 2, double, double, a + b)                                                           \
  CALL(sub_d, 2, double, double, a - b)                                                           \
  CALL(mul_d, 2, double, double, a * b)                                                           \
  CALL(div_d, 2, double, double, a / b)                                                           \
  CALL(max_d, 2, double, double, Extreme<true>(a, b))                                             \
  CALL(min_d, 2, double, double, Extreme<false>(a, b))                                            \
  CALL(pow_d, 2, double, double, __builtin_pow(a, b))                                             \
  CALL(lt_d, 2, double, int32_t, a < b)                                                           \
  CALL(le_d, 2, double, int32_t, a <= b)                                                          \
  CALL(gt_d, 2, double, int32_t, a > b)                                                           \
  CALL(ge_d, 2, double, int32_t, a >= b)                                                          \
  REDUCE(sum_f, float, 0.0f, x + y)                                                               \
  REDUCE(prod_f, float, 1.0f, x * y)                                                              \
  REDUCE(rmax_f, float, -__builtin_inff(), Extreme<true>(x, y))                                   \
  REDUCE(rmin_f, float, __builtin_inff(), Extreme<false>(x, y))                                   \
  REDUCE(sum_i, int32_t, 0, Word(Bits(x) + Bits(y)))                                              \
  REDUCE(rmax_i, int32_t, INT32_MIN, x > y ? x : y)                                               \
  REDUCE(rmin_i, int32_t, INT32_MAX, x < y ? x : y)                                               \
  FUSED(fma_div_mul, "svvvv", float, float, fma_f(a, div_f(b, mul_f(c, d)), e))                   \
  FUSED(fma_fma_fma, "vssss", float, float, fma_f(a, fma_f(a, fma_f(a, b, c), d), e))             \
  FUSED(mul_fma_fma, "vvsss", float, float, mul_f(a, fma_f(b, fma_f(b, c, d), e)))                \
  FUSED(fma_div_div, "svsvv", float, float, fma_f(a, div_f(div_f(b, c), d), e))                   \
  FUSED(fma_add_div, "svvsv", float, float, fma_f(a, b, div_f(div_f(c, d), e)))                   \
  FUSED(fma_square_mul_mul, "svsvs", float, float, fma_f(a, mul_f(b, b), mul_f(c, mul_f(d, e))))  \
  FUSED(fma_mul_mul, "svsvs", float, float, fma_f(a, b, mul_f(c, mul_f(d, e))))                   \
  FUSED(fma_square_mul, "svsv", float, float, fma_f(a, mul_f(b, b), mul_f(c, d)))                 \
  FUSED(fma_mul, "svsv", float, float, fma_f(a, b, mul_f(c, d)))                                  \
  FUSED(fma_of_mul, "svvv", float, float, fma_f(a, mul_f(b, c), d))                               \
  FUSED(fma_of_div, "svvv", float, float, fma_f(a, div_f(b, c), d))                               \
  FUSED(add_sqrt_div, "vss", float, float, add_f(sqrt_f(div_f(a, b)), c))                         \
  FUSED(add_of_sqrt, "vs", float, float, add_f(sqrt_f(a), b))                                     \
  FUSED(rsqrt_add, "vs", float, float, rsqrt_f(add_f(a, b)))                                      \
  FUSED(sqrt_add, "vs", float, float, sqrt_f(add_f(a, b)))                                        \
  FUSED(next_i, "sss", int32_t, int32_t, select(lt_i(a, b), b, add_i(a, c)))
// clang-format on

enum class Opcode : int32_t {
#define KVJAX_NAME(name, ...) k_##name,
  KVJAX_INSTRUCTIONS(KVJAX_NAME, KVJAX_NAME, KVJAX_NAME, KVJAX_NAME, KVJAX_NAME)
#undef KVJAX_NAME
      kCount
};

/// Operands of an instruction.
inline constexpr int32_t kMostOperands = 5;

/// What an instruction takes and makes.
struct InstructionForm {
  enum class Kind { kMove, kMap, kReduce, kFused };
  std::string_view name;
  Kind kind;
  int32_t arity;
  bool doubles;                 // takes or makes float64, which rows have not
  std::string_view kinds = {};  // of the operands of a fused one
  std::string_view calls = {};  // that it stands for

  /// A bit for each operand of a fused one that is a row.
  [[nodiscard]] constexpr int32_t vectors() const {
    int32_t bits = 0;
    for (size_t j = 0; j < kinds.size(); ++j) bits |= (kinds[j] == 'v' ? 1 : 0) << j;
    return bits;
  }
};

inline constexpr InstructionForm kInstructionForms[] = {
#define KVJAX_MOVE(name, arity) {#name, InstructionForm::Kind::kMove, arity, false},
#define KVJAX_MAP(name, arity, In, Out, expression) \
  {#name, InstructionForm::Kind::kMap, arity, sizeof(In) == 8 || sizeof(Out) == 8},
#define KVJAX_REDUCE(name, ...) {#name, InstructionForm::Kind::kReduce, 1, false},
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  {#name, InstructionForm::Kind::kFused, sizeof(kinds) - 1, false, kinds, #calls},
    KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_REDUCE
#undef KVJAX_FUSED
};

}  // namespace kvjax
