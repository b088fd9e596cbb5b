// A lane of a tile that runs a row program on one row.
//
// Each lane has the same columns of all registers of a row. So lanes meet only where a row becomes one
// element, and where one element of the record is read or written. What has one element for a row, every lane
// computes for itself.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/half.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/program.h"

namespace kvjax::device {

// ---- the instructions, one element at a time
// --------------------------------------------------------------

namespace instruction {

KVJAX_HD inline uint32_t Bits(int32_t x) { return static_cast<uint32_t>(x); }
KVJAX_HD inline int32_t Word(uint32_t x) { return static_cast<int32_t>(x); }

#define KVJAX_MOVE(name, arity)
#define KVJAX_MAP(name, arity, In_, Out_, expression)                                                     \
  struct name##_map {                                                                                     \
    using In = In_;                                                                                       \
    using Out = Out_;                                                                                     \
    KVJAX_HD static Out Of([[maybe_unused]] In a, [[maybe_unused]] In b, [[maybe_unused]] In c, In, In) { \
      return expression;                                                                                  \
    }                                                                                                     \
  };                                                                                                      \
  [[maybe_unused]] KVJAX_HD inline Out_ name(In_ a, In_ b = In_(), In_ c = In_()) {                       \
    return name##_map::Of(a, b, c, In_(), In_());                                                         \
  }
#define KVJAX_FUSED(name, kinds, In_, Out_, calls)                                                    \
  struct name##_map {                                                                                 \
    using In = In_;                                                                                   \
    using Out = Out_;                                                                                 \
    KVJAX_HD static Out Of(In a, [[maybe_unused]] In b, [[maybe_unused]] In c, [[maybe_unused]] In d, \
                           [[maybe_unused]] In e) {                                                   \
      return calls;                                                                                   \
    }                                                                                                 \
  };
#define KVJAX_REDUCE(name, T_, zero, expression)          \
  struct name##_reduce {                                  \
    using T = T_;                                         \
    KVJAX_HD static T Zero() { return zero; }             \
    KVJAX_HD static T Of(T x, T y) { return expression; } \
  };
KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_FUSED
#undef KVJAX_REDUCE

}  // namespace instruction

/// A field of a program, and where its elements are.
struct FieldView {
  enum Place : int32_t { kValue, kSlots, kGradient, kFacts, kConstants, kRegisters };
  Place place;
  Field::Type type;
  uint32_t offset;  // bytes
  int32_t width;

  static FieldView Of(const Field& field, const SlotLayout& layout, int32_t dim) {
    const auto at = [&](Place place, size_t offset) {
      return FieldView{place, field.type, static_cast<uint32_t>(offset + field.offset()), field.width};
    };
    if (field.is_register())
      return at(kRegisters, sizeof(float) * static_cast<size_t>(field.vector()) * static_cast<size_t>(dim));
    if (field.is_constant()) return at(kConstants, field.constant() * sizeof(uint64_t));
    if (field.is_fact()) return at(kFacts, field.fact() * sizeof(uint32_t));
    if (field.source == Field::kGradient) return at(kGradient, 0);
    if (field.source == Field::kValue) return at(kValue, 0);
    return at(kSlots, layout.slots()[static_cast<size_t>(field.source)].offset);
  }
};

struct ProgramView {
  const FieldView* fields;
  const Instruction *initial, *update;
  const uint64_t* shared;
  int32_t dim, vectors, scalars, initials, updates;
  uint64_t seed;  // of stochastic rounding
};

/// Where the parts of a row are.
struct RowPlaces {
  std::byte *value, *slots;
  const float* gradient;
  const RowFacts* facts;
  uint64_t key;
  int64_t step;
};

/// One lane of the tile that has a row.
template <class Tile>
class Lane {
 public:
  /// vectors: (p.vectors, p.dim), the tile's. scalars: (p.scalars,), the lane's own.
  KVJAX_HD Lane(const ProgramView& p, const Tile& tile, float* vectors, uint64_t* scalars, RowPlaces row)
      : p_(p), tile_(tile), vectors_(vectors), scalars_(scalars), row_(row) {}

  KVJAX_HD void Run(const Instruction* instructions, int32_t n) const {
    for (int32_t at = 0; at < n; ++at) {
      const Instruction& i = instructions[at];
      if (i.op == Opcode::k_again) at = i.out.number();
      if (i.op == Opcode::k_leave && Read<int32_t>(At(i.arg[0]), 0) == 0) at = i.out.number();
      if (i.meets) tile_.Sync();
      Run(i);
      if (i.meets) tile_.Sync();
    }
  }

 private:
  /// A register: of a row's elements one after the other, or one element.
  struct Operand {
    std::byte* at;
    uint32_t stride;  // bytes; 0 for one element
    int32_t width;
  };
  static constexpr uint32_t kWord = sizeof(float);

  [[nodiscard]] KVJAX_HD Operand At(Register r) const {
    const auto number = static_cast<size_t>(r.number());
    switch (r.kind()) {
      case Register::Kind::kVector:
        return {reinterpret_cast<std::byte*>(vectors_ + number * static_cast<size_t>(p_.dim)), kWord, p_.dim};
      case Register::Kind::kScalar:
        return {reinterpret_cast<std::byte*>(scalars_ + number), 0, 1};
      case Register::Kind::kShared:
        return {reinterpret_cast<std::byte*>(const_cast<uint64_t*>(p_.shared + number)), 0, 1};
      case Register::Kind::kField:
        break;
    }
    return {PlaceOf(p_.fields[number]), kWord, p_.fields[number].width};
  }
  [[nodiscard]] KVJAX_HD std::byte* PlaceOf(const FieldView& field) const {
    switch (field.place) {
      case FieldView::kValue:
        return row_.value + field.offset;
      case FieldView::kSlots:
        return row_.slots + field.offset;
      case FieldView::kGradient:  // which nothing writes, nor what follows
        return reinterpret_cast<std::byte*>(const_cast<float*>(row_.gradient)) + field.offset;
      case FieldView::kFacts:
        return reinterpret_cast<std::byte*>(const_cast<RowFacts*>(row_.facts)) + field.offset;
      case FieldView::kRegisters:
        return reinterpret_cast<std::byte*>(vectors_) + field.offset;
      case FieldView::kConstants:
        break;
    }
    return reinterpret_cast<std::byte*>(const_cast<uint64_t*>(p_.shared)) + field.offset;
  }
  template <class T>
  [[nodiscard]] KVJAX_HD static T Read(const Operand& from, int32_t column) {
    T x;
    memcpy(&x, from.at + static_cast<size_t>(column) * from.stride, sizeof(T));
    return x;
  }
  template <class T>
  KVJAX_HD static void Write(const Operand& to, int32_t column, T x) {
    memcpy(to.at + static_cast<size_t>(column) * to.stride, &x, sizeof(T));
  }
  /// Calls f with each column that is the lane's; of one element, with 0.
  template <class F>
  KVJAX_HD void Columns(const Operand& of, F f) const {
    if (of.stride == 0) return f(0);
    for (int32_t c = tile_.rank(); c < of.width; c += tile_.size()) f(c);
  }

  template <class F>
  KVJAX_HD void Map(const Instruction& i, int32_t arity) const {
    using In = typename F::In;
    Operand arg[kMostOperands];
    for (int32_t j = 0; j < kMostOperands; ++j) arg[j] = At(i.arg[j < arity ? j : 0]);
    const Operand out = At(i.out);
    Columns(out, [&](int32_t c) {
      Write(out, c,
            F::Of(Read<In>(arg[0], c), Read<In>(arg[1], c), Read<In>(arg[2], c), Read<In>(arg[3], c),
                  Read<In>(arg[4], c)));
    });
  }

  /// In the order of the CPU's kernels: sixteen sums, which are then added in pairs.
  template <class F>
  KVJAX_HD void Reduce(const Instruction& i) const {
    using T = typename F::T;
    constexpr int32_t kSums = 16, kSize = Tile::size(), kOwn = kSums / kSize;
    static_assert(kOwn * kSize == kSums);
    const Operand in = At(i.arg[0]);
    T sum[kOwn];
    for (T& x : sum) x = F::Zero();
    Columns(in, [&](int32_t c) {
      T& x = sum[c % kSums / kSize];
      x = F::Of(x, Read<T>(in, c));
    });
    for (int32_t apart = kSums / 2; apart >= kSize && apart > 0; apart /= 2) {
      for (int32_t s = 0; s < apart / kSize; ++s) sum[s] = F::Of(sum[s], sum[s + apart / kSize]);
    }
    for (int32_t apart = std::min(kSize, kSums) / 2; apart > 0; apart /= 2) {
      const int32_t other = tile_.rank() + apart;
      const T theirs = tile_.Shuffle(sum[0], other < kSize ? other : tile_.rank());
      sum[0] = F::Of(sum[0], theirs);
    }
    Write(At(i.out), 0, tile_.Shuffle(sum[0], 0));
  }

  [[nodiscard]] KVJAX_HD static uint32_t Get(const std::byte* from, Field::Type type, int32_t column) {
    uint32_t word = 0;
    if (type == Field::Type::kWord) {
      memcpy(&word, from + kWord * static_cast<size_t>(column), kWord);
    } else if (type == Field::Type::kBool) {
      word = from[column] != std::byte{0} ? 1 : 0;
    } else {
      uint16_t half;
      memcpy(&half, from + sizeof(half) * static_cast<size_t>(column), sizeof(half));
      word = std::bit_cast<uint32_t>(type == Field::Type::kBFloat16 ? FromBFloat16(half) : FromFloat16(half));
    }
    return word;
  }
  KVJAX_HD static void Put(std::byte* to, Field::Type type, int32_t column, uint32_t word) {
    if (type == Field::Type::kWord) {
      memcpy(to + kWord * static_cast<size_t>(column), &word, kWord);
    } else if (type == Field::Type::kBool) {
      to[column] = word != 0 ? std::byte{1} : std::byte{0};
    } else {
      const auto x = std::bit_cast<float>(word);
      const uint16_t half = type == Field::Type::kBFloat16 ? ToBFloat16(x) : ToFloat16(x);
      memcpy(to + sizeof(half) * static_cast<size_t>(column), &half, sizeof(half));
    }
  }
  /// One element of a record is read by the first lane, for all, and only that one writes it: no lane is so
  /// far ahead that another one would read what comes later.
  KVJAX_HD void Load(const Instruction& i) const {
    const FieldView& field = p_.fields[i.arg[0].number()];
    const std::byte* const from = PlaceOf(field);
    const Operand out = At(i.out);
    if (out.stride == 0) {
      const uint32_t word = tile_.rank() == 0 ? Get(from, field.type, 0) : 0;
      return Write(out, 0, tile_.Shuffle(word, 0));
    }
    Columns(out, [&](int32_t c) { Write(out, c, Get(from, field.type, c)); });
  }
  KVJAX_HD void Store(const Instruction& i) const {
    const FieldView& field = p_.fields[i.out.number()];
    std::byte* const to = PlaceOf(field);
    const Operand from = At(i.arg[0]);
    if (from.stride == 0) {
      if (tile_.rank() == 0) Put(to, field.type, 0, Read<uint32_t>(from, 0));
      return;
    }
    Columns(from, [&](int32_t c) { Put(to, field.type, c, Read<uint32_t>(from, c)); });
  }

  KVJAX_HD void Pick(const Instruction& i) const {
    const FieldView& field = p_.fields[i.arg[0].number()];
    const auto index = Read<int32_t>(At(i.arg[1]), 0);
    const int32_t column = index < 0 ? 0 : index < field.width ? index : field.width - 1;
    Write(At(i.out), 0, Get(PlaceOf(field), field.type, column));
  }

  /// As the CPU's; kvjax/_training/rounding.py says what it computes.
  template <bool kHalf>
  KVJAX_HD void Stochastic(const Instruction& i) const {
    constexpr uint32_t kTail = (1u << (kHalf ? 13 : 16)) - 1;
    constexpr float kLargest = kHalf ? 65504.0f : 0x1.FEp127f;
    uint32_t state = 0;
    const uint64_t facts[] = {p_.seed, static_cast<uint64_t>(row_.step), row_.key};
    for (const uint64_t from : facts) {
      state = Mix32((state ^ static_cast<uint32_t>(from)) + 0x9E3779B9u);
      state = Mix32((state ^ static_cast<uint32_t>(from >> 32)) + 0x9E3779B9u);
    }
    const Operand in = At(i.arg[0]), out = At(i.out);
    const auto before = Read<uint32_t>(At(i.arg[1]), 0);  // columns
    Columns(out, [&](int32_t c) {
      const auto x = Read<float>(in, c);
      const float magnitude = __builtin_fabsf(x);
      const auto bits = std::bit_cast<uint32_t>(x);
      const uint32_t random = Mix32(Mix32(state ^ Mix32(before + static_cast<uint32_t>(c) + 1)) + bits);
      auto rounded = std::bit_cast<float>((bits + (random & kTail)) & ~kTail);
      if constexpr (kHalf) {  // subnormal ones of the type are multiples of the smallest
        const float multiple = magnitude / 0x1p-24f, low = __builtin_floorf(multiple);
        const float up = static_cast<float>(random >> 8) * 0x1p-24f < multiple - low ? 1.0f : 0.0f;
        if (magnitude < 0x1p-14f) rounded = __builtin_copysignf((low + up) * 0x1p-24f, x);
      }
      Write(out, c, magnitude <= kLargest ? rounded : x);
    });
  }
  [[nodiscard]] KVJAX_HD static uint32_t Mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  KVJAX_HD void Run(const Instruction& i) const {
    switch (i.op) {
#define KVJAX_MAP(name, arity, In, Out, expression) \
  case Opcode::k_##name:                            \
    return Map<instruction::name##_map>(i, arity);
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  case Opcode::k_##name:                         \
    return Map<instruction::name##_map>(i, static_cast<int32_t>(sizeof(kinds)) - 1);
#define KVJAX_REDUCE(name, T, zero, expression) \
  case Opcode::k_##name:                        \
    return Reduce<instruction::name##_reduce>(i);
#define KVJAX_MOVE(name, arity)
      KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_FUSED
#undef KVJAX_REDUCE
      case Opcode::k_load:
        return Load(i);
      case Opcode::k_store:
        return Store(i);
      case Opcode::k_pick:
        return Pick(i);
      case Opcode::k_stochastic_bfloat16:
        return Stochastic<false>(i);
      case Opcode::k_stochastic_float16:
        return Stochastic<true>(i);
      case Opcode::k_loop:  // where a program goes on is above
      case Opcode::k_leave:
      case Opcode::k_again:
      case Opcode::kCount:
        return;
    }
  }

  const ProgramView& p_;
  const Tile& tile_;
  float* vectors_;
  uint64_t* scalars_;
  RowPlaces row_;
};

}  // namespace kvjax::device
