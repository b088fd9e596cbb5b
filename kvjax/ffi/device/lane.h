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
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/steps.h"

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

struct ProgramView {
  const Step* steps;
  const uint64_t* shared;
  int32_t scalars;
  int32_t initials, all;  // steps
  uint64_t seed;          // of stochastic rounding
};

/// Where the parts of a row are.
struct RowPlaces {
  std::byte *value, *slots;
  const float* gradient;
  const RowFacts* facts;
  uint64_t key;
  int64_t step;
};

/// One lane of the tile that has a row. Its registers are in the memory of its own: first its scalars, then its
/// columns of the vectors.
template <class Tile>
class Lane {
 public:
  /// memory: at least Steps::BytesFor(program, Tile::size()) for each lane.
  KVJAX_HD Lane(const ProgramView& p, const Tile& tile, const LaneMemory& memory, RowPlaces row)
      : p_(p), tile_(tile), lanes_(memory.lanes), row_(row) {
    const auto words = sizeof(uint64_t) * static_cast<size_t>(p.scalars);
    const auto of = [&](Place::Space space) -> std::byte*& { return spaces_[static_cast<size_t>(space)]; };
    of(Place::Space::kValue) = row.value;
    of(Place::Space::kSlots) = row.slots;
    // Nothing writes these three.
    of(Place::Space::kGradient) = reinterpret_cast<std::byte*>(const_cast<float*>(row.gradient));
    of(Place::Space::kFacts) = reinterpret_cast<std::byte*>(const_cast<RowFacts*>(row.facts));
    of(Place::Space::kShared) = reinterpret_cast<std::byte*>(const_cast<uint64_t*>(p.shared));
    of(Place::Space::kScalars) = memory.begin + sizeof(uint64_t) * memory.lane;
    of(Place::Space::kVectors) =
        memory.begin + words * memory.lanes + kWord * (memory.lane - static_cast<uint32_t>(tile.rank()));
  }

  /// fresh: whether the row has no slots yet, which the program then makes.
  KVJAX_HD void Run(bool fresh) const {
    for (int32_t at = fresh ? 0 : p_.initials; at < p_.all; ++at) {
      const Step& s = p_.steps[at];
      if (s.op == Opcode::k_again) at = s.to;
      if (s.op == Opcode::k_leave && Read<int32_t>(Find(s.arg[0], 0), 0) == 0) at = s.to;
      if (s.meets) tile_.Sync();
      Run(s);
      if (s.meets) tile_.Sync();
    }
  }

 private:
  /// What a lane has of an operand: the elements of its columns, or the only one.
  struct Operand {
    std::byte* at;
    uint32_t step;  // bytes to the lane's next
    int32_t n;      // how many it has
  };
  static constexpr uint32_t kWord = sizeof(float), kSize = Tile::size();

  /// From a column on.
  [[nodiscard]] KVJAX_HD Operand Find(const Place& place, int32_t column) const {
    const Place of = place;
    const bool vector = of.space == Place::Space::kVectors;
    std::byte* at = spaces_[static_cast<size_t>(of.space)] + of.begin;
    const auto from = static_cast<uint32_t>(column);
    if (of.first == 0) {
      at += from * of.item;
    } else {  // lanes have the columns of the whole vector
      const uint32_t element = of.first + from;
      at += kWord * (element / kSize * lanes_ + element % kSize);
    }
    const int32_t n = (of.width - column + static_cast<int32_t>(kSize) - 1) / static_cast<int32_t>(kSize);
    return {at, vector ? kWord * lanes_ : of.item * kSize, of.single ? 1 : n};
  }
  template <class T>
  [[nodiscard]] KVJAX_HD static T Read(const Operand& from, int32_t k) {
    return *reinterpret_cast<const T*>(from.at + uint64_t{static_cast<uint32_t>(k)} * from.step);
  }
  template <class T>
  KVJAX_HD static void Write(const Operand& to, int32_t k, T x) {
    *reinterpret_cast<T*>(to.at + uint64_t{static_cast<uint32_t>(k)} * to.step) = x;
  }
  /// Writes make(k) for each of a lane's elements. The loop is as short as it can be: what a GPU waits for here
  /// is code.
  template <class T, class Make>
  KVJAX_HD static void Each(const Operand& out, Make make) {
    KVJAX_ROLLED
    for (int32_t k = 0; k < out.n; ++k) Write<T>(out, k, make(k));
  }

  template <class F, int32_t kArity>
  KVJAX_HD static void Map(const Operand& out, const Operand* arg) {
    using In = typename F::In;
    Each<typename F::Out>(out, [&](int32_t k) {
      const auto read = [&](int32_t j) { return j < kArity ? Read<In>(arg[j], k) : In(); };
      return F::Of(read(0), read(1), read(2), read(3), read(4));
    });
  }

  /// In the order of the CPU's kernels: sixteen sums, which are then added in pairs.
  template <class F>
  KVJAX_HD void Reduce(const Operand& out, const Operand& in) const {
    using T = typename F::T;
    constexpr int32_t kSums = 16, kLanes = Tile::size(), kOwn = kSums / kLanes;
    static_assert(kOwn * kLanes == kSums);
    T sum[kOwn];
    for (T& x : sum) x = F::Zero();
    KVJAX_ROLLED
    for (int32_t k = 0; k < in.n; k += kOwn) {
      for (int32_t m = 0; m < kOwn; ++m) {
        if (k + m < in.n) sum[m] = F::Of(sum[m], Read<T>(in, k + m));
      }
    }
    for (int32_t apart = kSums / 2; apart >= kLanes && apart > 0; apart /= 2) {
      for (int32_t s = 0; s < apart / kLanes; ++s) sum[s] = F::Of(sum[s], sum[s + apart / kLanes]);
    }
    for (int32_t apart = std::min(kLanes, kSums) / 2; apart > 0; apart /= 2) {
      const int32_t other = tile_.rank() + apart;
      const T theirs = tile_.Shuffle(sum[0], other < kLanes ? other : tile_.rank());
      sum[0] = F::Of(sum[0], theirs);
    }
    Write(out, 0, tile_.Shuffle(sum[0], 0));
  }

  [[nodiscard]] KVJAX_HD static uint32_t Get(const Operand& from, Place::Type type, int32_t k) {
    if (type == Place::Type::kWord) return Read<uint32_t>(from, k);
    if (type == Place::Type::kBool) return Read<std::byte>(from, k) != std::byte{0} ? 1 : 0;
    const auto half = Read<uint16_t>(from, k);
    return std::bit_cast<uint32_t>(type == Place::Type::kBFloat16 ? FromBFloat16(half) : FromFloat16(half));
  }
  KVJAX_HD static void Put(const Operand& to, Place::Type type, int32_t k, uint32_t word) {
    if (type == Place::Type::kWord) return Write(to, k, word);
    if (type == Place::Type::kBool) return Write(to, k, word != 0 ? std::byte{1} : std::byte{0});
    const auto x = std::bit_cast<float>(word);
    Write(to, k, type == Place::Type::kBFloat16 ? ToBFloat16(x) : ToFloat16(x));
  }
  /// Words, some of which are on their way at once.
  KVJAX_HD static void Copy(const Operand& to, const Operand& from) {
    constexpr int32_t kAtOnce = 4;
    KVJAX_ROLLED
    for (int32_t k = 0; k < to.n; k += kAtOnce) {
      uint32_t words[kAtOnce];
      for (int32_t m = 0; m < kAtOnce; ++m) words[m] = k + m < to.n ? Read<uint32_t>(from, k + m) : 0;
      for (int32_t m = 0; m < kAtOnce; ++m) {
        if (k + m < to.n) Write(to, k + m, words[m]);
      }
    }
  }
  /// One element of a record is read by the first lane, for all, and only that one writes it: no lane is so
  /// far ahead that another one would read what comes later.
  KVJAX_HD void Load(const Step& s) const {
    const Operand out = Find(s.out, tile_.rank());
    const Place::Type type = s.arg[0].type;
    if (s.out.single) {
      const uint32_t word = tile_.rank() == 0 ? Get(Find(s.arg[0], 0), type, 0) : 0;
      return Write(out, 0, tile_.Shuffle(word, 0));
    }
    const Operand from = Find(s.arg[0], tile_.rank());
    if (type == Place::Type::kWord) {
      return Copy(out, from);
    }
    Each<uint32_t>(out, [&](int32_t k) { return Get(from, type, k); });
  }
  KVJAX_HD void Store(const Step& s) const {
    const Operand from = Find(s.arg[0], tile_.rank());
    if (s.arg[0].single) {
      if (tile_.rank() == 0) Put(Find(s.out, 0), s.out.type, 0, Read<uint32_t>(from, 0));
      return;
    }
    const Operand to = Find(s.out, tile_.rank());
    if (s.out.type == Place::Type::kWord) return Copy({to.at, to.step, from.n}, from);
    KVJAX_ROLLED
    for (int32_t k = 0; k < from.n; ++k) Put(to, s.out.type, k, Read<uint32_t>(from, k));
  }

  KVJAX_HD void Pick(const Step& s) const {
    const auto index = Read<int32_t>(Find(s.arg[1], 0), 0);
    const int32_t last = s.arg[0].width - 1, column = index < 0 ? 0 : index < last ? index : last;
    Write(Find(s.out, tile_.rank()), 0, Get(Find(s.arg[0], column), s.arg[0].type, 0));
  }

  /// As the CPU's; kvjax/_training/rounding.py says what it computes.
  template <bool kHalf>
  KVJAX_HD void Stochastic(const Step& s) const {
    constexpr uint32_t kTail = (1u << (kHalf ? 13 : 16)) - 1;
    constexpr float kLargest = kHalf ? 65504.0f : 0x1.FEp127f;
    uint32_t state = 0;
    const uint64_t facts[] = {p_.seed, static_cast<uint64_t>(row_.step), row_.key};
    for (const uint64_t from : facts) {
      state = Mix32((state ^ static_cast<uint32_t>(from)) + 0x9E3779B9u);
      state = Mix32((state ^ static_cast<uint32_t>(from >> 32)) + 0x9E3779B9u);
    }
    const int32_t column = s.out.single ? 0 : tile_.rank();
    const Operand out = Find(s.out, tile_.rank()), in = Find(s.arg[0], column);
    const auto before = Read<uint32_t>(Find(s.arg[1], 0), 0);  // columns
    Each<float>(out, [&](int32_t k) {
      const auto x = Read<float>(in, k);
      const int32_t c = column + k * Tile::size();
      const float magnitude = __builtin_fabsf(x);
      const auto bits = std::bit_cast<uint32_t>(x);
      const uint32_t random = Mix32(Mix32(state ^ Mix32(before + static_cast<uint32_t>(c) + 1)) + bits);
      auto rounded = std::bit_cast<float>((bits + (random & kTail)) & ~kTail);
      if constexpr (kHalf) {  // subnormal ones of the type are multiples of the smallest
        const float multiple = magnitude / 0x1p-24f, low = __builtin_floorf(multiple);
        const float up = static_cast<float>(random >> 8) * 0x1p-24f < multiple - low ? 1.0f : 0.0f;
        if (magnitude < 0x1p-14f) rounded = __builtin_copysignf((low + up) * 0x1p-24f, x);
      }
      return magnitude <= kLargest ? rounded : x;
    });
  }
  [[nodiscard]] KVJAX_HD static uint32_t Mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  KVJAX_HD void Run(const Step& s) const {
    switch (s.op) {
      case Opcode::k_load:
        return Load(s);
      case Opcode::k_store:
        return Store(s);
      case Opcode::k_pick:
        return Pick(s);
      case Opcode::k_stochastic_bfloat16:
        return Stochastic<false>(s);
      case Opcode::k_stochastic_float16:
        return Stochastic<true>(s);
      case Opcode::k_loop:  // where a program goes on is above
      case Opcode::k_leave:
      case Opcode::k_again:
        return;
      default:
        return Compute(s);
    }
  }
  KVJAX_HD void Compute(const Step& s) const {
    const Operand out = Find(s.out, tile_.rank());
    const int32_t column = s.out.single && !s.sums ? 0 : tile_.rank();
    Operand arg[kMostOperands] = {};
    for (int32_t j = 0; j < kMostOperands; ++j) {
      if (j < s.arity) arg[j] = Find(s.arg[j], column);
    }
    switch (s.op) {
#define KVJAX_MAP(name, arity, In, Out, expression) \
  case Opcode::k_##name:                            \
    return Map<instruction::name##_map, arity>(out, arg);
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  case Opcode::k_##name:                         \
    return Map<instruction::name##_map, static_cast<int32_t>(sizeof(kinds)) - 1>(out, arg);
#define KVJAX_REDUCE(name, T, zero, expression) \
  case Opcode::k_##name:                        \
    return Reduce<instruction::name##_reduce>(out, arg[0]);
#define KVJAX_MOVE(name, arity)
      KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_FUSED
#undef KVJAX_REDUCE
      default:  // done above
        return;
    }
  }

  const ProgramView& p_;
  const Tile& tile_;
  uint32_t lanes_;
  RowPlaces row_;
  std::byte* spaces_[static_cast<size_t>(Place::Space::kCount)];
};

}  // namespace kvjax::device
