// Row programs: the update of one row as plain data, a list of instructions on registers.
//
// Python makes a program from an optimizer's update (kvjax/_programs), and a table runs it on the rows of a
// step where they lie.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

/// A register: what it holds for each row, and its number among those of its kind.
class Register {
 public:
  /// A vector holds dim words, a scalar one; a shared one holds one word for all rows, which XLA has
  /// computed; a field is in the row itself.
  enum class Kind { kVector, kScalar, kShared, kField };
  static constexpr int32_t kKindShift = 16;

  constexpr Register() = default;
  explicit constexpr Register(int32_t word) : word_(word) {}
  [[nodiscard]] KVJAX_HD Kind kind() const { return static_cast<Kind>(word_ >> kKindShift); }
  [[nodiscard]] KVJAX_HD int32_t number() const { return word_ & ((1 << kKindShift) - 1); }

 private:
  int32_t word_ = -1;
};

/// A part of a row. `source` is a slot's number, or one of those below: the words of RowFacts follow kFacts
/// downwards; and kConstant less a number is a row of constants, the same for all rows, which begins at that
/// of the shared registers.
struct Field {
  static constexpr int32_t kValue = -1, kGradient = -2, kFacts = -3, kConstant = -16;
  enum class Type : int32_t { kWord, kBFloat16, kFloat16, kBool };
  int32_t source;
  Type type;
  int32_t width;  // elements: dim or 1

  [[nodiscard]] bool is_fact() const {
    return source <= kFacts && source > kFacts - int32_t{RowFacts::kWords};
  }
  /// Which word of the facts it is.
  [[nodiscard]] size_t fact() const { return static_cast<size_t>(kFacts - source); }
  [[nodiscard]] bool is_constant() const { return source <= kConstant; }
  /// The shared register with which it begins.
  [[nodiscard]] size_t constant() const { return static_cast<size_t>(int64_t{kConstant} - source); }
  [[nodiscard]] bool writable() const { return source >= kValue; }

  [[nodiscard]] size_t bytes() const {
    const size_t item = type == Type::kWord ? 4 : type == Type::kBool ? 1 : 2;
    return item * static_cast<size_t>(width);
  }
};

struct Instruction {
  Opcode op;
  Register out;
  Register arg[kMostOperands];
};

/// A program, decoded and checked: whoever runs it can trust its registers and fields.
struct Program {
  /// Registers of a kind, fields, and instructions of a list: far more than any optimizer has.
  static constexpr int32_t kMost = 1 << 12;

  int32_t dim = 0;
  int32_t vectors = 0, scalars = 0, shared = 0;  // registers
  std::vector<Field> fields = {};
  std::vector<Instruction> initial = {};  // makes the slots of a row that has none yet
  std::vector<Instruction> update = {};

  /// Whether it reads facts about rows.
  [[nodiscard]] bool wants_facts() const {
    return std::any_of(fields.begin(), fields.end(), [](const Field& field) { return field.is_fact(); });
  }

  /// `words`: the counts of vectors, scalars, shared registers, fields, and instructions of the two lists;
  /// then three words for each field, and for each instruction two and its operands. Throws unless it is
  /// about rows of this kind.
  static Program Parse(std::string_view table, std::span<const int32_t> words, int64_t dim, RowType type,
                       const SlotLayout& layout);

 private:
  [[nodiscard]] bool Fits(const Field& field, RowType type, const SlotLayout& layout) const;
  [[nodiscard]] bool Fits(const Instruction& instruction) const;
  [[nodiscard]] bool Exists(Register r) const;
  [[nodiscard]] bool InPlace(Register r) const;
  [[nodiscard]] bool IsVector(Register r) const {
    return r.kind() == Register::Kind::kVector || r.kind() == Register::Kind::kField;
  }
};

inline Program Program::Parse(std::string_view table, std::span<const int32_t> words, int64_t dim,
                              RowType type, const SlotLayout& layout) {
  size_t at = 0;
  const auto next = [&] { return at < words.size() ? words[at++] : throw ProgramError(table, at); };
  const auto count = [&] {
    const int32_t n = next();
    return n >= 0 && n <= kMost ? n : throw ProgramError(table, at - 1);
  };
  Program p;
  p.dim = static_cast<int32_t>(dim);
  p.vectors = count(), p.scalars = count(), p.shared = count();
  p.fields.resize(static_cast<size_t>(count()));
  p.initial.resize(static_cast<size_t>(count()));
  p.update.resize(static_cast<size_t>(count()));
  for (Field& field : p.fields) {
    field.source = next(), field.type = static_cast<Field::Type>(next()), field.width = next();
    if (!p.Fits(field, type, layout)) throw ProgramError(table, at);
  }
  for (std::vector<Instruction>* list : {&p.initial, &p.update}) {
    for (Instruction& i : *list) {
      i.op = static_cast<Opcode>(next()), i.out = Register(next());
      for (Register& arg : i.arg) arg = Register(next());
      if (!p.Fits(i)) throw ProgramError(table, at);
    }
  }
  if (at != words.size()) throw ProgramError(table, at);
  return p;
}

inline bool Program::Fits(const Field& field, RowType type, const SlotLayout& layout) const {
  const bool known = field.type >= Field::Type::kWord && field.type <= Field::Type::kBool;
  if (!known || (field.width != dim && field.width != 1)) return false;
  if (field.source == Field::kGradient) return field.type == Field::Type::kWord && field.width == dim;
  if (field.is_fact()) return field.type == Field::Type::kWord && field.width == 1;
  if (field.is_constant()) {
    constexpr size_t kCell = 8;  // bytes of a shared register
    return field.type == Field::Type::kWord && field.width == dim &&
           field.constant() * kCell + field.bytes() <= static_cast<size_t>(shared) * kCell;
  }
  if (field.source == Field::kValue) {
    const Field::Type wanted = type == RowType::kFloat32    ? Field::Type::kWord
                               : type == RowType::kBFloat16 ? Field::Type::kBFloat16
                                                            : Field::Type::kFloat16;
    return field.type == wanted && field.width == dim;
  }
  const std::vector<Slot>& slots = layout.slots();
  return field.source >= 0 && static_cast<size_t>(field.source) < slots.size() &&
         field.bytes() == slots[static_cast<size_t>(field.source)].bytes;
}

inline bool Program::Exists(Register r) const {
  switch (r.kind()) {
    case Register::Kind::kVector:
      return r.number() < vectors;
    case Register::Kind::kScalar:
      return r.number() < scalars;
    case Register::Kind::kShared:
      return r.number() < shared;
    case Register::Kind::kField:
      return static_cast<size_t>(r.number()) < fields.size();
  }
  return false;
}

/// Whether an instruction may work on the field where it lies.
inline bool Program::InPlace(Register r) const {
  const Field& field = fields[static_cast<size_t>(r.number())];
  return field.type == Field::Type::kWord && field.width == dim && dim > 1;
}

inline bool Program::Fits(const Instruction& i) const {
  if (i.op < Opcode{0} || i.op >= Opcode::kCount || !Exists(i.out)) return false;
  const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
  using Kind = Register::Kind;
  for (int32_t j = 0; j < form.arity; ++j) {
    if (!Exists(i.arg[j])) return false;
  }
  const auto is_read_only = [&](Register r) {
    return r.kind() == Kind::kField && !fields[static_cast<size_t>(r.number())].writable();
  };
  if (i.out.kind() == Kind::kShared || is_read_only(i.out)) return false;
  if (i.op == Opcode::k_load || i.op == Opcode::k_store) {
    const Register row = i.op == Opcode::k_load ? i.arg[0] : i.out;
    const Register other = i.op == Opcode::k_load ? i.out : i.arg[0];
    if (row.kind() != Kind::kField) return false;
    const bool wide = fields[static_cast<size_t>(row.number())].width == dim && dim > 1;
    if (other.kind() == Kind::kShared) return !wide && i.op == Opcode::k_store;
    if (other.kind() == Kind::kField) return wide && InPlace(other);
    return other.kind() == (wide ? Kind::kVector : Kind::kScalar);
  }
  int32_t vectors = 0;
  for (int32_t j = 0; j < form.arity; ++j) {
    if (i.arg[j].kind() == Kind::kField && !InPlace(i.arg[j])) return false;
    vectors |= (IsVector(i.arg[j]) ? 1 : 0) << j;
  }
  const bool vector = vectors != 0;
  if (i.out.kind() == Kind::kField && !InPlace(i.out)) return false;
  if (form.doubles && (vector || IsVector(i.out))) return false;
  if (form.kind == InstructionForm::Kind::kReduce) return vector && i.out.kind() == Kind::kScalar;
  if (form.kind == InstructionForm::Kind::kMove && i.arg[0].kind() == Kind::kShared) return false;
  if (form.kind == InstructionForm::Kind::kMap) return IsVector(i.out) || !vector;
  if (form.kind == InstructionForm::Kind::kFused)
    return vectors == form.vectors() && IsVector(i.out) == vector;
  return IsVector(i.out) == vector && (vector || dim == 1);
}

}  // namespace kvjax
