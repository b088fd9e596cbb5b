// Steps: the instructions of a row program as the lanes of a device read them, each with the places of its
// operands.
//
// A program names registers and fields. Where these are is found out on the host, once for all rows, so that
// a lane only adds a few numbers; and what does not lie in whole pieces is loaded and stored by steps of its
// own, so that all others work on pieces. So the interpreter is short: a GPU that runs it waits for code.
//
// A tile reads a step once for several rows. The pieces of a row are dealt out to as many lanes, a power of
// two, at most those of the tile, so that lanes of a tile have pieces of several narrow rows. What a row
// has one element of is of one lane: row r's of lane r.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/program.h"

namespace kvjax::device {

/// Where the elements of an operand are. A row is dealt out to lanes in pieces of four elements.
struct alignas(16) Place {
  static constexpr int32_t kPiece = 4;
  /// Parts of a row, then what is the same for all rows, then the registers.
  enum class Space : uint8_t { kValue, kSlots, kGradient, kFacts, kShared, kScalars, kVectors, kCount };
  enum class Type : uint8_t { kWord, kBFloat16, kFloat16, kBool };  // as those of fields
  Space space;
  Type type;
  bool single;     // there is one element of each row, or of all rows, which all lanes use
  bool whole;      // its pieces lie at multiples of their size, and all of them may be read and written
  uint32_t begin;  // bytes before the first; of a register, words of a lane or its pieces of a row
  int32_t width;   // elements
  uint32_t first;  // of a part of a vector, the elements before its own
};

struct Step {
  Opcode op = Opcode::k_mov;
  int32_t arity = 0;   // operands that are whole or single
  int32_t to = 0;      // where a program that jumps goes on
  bool meets = false;  // lanes use what others have
  Place out = {};      // of one that jumps, the word that keeps which rows were there before the loop
  Place arg[kMostOperands] = {};
};

/// How the rows of a tile are dealt out to its lanes, and how much of its memory is for what.
struct Dealing {
  /// Words of a lane about its row, before the scalars: where its parts are, and its key.
  static constexpr uint32_t kKey = 4, kRowWords = 5;
  uint32_t rows;     // of a tile
  uint32_t lanes;    // that share the pieces of a row
  uint32_t scalars;  // words of a lane for the scalars of its row
  uint32_t pieces;   // that a lane has of the vectors of a row
};

/// The steps of a program, for tiles of so many lanes and rows that lie apart by as many bytes.
class Steps {
 public:
  Steps(const Program& program, const SlotLayout& layout, size_t value_stride, size_t slot_stride,
        uint32_t tile)
      : program_(program),
        layout_(layout),
        value_stride_(value_stride),
        slot_stride_(slot_stride),
        tile_(tile) {
    const auto all = [](uint32_t n, uint32_t to) { return (n + to - 1) / to; };
    const uint32_t pieces = all(static_cast<uint32_t>(program.dim), Place::kPiece);
    while (lanes_ < std::min(pieces, tile)) lanes_ *= 2;
    pieces_ = all(pieces, lanes_);
    Append(program.initial);
    initials_ = steps_.size();
    Append(program.update);
  }

  /// A row that has no slots yet begins with the first, which are so many, and all others behind these.
  [[nodiscard]] size_t initials() const { return initials_; }
  [[nodiscard]] const std::vector<Step>& all() const { return steps_; }
  /// Of tiles of so many rows, at most as many as they have lanes.
  [[nodiscard]] Dealing DealingOf(size_t rows) const {
    return {static_cast<uint32_t>(rows), lanes_, static_cast<uint32_t>(program_.scalars) + most_loops_,
            pieces_ * (static_cast<uint32_t>(program_.vectors) + most_copies_)};
  }
  /// What a lane needs then: first words about its row, then its scalars, then its pieces of the vectors.
  [[nodiscard]] size_t BytesOf(size_t rows) const {
    const Dealing of = DealingOf(rows);
    const size_t own = (rows * lanes_ + tile_ - 1) / tile_;  // rows of which it has pieces
    return sizeof(uint64_t) * (Dealing::kRowWords + of.scalars) +
           sizeof(float) * Place::kPiece * of.pieces * own;
  }

 private:
  using Space = Place::Space;

  void Append(const std::vector<Instruction>& list) {
    std::vector<int32_t> at;  // of each instruction, its step
    const size_t begin = steps_.size();
    for (const Instruction& i : list) {
      at.push_back(static_cast<int32_t>(steps_.size()));
      i.jumps() ? Jump(i) : Compute(i);
    }
    for (size_t s = begin; s < steps_.size(); ++s) {
      if (Jumps(steps_[s].op)) steps_[s].to = at[static_cast<size_t>(steps_[s].to)];
    }
  }
  static bool Jumps(Opcode op) {
    return op == Opcode::k_loop || op == Opcode::k_leave || op == Opcode::k_again;
  }
  void Jump(const Instruction& i) {
    Step step;
    step.op = i.op;
    if (i.op == Opcode::k_loop) most_loops_ = std::max(most_loops_, ++loops_);
    step.out = Single(Space::kScalars, static_cast<uint32_t>(program_.scalars) + loops_ - 1);
    if (i.op == Opcode::k_again) --loops_;
    if (i.op != Opcode::k_loop) step.to = i.out.number();
    if (i.op == Opcode::k_leave) step.arg[0] = PlaceOf(i.arg[0]);
    steps_.push_back(step);
  }
  void Compute(const Instruction& i) {
    const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
    Step step;
    step.op = i.op, step.out = PlaceOf(i.out);
    for (int32_t j = 0; j < form.arity; ++j) step.arg[j] = PlaceOf(i.arg[j]);
    // What one lane writes for a row, others read, and an element of the record may be one of a piece.
    const bool moves = form.kind == InstructionForm::Kind::kMove;
    step.meets = i.meets || step.out.single || (moves && step.arg[0].single);
    if (moves) return steps_.push_back(step);
    step.arity = form.arity;
    uint32_t copies = 0;
    for (int32_t j = 0; j < form.arity; ++j) {
      if (InPieces(step.arg[j])) continue;
      const Place copy = Copy(copies++, step.arg[j].width);
      steps_.push_back(Move(Opcode::k_load, copy, step.arg[j], i.meets));
      step.arg[j] = copy;
    }
    const Place out = step.out;
    if (!InPieces(out)) step.out = Copy(copies++, out.width);
    steps_.push_back(step);
    if (!InPieces(out)) steps_.push_back(Move(Opcode::k_store, out, step.out, i.meets));
    most_copies_ = std::max(most_copies_, copies);
  }
  [[nodiscard]] static bool InPieces(const Place& place) { return place.single || place.whole; }
  [[nodiscard]] static Step Move(Opcode op, const Place& to, const Place& from, bool meets) {
    Step step;
    step.op = op, step.meets = meets, step.out = to, step.arg[0] = from;
    return step;
  }
  /// A register for the elements of a place, behind those of the program.
  [[nodiscard]] Place Copy(uint32_t number, int32_t width) const {
    Place copy = Vector(static_cast<uint32_t>(program_.vectors) + number, 0, width);
    copy.whole = true;  // whatever is behind its elements
    return copy;
  }

  [[nodiscard]] Place PlaceOf(Register r) const {
    const auto number = static_cast<uint32_t>(r.number());
    switch (r.kind()) {
      case Register::Kind::kVector:
        return Vector(number, 0, program_.dim);
      case Register::Kind::kScalar:
        return Single(Space::kScalars, number);
      case Register::Kind::kShared:
        return Single(Space::kShared, static_cast<uint32_t>(sizeof(uint64_t)) * number);
      case Register::Kind::kField:
      default:
        return PlaceOf(program_.FieldOf(r));
    }
  }
  [[nodiscard]] Place PlaceOf(const Field& field) const {
    if (field.is_register())
      return Vector(static_cast<uint32_t>(field.vector()), static_cast<uint32_t>(field.first), field.width);
    const auto [space, before, stride] = SpaceOf(field);
    const size_t begin = before + field.offset();
    const bool whole = field.type == Field::Type::kWord && stride != 0 && field.width % Place::kPiece == 0 &&
                       (begin | stride) % (sizeof(float) * Place::kPiece) == 0;
    return {.space = space,
            .type = static_cast<Place::Type>(field.type),
            .single = false,
            .whole = whole,
            .begin = static_cast<uint32_t>(begin),
            .width = field.width,
            .first = 0};
  }
  [[nodiscard]] static Place Single(Space space, uint32_t begin) {
    return {space, Place::Type::kWord, true, false, begin, 1, 0};
  }
  /// What is behind the elements of a whole vector nobody reads.
  [[nodiscard]] Place Vector(uint32_t number, uint32_t first, int32_t width) const {
    const bool whole = first == 0 && (width == program_.dim || width % Place::kPiece == 0);
    return {Space::kVectors, Place::Type::kWord, false, whole, pieces_ * number, width, first};
  }
  struct Source {
    Space space;
    size_t before, stride;  // bytes before it, and from a row to the next; 0 where that is not known
  };
  [[nodiscard]] Source SpaceOf(const Field& field) const {
    if (field.is_constant()) return {Space::kShared, field.constant() * sizeof(uint64_t), 0};
    if (field.is_fact()) return {Space::kFacts, field.fact() * sizeof(uint32_t), 0};
    if (field.source == Field::kGradient)
      return {Space::kGradient, 0, sizeof(float) * static_cast<size_t>(program_.dim)};
    if (field.source == Field::kValue) return {Space::kValue, 0, value_stride_};
    return {Space::kSlots, layout_.slots()[static_cast<size_t>(field.source)].offset, slot_stride_};
  }

  const Program& program_;
  const SlotLayout& layout_;
  size_t value_stride_, slot_stride_;
  uint32_t tile_, lanes_ = 1;  // lanes: that share a row
  uint32_t pieces_ = 0;        // of a vector that a lane has at most
  uint32_t most_copies_ = 0, loops_ = 0, most_loops_ = 0;
  size_t initials_ = 0;
  std::vector<Step> steps_;
};

}  // namespace kvjax::device
