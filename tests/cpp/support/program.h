// Programs for tests: words of registers and instructions, and numbers that are hard for them.
#pragma once
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <vector>

#include "kvjax/ffi/core/program.h"
#include "tests/cpp/support/data.h"

namespace programs {

using kvjax::Field;
using kvjax::Opcode;

constexpr int32_t kVector = 0, kScalar = 1 << 16, kShared = 2 << 16, kField = 3 << 16;

/// Ordinary numbers among the ends of the type.
inline float Awkward(data::Stream& stream) {
  const float ends[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 65504.0f, 1e-6f};
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
  for (const int32_t field : {Field::kValue, Field::kGradient}) words.insert(words.end(), {field, 0, dim});
  words.insert(words.end(), {0, 0, 1});  // slot 0
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
  for (const int32_t field : {Field::kValue, Field::kGradient, 0}) words.insert(words.end(), {field, 0, dim});
  Add(words, Opcode::k_mul_f, {kVector, kField + 1, kShared});
  Add(words, Opcode::k_sub_f, {kField, kField, kVector});
  Add(words, Opcode::k_store, {kField + 2, kField + 1});
  return words;
}

}  // namespace programs
