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
  bool operator==(const Register&) const = default;

 private:
  int32_t word_ = -1;
};

/// Some elements of a row, or of a register. `source` is a slot's number, or one of those below: the words of
/// RowFacts follow kFacts downwards; kConstant less a number is a row of constants, the same for all rows,
/// which begins at that of the shared registers; and kRegister less a number is that vector register.
struct Field {
  static constexpr int32_t kValue = -1, kGradient = -2, kFacts = -3, kConstant = -16, kRegister = -(1 << 20);
  enum class Type : int32_t { kWord, kBFloat16, kFloat16, kBool };
  int32_t source;
  Type type;
  int32_t first;  // of the elements of the source
  int32_t width;  // how many

  bool operator==(const Field&) const = default;
  [[nodiscard]] bool is_fact() const {
    return source <= kFacts && source > kFacts - int32_t{RowFacts::kWords};
  }
  /// Which word of the facts it is.
  [[nodiscard]] size_t fact() const { return static_cast<size_t>(kFacts - source); }
  [[nodiscard]] bool is_constant() const { return source <= kConstant && source > kRegister; }
  /// The shared register with which it begins.
  [[nodiscard]] size_t constant() const { return static_cast<size_t>(int64_t{kConstant} - source); }
  [[nodiscard]] bool is_register() const { return source <= kRegister; }
  [[nodiscard]] int64_t vector() const { return int64_t{kRegister} - source; }
  [[nodiscard]] bool writable() const { return source >= kValue || is_register(); }

  /// Bytes of an element, before the first one, and before the end.
  [[nodiscard]] size_t item() const { return type == Type::kWord ? 4 : type == Type::kBool ? 1 : 2; }
  [[nodiscard]] size_t offset() const { return item() * static_cast<size_t>(first); }
  [[nodiscard]] size_t end() const { return offset() + item() * static_cast<size_t>(width); }
};

/// The rows for which the argument of `leave` is 0 leave the loop, which goes from `loop` to `again`.
struct Instruction {
  Opcode op;
  Register out;  // of `leave` the number of its `again`, and of that the number of `loop`
  Register arg[kMostOperands];
  bool meets = false;  // elements change their places in the row, and so the lanes of a device that have them

  bool operator==(const Instruction&) const = default;
  /// Whether it says where the program goes on.
  [[nodiscard]] KVJAX_HD bool jumps() const {
    return op == Opcode::k_loop || op == Opcode::k_leave || op == Opcode::k_again;
  }
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

  bool operator==(const Program&) const = default;
  /// Whether it reads facts about rows.
  [[nodiscard]] bool wants_facts() const {
    return std::any_of(fields.begin(), fields.end(), [](const Field& field) { return field.is_fact(); });
  }

  [[nodiscard]] const Field& FieldOf(Register r) const { return fields[static_cast<size_t>(r.number())]; }
  /// How many elements a register has.
  [[nodiscard]] int32_t WidthOf(Register r) const {
    if (r.kind() == Register::Kind::kField) return FieldOf(r).width;
    return r.kind() == Register::Kind::kVector ? dim : 1;
  }

  /// `words`: the counts of vectors, scalars, shared registers, fields, and instructions of the two lists;
  /// then four words for each field, and for each instruction two and its operands. Throws unless it is
  /// about rows of this kind.
  static Program Parse(std::string_view table, std::span<const int32_t> words, int64_t dim, RowType type,
                       const SlotLayout& layout);

 private:
  [[nodiscard]] bool Fits(const Field& field, RowType type, const SlotLayout& layout) const;
  [[nodiscard]] bool Fits(const Instruction& instruction) const;
  [[nodiscard]] bool FitsMove(const Instruction& instruction) const;
  [[nodiscard]] static bool Link(std::vector<Instruction>& list);
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
    field.source = next(), field.type = static_cast<Field::Type>(next());
    field.first = next(), field.width = next();
    if (!p.Fits(field, type, layout)) throw ProgramError(table, at);
  }
  for (std::vector<Instruction>* list : {&p.initial, &p.update}) {
    for (Instruction& i : *list) {
      i.op = static_cast<Opcode>(next()), i.out = Register(next());
      for (Register& arg : i.arg) arg = Register(next());
      if (!p.Fits(i)) throw ProgramError(table, at);
      const auto moves = [&](Register r) {
        return r.kind() == Register::Kind::kField && p.FieldOf(r).first != 0;
      };
      const int32_t arity = kInstructionForms[static_cast<size_t>(i.op)].arity;
      i.meets = !i.jumps() && (moves(i.out) || std::any_of(i.arg, i.arg + arity, moves));
    }
    if (!Link(*list)) throw ProgramError(table, at);
  }
  if (at != words.size()) throw ProgramError(table, at);
  return p;
}

/// Sets where `leave` and `again` go on. False unless loops are in each other, each with one `leave`.
inline bool Program::Link(std::vector<Instruction>& list) {
  struct Open {
    size_t begin;
    Instruction* leave;
  };
  std::vector<Open> loops;
  const auto target = [](size_t at) { return Register(static_cast<int32_t>(at)); };
  for (size_t at = 0; at < list.size(); ++at) {
    Instruction& i = list[at];
    if (i.op == Opcode::k_loop) loops.push_back({at, nullptr});
    if (i.op != Opcode::k_leave && i.op != Opcode::k_again) continue;
    const bool leaves = i.op == Opcode::k_leave;
    if (loops.empty() || (loops.back().leave == nullptr) != leaves) return false;
    if (leaves) {
      loops.back().leave = &i;
    } else {
      i.out = target(loops.back().begin), loops.back().leave->out = target(at);
      loops.pop_back();
    }
  }
  return loops.empty();
}

inline bool Program::Fits(const Field& field, RowType type, const SlotLayout& layout) const {
  const bool known = field.type >= Field::Type::kWord && field.type <= Field::Type::kBool;
  if (!known || field.first < 0 || field.width < 1) return false;
  const bool words = field.type == Field::Type::kWord, in_row = int64_t{field.first} + field.width <= dim;
  if (field.source == Field::kGradient) return words && in_row;
  if (field.is_fact()) return words && field.first == 0 && field.width == 1;
  if (field.is_register()) return words && in_row && field.vector() < vectors;
  if (field.is_constant()) {
    constexpr size_t kCell = 8;  // bytes of a shared register
    return words && field.constant() * kCell + field.end() <= static_cast<size_t>(shared) * kCell;
  }
  if (field.source == Field::kValue) {
    const Field::Type wanted = type == RowType::kFloat32    ? Field::Type::kWord
                               : type == RowType::kBFloat16 ? Field::Type::kBFloat16
                                                            : Field::Type::kFloat16;
    return field.type == wanted && in_row;
  }
  const std::vector<Slot>& slots = layout.slots();
  if (field.source < 0 || static_cast<size_t>(field.source) >= slots.size()) return false;
  const size_t bytes = slots[static_cast<size_t>(field.source)].bytes;
  return field.end() <= bytes && bytes % field.item() == 0;
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
  return FieldOf(r).type == Field::Type::kWord && FieldOf(r).width > 1;
}

inline bool Program::Fits(const Instruction& i) const {
  if (i.op < Opcode{0} || i.op >= Opcode::kCount) return false;
  const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
  using Kind = Register::Kind;
  if (!std::all_of(i.arg, i.arg + form.arity, [&](Register r) { return Exists(r); })) return false;
  if (i.op == Opcode::k_loop || i.op == Opcode::k_again) return true;
  if (i.op == Opcode::k_leave) return i.arg[0].kind() == Kind::kScalar;
  if (!Exists(i.out) || i.out.kind() == Kind::kShared) return false;
  if (i.out.kind() == Kind::kField && !FieldOf(i.out).writable()) return false;
  if (form.kind == InstructionForm::Kind::kMove) return FitsMove(i);
  int32_t vectors = 0, width = 0;
  for (int32_t j = 0; j <= form.arity; ++j) {
    const bool reduced = form.kind == InstructionForm::Kind::kReduce;
    const Register r = j < form.arity ? i.arg[j] : i.out;
    if (r.kind() == Kind::kField && !InPlace(r)) return false;
    if (!IsVector(r) || (j == form.arity && reduced)) continue;
    if (width != 0 && WidthOf(r) != width) return false;
    width = WidthOf(r);
    if (j < form.arity) vectors |= 1 << j;
  }
  const bool vector = vectors != 0;
  if (form.doubles && (vector || IsVector(i.out))) return false;
  if (form.kind == InstructionForm::Kind::kReduce) return vector && i.out.kind() == Kind::kScalar;
  if (form.kind == InstructionForm::Kind::kMap) return IsVector(i.out) || !vector;
  return vectors == form.vectors() && IsVector(i.out) == vector;
}

inline bool Program::FitsMove(const Instruction& i) const {
  using Kind = Register::Kind;
  if (i.op == Opcode::k_load || i.op == Opcode::k_store) {
    const Register row = i.op == Opcode::k_load ? i.arg[0] : i.out;
    const Register other = i.op == Opcode::k_load ? i.out : i.arg[0];
    if (row.kind() != Kind::kField) return false;
    const int32_t width = WidthOf(row);
    if (other.kind() == Kind::kShared) return width == 1 && i.op == Opcode::k_store;
    if (width == 1) return other.kind() == Kind::kScalar;
    if (other.kind() == Kind::kField && !InPlace(other)) return false;
    return IsVector(other) && WidthOf(other) == width;
  }
  if (i.op == Opcode::k_pick) {
    return i.arg[0].kind() == Kind::kField && FieldOf(i.arg[0]).is_constant() && !IsVector(i.arg[1]) &&
           i.out.kind() == Kind::kScalar;
  }
  const auto in_place = [&](Register r) { return r.kind() != Kind::kField || InPlace(r); };  // stochastic
  return i.arg[0].kind() != Kind::kShared && !IsVector(i.arg[1]) && in_place(i.arg[0]) && in_place(i.out) &&
         IsVector(i.arg[0]) == IsVector(i.out) && WidthOf(i.arg[0]) == WidthOf(i.out);
}

}  // namespace kvjax
