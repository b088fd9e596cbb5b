// Steps: the instructions of a row program as the lanes of a device read them, each with the places of its
// operands.
//
// A program names registers and fields. Where these are is found out on the host, once for all rows, so that a
// lane only adds a few numbers: all of the interpreter has to stay in a processor's cache for instructions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/program.h"

namespace kvjax::device {

/// Where the elements of an operand are.
struct alignas(16) Place {
  /// Parts of a row, then what is the same for all rows, then the registers.
  enum class Space : uint8_t { kValue, kSlots, kGradient, kFacts, kShared, kScalars, kVectors, kCount };
  enum class Type : uint8_t { kWord, kBFloat16, kFloat16, kBool };  // as those of fields
  Space space;
  Type type;
  uint8_t item;    // bytes from a lane's element to that of the next lane; 0 for a single one, which all use
  bool single;     // there is one element, which all lanes use; else lanes have the columns of one each
  uint32_t begin;  // bytes before the first
  int32_t width;   // elements
  uint32_t first;  // of a part of a vector, the elements before its own
};

struct Step {
  Opcode op = Opcode::k_mov;
  int32_t arity = 0;   // operands that are read as they lie
  int32_t to = 0;      // where a program that jumps goes on
  bool meets = false;  // see Instruction
  bool sums = false;   // makes one element of those that the lanes have
  Place out = {}, arg[kMostOperands] = {};
};

/// Makes the steps of a program for tiles of so many lanes, and `sharing` of them to a piece of memory. What
/// lanes have there lies side by side: first their scalars, then their columns of the vectors.
class Steps {
 public:
  Steps(const Program& program, const SlotLayout& layout, int32_t lanes, size_t sharing)
      : program_(program), layout_(layout), columns_(ColumnsOf(program.dim, lanes)), sharing_(sharing) {}

  /// How many columns of a vector a lane has at most.
  KVJAX_HD static uint32_t ColumnsOf(int32_t dim, int32_t lanes) {
    return static_cast<uint32_t>((dim + lanes - 1) / lanes);
  }
  /// What a lane needs for the registers of a row.
  static size_t BytesFor(const Program& p, int32_t lanes) {
    return sizeof(uint64_t) * static_cast<size_t>(p.scalars) +
           sizeof(float) * static_cast<size_t>(p.vectors) * ColumnsOf(p.dim, lanes);
  }

  /// Those of both lists, so that a row that has no slots yet begins with the first, and all others behind it.
  [[nodiscard]] std::vector<Step> All() const {
    std::vector<Step> steps;
    Append(program_.initial, steps);
    Append(program_.update, steps);
    return steps;
  }

 private:
  using Space = Place::Space;

  void Append(const std::vector<Instruction>& list, std::vector<Step>& steps) const {
    const auto begin = static_cast<int32_t>(steps.size());
    for (const Instruction& i : list) {
      const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
      Step step;
      step.op = i.op, step.meets = i.meets, step.sums = form.kind == InstructionForm::Kind::kReduce;
      if (form.kind != InstructionForm::Kind::kMove) step.arity = form.arity;
      if (i.jumps()) {
        step.to = begin + i.out.number();
      } else {
        step.out = PlaceOf(i.out);
      }
      for (int32_t j = 0; j < form.arity; ++j) step.arg[j] = PlaceOf(i.arg[j]);
      steps.push_back(step);
    }
  }
  [[nodiscard]] Place PlaceOf(Register r) const {
    const auto number = static_cast<uint32_t>(r.number());
    switch (r.kind()) {
      case Register::Kind::kVector:
        return Vector(number, 0, program_.dim);
      case Register::Kind::kScalar:
        return Single(Space::kScalars, sizeof(uint64_t) * sharing_ * number);
      case Register::Kind::kShared:
        return Single(Space::kShared, sizeof(uint64_t) * number);
      case Register::Kind::kField:
      default:
        return PlaceOf(program_.FieldOf(r));
    }
  }
  [[nodiscard]] Place PlaceOf(const Field& field) const {
    if (field.is_register())
      return Vector(static_cast<uint32_t>(field.vector()), static_cast<uint32_t>(field.first), field.width);
    const auto [space, before] = SpaceOf(field);
    return {.space = space,
            .type = static_cast<Place::Type>(field.type),
            .item = static_cast<uint8_t>(field.item()),
            .begin = static_cast<uint32_t>(before + field.offset()),
            .width = field.width};
  }
  [[nodiscard]] static Place Single(Space space, size_t begin) {
    return {.space = space, .single = true, .begin = static_cast<uint32_t>(begin), .width = 1};
  }
  [[nodiscard]] Place Vector(uint32_t number, uint32_t first, int32_t width) const {
    return {.space = Space::kVectors,
            .item = sizeof(float),
            .begin = static_cast<uint32_t>(sizeof(float) * sharing_ * columns_ * number),
            .width = width,
            .first = first};
  }
  /// With the bytes of it before those of the field's source.
  [[nodiscard]] std::pair<Space, size_t> SpaceOf(const Field& field) const {
    if (field.is_constant()) return {Space::kShared, field.constant() * sizeof(uint64_t)};
    if (field.is_fact()) return {Space::kFacts, field.fact() * sizeof(uint32_t)};
    if (field.source == Field::kGradient) return {Space::kGradient, 0};
    if (field.source == Field::kValue) return {Space::kValue, 0};
    return {Space::kSlots, layout_.slots()[static_cast<size_t>(field.source)].offset};
  }

  const Program& program_;
  const SlotLayout& layout_;
  uint32_t columns_;
  size_t sharing_;
};

}  // namespace kvjax::device
