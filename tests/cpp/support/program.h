// Programs for tests: words of registers and instructions, and numbers that are hard for them.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/program.h"
#include "tests/cpp/support/data.h"

namespace programs {

/// Those of each instruction set that this processor has.
inline std::vector<kvjax::program::Kernels> AllKernels() {
  std::vector<kvjax::program::Kernels> all = {kvjax::program::BaselineKernels()};
#if defined(__x86_64__)
  const std::string best = kvjax::program::BestKernels().name;
  if (best != "baseline") all.push_back(kvjax::program::Avx2Kernels());
  if (best == "avx512") all.push_back(kvjax::program::Avx512Kernels());
#endif
  return all;
}

using kvjax::Field;
using kvjax::Opcode;

constexpr int32_t kVector = 0, kScalar = 1 << 16, kShared = 2 << 16, kField = 3 << 16;

/// Ordinary numbers among the ends of the type.
inline float Awkward(data::Stream& stream) {
  const float ends[] = {0.0f,  -0.0f,  1.0f,     -1.0f, INFINITY, -INFINITY, NAN,
                        3e38f, -3e38f, 65504.0f, 1e-6f, 1e-39f,   -2e-39f};
  const uint64_t n = stream.Below(40);
  return n < std::size(ends) ? ends[n] : static_cast<float>(stream.Below(2000)) / 100 - 10;
}

/// An instruction: its result, then its operands.
inline void Add(std::vector<int32_t>& words, Opcode op, std::vector<int32_t> registers) {
  words.push_back(static_cast<int32_t>(op));
  words.insert(words.end(), registers.begin(), registers.end());
  words.resize(words.size() + 1 + kvjax::kMostOperands - registers.size(), -1);
}

/// value -= grad * g0; slot 0 counts.
inline std::vector<int32_t> Sgd(int32_t dim) {
  std::vector<int32_t> words = {1, 1, 2, 3, 2, 5};  // registers, fields, instructions
  for (const int32_t field : {Field::kValue, Field::kGradient}) words.insert(words.end(), {field, 0, 0, dim});
  words.insert(words.end(), {0, 0, 0, 1});  // slot 0
  const auto add = [&](Opcode op, std::initializer_list<int32_t> registers) { Add(words, op, registers); };
  add(Opcode::k_sub_i, {kScalar, kShared + 1, kShared + 1});  // 0
  add(Opcode::k_store, {kField + 2, kScalar});
  add(Opcode::k_mul_f, {kVector, kField + 1, kShared});
  add(Opcode::k_sub_f, {kField, kField, kVector});
  add(Opcode::k_load, {kScalar, kField + 2});
  add(Opcode::k_add_i, {kScalar, kScalar, kShared + 1});  // + 1
  add(Opcode::k_store, {kField + 2, kScalar});
  return words;
}

/// value -= grad * g0; slot 0, of dim elements, is the gradient.
inline std::vector<int32_t> Descent(int32_t dim) {
  std::vector<int32_t> words = {1, 0, 1, 3, 0, 3};
  for (const int32_t field : {Field::kValue, Field::kGradient, 0})
    words.insert(words.end(), {field, 0, 0, dim});
  Add(words, Opcode::k_mul_f, {kVector, kField + 1, kShared});
  Add(words, Opcode::k_sub_f, {kField, kField, kVector});
  Add(words, Opcode::k_store, {kField + 2, kField + 1});
  return words;
}

/// A row for `PartsInALoop`, and what becomes of it.
struct LoopedRow {
  float value[6] = {1, 2, 3, 4, 5, 6}, gradient[6] = {2, -1, 0.5f, 1, -2, 7};
  struct {
    int32_t n = 0;
    float middle[3] = {};
    float sum = 0;
  } slots;

  static constexpr const char* kLayout = "n|int32[]|4;middle|float32[3]|12;sum|float32[]|4";
  static std::vector<uint64_t> Shared() {
    const float one = 1, rates[] = {1, 2, -1, 0.5f, 4, 0};
    std::vector<uint64_t> cells = {0, 1, 0, 0, 0};
    std::memcpy(cells.data(), &one, 4), std::memcpy(cells.data() + 2, rates, sizeof(rates));
    return cells;
  }
  [[nodiscard]] LoopedRow After() const {
    LoopedRow after = *this;
    const float rates[] = {1, 2, -1, 0.5f, 4};
    float v[6] = {1, 1, 1, 1, 1, 1};
    for (int32_t turn = 0; turn < slots.n; ++turn) {
      for (int i = 0; i < 5; ++i) v[i] = v[i + 1] * gradient[i] * rates[turn < 5 ? turn : 4];
    }
    for (int i = 1; i < 6; ++i) after.value[i] *= v[i];
    for (int i = 0; i < 3; ++i) after.slots.middle[i] = v[i + 2];
    after.slots.sum = v[2] + v[3] + v[4] + v[0];
    return after;
  }
  [[nodiscard]] bool operator==(const LoopedRow& other) const {
    return std::memcmp(this, &other, sizeof(LoopedRow)) == 0;
  }
};

/// A program for them: a register moves by one element, and is multiplied by the gradient and a constant of
/// the turn, as often as slot 0 says; then value[1:6] is multiplied by it, slot 1 is its middle, and slot 2 a
/// sum.
inline std::vector<int32_t> PartsInALoop() {
  // Fields: 0 value[1:6], 1 gradient[0:5], 2 slot 0, 3 v0[1:6], 4 v0[2:5], 5 slot 1, 6 slot 2, 7 v0[0:1],
  // 8 constants of 5, 9 v1[0:5], 10 v0[0:5].
  std::vector<int32_t> words = {2, 4, 2 + 3, 11, 0, 16};
  const int32_t v0 = Field::kRegister, v1 = Field::kRegister - 1;
  for (const auto& [source, first, width] :
       std::initializer_list<std::array<int32_t, 3>>{{Field::kValue, 1, 5},
                                                     {Field::kGradient, 0, 5},
                                                     {0, 0, 1},
                                                     {v0, 1, 5},
                                                     {v0, 2, 3},
                                                     {1, 0, 3},
                                                     {2, 0, 1},
                                                     {v0, 0, 1},
                                                     {Field::kConstant - 2, 0, 5},
                                                     {v1, 0, 5},
                                                     {v0, 0, 5}})
    words.insert(words.end(), {source, 0, first, width});
  const auto add = [&](Opcode op, std::vector<int32_t> registers) { Add(words, op, std::move(registers)); };
  add(Opcode::k_load, {kScalar, kField + 2});
  add(Opcode::k_sub_i, {kScalar + 1, kScalar, kScalar});  // the turn
  add(Opcode::k_mov, {kVector, kShared});                 // v0: ones
  add(Opcode::k_loop, {-1});
  add(Opcode::k_lt_i, {kScalar + 2, kScalar + 1, kScalar});
  add(Opcode::k_leave, {-1, kScalar + 2});
  add(Opcode::k_pick, {kScalar + 3, kField + 8, kScalar + 1});
  add(Opcode::k_mul_f, {kField + 9, kField + 3, kField + 1});    // v1[0:5] = v0[1:6] * gradient
  add(Opcode::k_mul_f, {kField + 10, kField + 9, kScalar + 3});  // v0[0:5]
  add(Opcode::k_add_i, {kScalar + 1, kScalar + 1, kShared + 1});
  add(Opcode::k_again, {-1});
  add(Opcode::k_mul_f, {kField + 0, kField + 0, kField + 3});
  add(Opcode::k_store, {kField + 5, kField + 4});
  add(Opcode::k_sum_f, {kScalar + 3, kField + 4});
  add(Opcode::k_load, {kScalar + 2, kField + 7});
  add(Opcode::k_add_f, {kScalar + 3, kScalar + 3, kScalar + 2});
  words[5] = 17;
  add(Opcode::k_store, {kField + 6, kScalar + 3});
  return words;
}

}  // namespace programs
