// A lane of a tile that runs a row program on one row.
//
// Each lane has the same pieces of all registers of a row. So lanes meet only where a row becomes one
// element, where a part of one changes its place, and where one element of the record is read or written.
// What has one element for a row, every lane computes for itself.
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

/// One lane of the tile that has a row. It has every kSize-th piece of a vector, and scalars of its own.
template <class Tile>
class Lane {
 public:
  /// memory: at least Steps::bytes() for each lane.
  KVJAX_HD Lane(const ProgramView& p, const Tile& tile, const LaneMemory& memory, RowPlaces row)
      : p_(p), tile_(tile), lanes_(memory.lanes), row_(row) {
    const auto set = [&](Space space, const void* at, uint32_t unit) {
      spaces_[static_cast<size_t>(space)] = {static_cast<std::byte*>(const_cast<void*>(at)), unit};
    };
    std::byte* const vectors =
        memory.begin + sizeof(uint64_t) * static_cast<size_t>(p.scalars) * memory.lanes;
    set(Space::kValue, row.value, 1);
    set(Space::kSlots, row.slots, 1);
    set(Space::kGradient, row.gradient, 1);  // which nothing writes, nor the next two
    set(Space::kFacts, row.facts, 1);
    set(Space::kShared, p.shared, 1);
    set(Space::kScalars, memory.begin + sizeof(uint64_t) * memory.lane, sizeof(uint64_t) * lanes_);
    set(Space::kVectors, vectors + kBytes * (memory.lane - static_cast<uint32_t>(tile.rank())),
        kBytes * lanes_);
  }

  /// fresh: whether the row has no slots yet, which the program then makes.
  KVJAX_HD void Run(bool fresh) const {
    for (int32_t at = fresh ? 0 : p_.initials; at < p_.all; ++at) {
      const Step& s = p_.steps[at];
      if (s.op == Opcode::k_again) at = s.to;
      if (s.op == Opcode::k_leave && Read<int32_t>(Single(s.arg[0])) == 0) at = s.to;
      if (s.meets) tile_.Sync();
      Run(s);
      if (s.meets) tile_.Sync();
    }
  }

 private:
  using Space = Place::Space;
  template <class T>
  struct alignas(Place::kPiece * sizeof(T)) Piece {
    T x[Place::kPiece];
  };
  static constexpr uint32_t kPiece = Place::kPiece, kBytes = kPiece * sizeof(float), kSize = Tile::size();

  /// What a lane has of an operand: its pieces, or the only element.
  struct Operand {
    std::byte* at;
    uint32_t step;  // bytes to the lane's next
    bool single;
  };

  /// Where a place begins. One that is single is no more.
  [[nodiscard]] KVJAX_HD std::byte* Single(const Place& place) const {
    const auto& space = spaces_[static_cast<size_t>(place.space)];
    return space.at + size_t{place.begin} * space.unit;
  }
  /// Of a place that is single or whole.
  [[nodiscard]] KVJAX_HD Operand Find(const Place& place) const {
    const bool vector = place.space == Space::kVectors;
    std::byte* const at = Single(place);
    const auto rank = static_cast<uint32_t>(tile_.rank());
    return {place.single ? at : at + kBytes * rank, vector ? kBytes * lanes_ : kBytes * kSize, place.single};
  }
  /// How many pieces a lane has.
  [[nodiscard]] KVJAX_HD uint32_t Own(const Place& place) const {
    const uint32_t all = (static_cast<uint32_t>(place.width) + kPiece - 1) / kPiece;
    return (all + kSize - 1 - static_cast<uint32_t>(tile_.rank())) / kSize;
  }
  /// Any element of a place, whichever lane has it.
  [[nodiscard]] KVJAX_HD std::byte* Element(const Place& place, uint32_t i, uint32_t item) const {
    std::byte* const at = Single(place);
    if (place.space != Space::kVectors) return at + i * item;
    const uint32_t element = place.first + i, piece = element / kPiece;
    return at + kBytes * (piece / kSize * lanes_ + piece % kSize) + sizeof(float) * (element % kPiece);
  }
  /// At a multiple of its size; on the host, where rows need not lie so, anywhere.
  template <class T>
  [[nodiscard]] KVJAX_HD static T Read(const std::byte* from) {
#ifdef __CUDA_ARCH__
    return *reinterpret_cast<const T*>(from);
#else
    T x;
    memcpy(&x, from, sizeof(T));
    return x;
#endif
  }
  template <class T>
  KVJAX_HD static void Write(std::byte* to, const T& x) {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<T*>(to) = x;
#else
    memcpy(to, &x, sizeof(T));
#endif
  }
  template <class T>
  [[nodiscard]] KVJAX_HD static Piece<T> ReadPiece(const Operand& from, uint32_t k) {
    if (!from.single) return Read<Piece<T>>(from.at + size_t{k} * from.step);
    const T x = Read<T>(from.at);
    return {{x, x, x, x}};
  }

  template <class F, int32_t kArity>
  KVJAX_HD void Map(const Step& s, const Operand& out, const Operand* arg) const {
    using In = typename F::In;
    using Out = typename F::Out;
    if (out.single) {
      const auto read = [&](int32_t j) { return j < kArity ? Read<In>(arg[j].at) : In(); };
      return Write<Out>(out.at, F::Of(read(0), read(1), read(2), read(3), read(4)));
    }
    if constexpr (sizeof(In) == sizeof(float) && sizeof(Out) == sizeof(float)) {
      const uint32_t n = Own(s.out);
      KVJAX_ROLLED
      for (uint32_t k = 0; k < n; ++k) {
        Piece<In> in[kMostOperands] = {};
        for (int32_t j = 0; j < kArity; ++j) in[j] = ReadPiece<In>(arg[j], k);
        Piece<Out> made;
        for (uint32_t e = 0; e < kPiece; ++e)
          made.x[e] = F::Of(in[0].x[e], in[1].x[e], in[2].x[e], in[3].x[e], in[4].x[e]);
        Write(out.at + size_t{k} * out.step, made);
      }
    }
  }

  /// In the order of the CPU's kernels: sixteen sums, which are then added in pairs. So lanes add elements of
  /// each other's pieces.
  template <class F>
  KVJAX_HD void Reduce(const Step& s, const Operand& out) const {
    using T = typename F::T;
    constexpr int32_t kSums = 16, kLanes = Tile::size(), kOwn = kSums / kLanes;
    static_assert(kOwn * kLanes == kSums);
    const Place& in = s.arg[0];
    const int32_t rank = tile_.rank();
    T sum[kOwn];
    for (T& x : sum) x = F::Zero();
    KVJAX_ROLLED
    for (int32_t c = rank; c < in.width; c += kSums) {
      for (int32_t m = 0; m < kOwn; ++m) {
        const int32_t column = c + m * kLanes;
        if (column < in.width)
          sum[m] = F::Of(sum[m], Read<T>(Element(in, static_cast<uint32_t>(column), sizeof(T))));
      }
    }
    for (int32_t apart = kSums / 2; apart >= kLanes && apart > 0; apart /= 2) {
      for (int32_t m = 0; m < apart / kLanes; ++m) sum[m] = F::Of(sum[m], sum[m + apart / kLanes]);
    }
    for (int32_t apart = std::min(kLanes, kSums) / 2; apart > 0; apart /= 2) {
      const int32_t other = rank + apart;
      const T theirs = tile_.Shuffle(sum[0], other < kLanes ? other : rank);
      sum[0] = F::Of(sum[0], theirs);
    }
    Write(out.at, tile_.Shuffle(sum[0], 0));
  }

  [[nodiscard]] KVJAX_HD static uint32_t ItemOf(Place::Type type) {
    return type == Place::Type::kWord ? 4 : type == Place::Type::kBool ? 1 : 2;
  }
  [[nodiscard]] KVJAX_HD uint32_t Get(const Place& place, uint32_t i) const {
    const Place::Type type = place.type;
    const std::byte* const from = Element(place, i, ItemOf(type));
    if (type == Place::Type::kWord) return Read<uint32_t>(from);
    if (type == Place::Type::kBool) return *from != std::byte{0} ? 1 : 0;
    const auto half = Read<uint16_t>(from);
    return std::bit_cast<uint32_t>(type == Place::Type::kBFloat16 ? FromBFloat16(half) : FromFloat16(half));
  }
  KVJAX_HD void Put(const Place& place, uint32_t i, uint32_t word) const {
    const Place::Type type = place.type;
    std::byte* const to = Element(place, i, ItemOf(type));
    if (type == Place::Type::kWord) return Write(to, word);
    if (type == Place::Type::kBool) return Write(to, word != 0 ? std::byte{1} : std::byte{0});
    const auto x = std::bit_cast<float>(word);
    Write(to, type == Place::Type::kBFloat16 ? ToBFloat16(x) : ToFloat16(x));
  }

  /// Elements from one place to another. One element of a record is read by the first lane, for all, and only
  /// that one writes it: no lane is so far ahead that another one would read what comes later.
  KVJAX_HD void Move(const Place& to, const Place& from) const {
    if (to.single) {
      const uint32_t word = tile_.rank() == 0 ? Get(from, 0) : 0;
      return Write(Single(to), tile_.Shuffle(word, 0));
    }
    if (from.single) {
      if (tile_.rank() == 0) Put(to, 0, Read<uint32_t>(Single(from)));
      return;
    }
    const uint32_t n = Own(to);
    if (to.whole && from.whole) {
      const Operand in = Find(from), out = Find(to);
      constexpr uint32_t kAtOnce = 4;  // on their way from memory
      KVJAX_ROLLED
      for (uint32_t k = 0; k < n; k += kAtOnce) {
        Piece<uint32_t> some[kAtOnce] = {};
        for (uint32_t m = 0; m < kAtOnce; ++m) {
          if (k + m < n) some[m] = ReadPiece<uint32_t>(in, k + m);
        }
        for (uint32_t m = 0; m < kAtOnce; ++m) {
          if (k + m < n) Write(out.at + size_t{k + m} * out.step, some[m]);
        }
      }
      return;
    }
    KVJAX_ROLLED
    for (uint32_t k = 0; k < n; ++k) {
      const uint32_t begin = kPiece * (kSize * k + static_cast<uint32_t>(tile_.rank()));
      uint32_t words[kPiece];
      for (uint32_t e = 0; e < kPiece; ++e)
        words[e] = begin + e < static_cast<uint32_t>(to.width) ? Get(from, begin + e) : 0;
      for (uint32_t e = 0; e < kPiece; ++e) {
        if (begin + e < static_cast<uint32_t>(to.width)) Put(to, begin + e, words[e]);
      }
    }
  }

  KVJAX_HD void Pick(const Step& s) const {
    const auto index = Read<int32_t>(Single(s.arg[1]));
    const int32_t last = s.arg[0].width - 1, column = index < 0 ? 0 : index < last ? index : last;
    Write(Single(s.out), Get(s.arg[0], static_cast<uint32_t>(column)));
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
    const auto before = Read<uint32_t>(Single(s.arg[1]));  // columns
    const auto round = [&](float x, uint32_t c) {
      const float magnitude = __builtin_fabsf(x);
      const auto bits = std::bit_cast<uint32_t>(x);
      const uint32_t random = Mix32(Mix32(state ^ Mix32(before + c + 1)) + bits);
      auto rounded = std::bit_cast<float>((bits + (random & kTail)) & ~kTail);
      if constexpr (kHalf) {  // subnormal ones of the type are multiples of the smallest
        const float multiple = magnitude / 0x1p-24f, low = __builtin_floorf(multiple);
        const float up = static_cast<float>(random >> 8) * 0x1p-24f < multiple - low ? 1.0f : 0.0f;
        if (magnitude < 0x1p-14f) rounded = __builtin_copysignf((low + up) * 0x1p-24f, x);
      }
      return magnitude <= kLargest ? rounded : x;
    };
    if (s.out.single) return Write(Single(s.out), round(Read<float>(Single(s.arg[0])), 0));
    KVJAX_ROLLED
    for (uint32_t k = 0, n = Own(s.out); k < n; ++k) {
      const uint32_t begin = kPiece * (kSize * k + static_cast<uint32_t>(tile_.rank()));
      KVJAX_ROLLED
      for (uint32_t c = begin; c < begin + kPiece && c < static_cast<uint32_t>(s.out.width); ++c)
        Put(s.out, c, std::bit_cast<uint32_t>(round(std::bit_cast<float>(Get(s.arg[0], c)), c)));
    }
  }
  [[nodiscard]] KVJAX_HD static uint32_t Mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  KVJAX_HD void Run(const Step& s) const {
    switch (s.op) {
      case Opcode::k_load:
      case Opcode::k_store:
        return Move(s.out, s.arg[0]);
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
    const Operand out = Find(s.out);
    Operand arg[kMostOperands] = {};
    for (int32_t j = 0; j < kMostOperands; ++j) {
      if (j < s.arity) arg[j] = Find(s.arg[j]);
    }
    switch (s.op) {
#define KVJAX_MAP(name, arity, In, Out, expression) \
  case Opcode::k_##name:                            \
    return Map<instruction::name##_map, arity>(s, out, arg);
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  case Opcode::k_##name:                         \
    return Map<instruction::name##_map, static_cast<int32_t>(sizeof(kinds)) - 1>(s, out, arg);
#define KVJAX_REDUCE(name, T, zero, expression) \
  case Opcode::k_##name:                        \
    return Reduce<instruction::name##_reduce>(s, out);
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
  struct alignas(16) {
    std::byte* at;
    uint32_t unit;  // bytes of what places count there
  } spaces_[static_cast<size_t>(Space::kCount)];
};

}  // namespace kvjax::device
