// A lane of a tile that runs a row program on several rows at once.
//
// Each lane has the same pieces of all registers of a row. So lanes meet only where a row becomes one
// element, where a part of one changes its place, and where what one lane has of a row, its single elements,
// is written or read.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/half.h"
#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/rounding.h"
#include "kvjax/ffi/device/instructions.h"
#include "kvjax/ffi/device/lane_rows.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/steps.h"

namespace kvjax::device {

struct ProgramView {
  const Step* steps;
  const uint64_t* shared;
  Dealing dealing;
  int32_t initials, all;  // steps
  uint64_t seed;          // of stochastic rounding
};

/// One lane of a tile that has rows. It has every so-many-th piece of the vectors of some of them, and the
/// single elements of one.
template <class Tile>
class Lane {
 public:
  /// memory: at least Steps::BytesOf(rows) for each lane. step: of the table. row: of this lane; there is
  /// none without a value.
  KVJAX_HD Lane(const ProgramView& p, const Tile& tile, const LaneMemory& memory, int64_t step,
                const RowPlaces& row)
      : p_(p), tile_(tile), in_(p.dealing, tile, memory, p.shared, row), step_(step) {}

  /// fresh: whether the row of this lane has no slots yet, which the program then makes.
  KVJAX_HD void Run(bool fresh) const {
    uint32_t rows = in_.Which(fresh) & in_.all();  // in which steps run now, a bit each
    if (in_.all() == 0) return;
    for (int32_t at = rows != 0 ? 0 : p_.initials; at < p_.all; ++at) {
      if (at == p_.initials) rows = in_.all();
      const Step& s = p_.steps[at];
      if (s.op == Opcode::k_loop) WriteAt(in_.Single(s.out, in_.rank()), rows);
      if (s.op == Opcode::k_again) at = s.to;
      if (s.op == Opcode::k_leave) {
        rows &= in_.Which(in_.Has(rows) && ReadAt<int32_t>(in_.Single(s.arg[0], in_.rank())) != 0);
        if (rows == 0) rows = ReadAt<uint32_t>(in_.Single(s.out, in_.rank())), at = s.to;
      }
      if (s.meets) tile_.Sync();
      Run(s, rows);
      if (s.meets) tile_.Sync();
    }
    tile_.Sync();  // before other rows have the memory
  }

 private:
  static constexpr uint32_t kPiece = Place::kPiece, kAtOnce = LaneRows<Tile>::kAtOnce;

  template <class F, int32_t kArity>
  KVJAX_HD void Map(const Step& s, uint32_t rows) const {
    using In = typename F::In;
    using Out = typename F::Out;
    if (s.out.single) {
      if (!in_.Has(rows)) return;
      const auto read = [&](int32_t j) {
        return j < kArity ? ReadAt<In>(in_.Single(s.arg[j], in_.rank())) : In();
      };
      return WriteAt<Out>(in_.Single(s.out, in_.rank()), F::Of(read(0), read(1), read(2), read(3), read(4)));
    }
    if constexpr (sizeof(In) == sizeof(float) && sizeof(Out) == sizeof(float)) {
      const Operand out = in_.Find(s.out);
      Operand arg[kArity];
      for (int32_t j = 0; j < kArity; ++j) arg[j] = in_.Find(s.arg[j]);
      Piece<In> in[kAtOnce][kMostOperands] = {};
      std::byte* to[kAtOnce];
      in_.EachPiece(
          rows, in_.Pieces(s.out),
          [&](auto m, uint32_t turn, uint32_t k) {
            for (int32_t j = 0; j < kArity; ++j) in[m][j] = arg[j].template ReadPiece<In>(turn, k);
            to[m] = out.Of(turn, k);
          },
          [&](auto m) {
            const Piece<In>* const x = in[m];
            Piece<Out> made;
            for (uint32_t e = 0; e < kPiece; ++e)
              made.x[e] = F::Of(x[0].x[e], x[1].x[e], x[2].x[e], x[3].x[e], x[4].x[e]);
            WriteAt(to[m], made);
          });
    }
  }
  /// In the order of the CPU's kernels: sixteen sums, which are then added in pairs. So lanes add elements of
  /// each other's pieces, one row after the other.
  template <class F>
  KVJAX_HD void Reduce(const Step& s, uint32_t rows) const {
    KVJAX_ROLLED
    for (uint32_t r = 0; r < in_.rows(); ++r) {
      if ((rows >> r & 1) == 0) continue;
      const auto sum = Sum<F>(s.arg[0], r);
      if (in_.rank() == r) WriteAt(in_.Single(s.out, r), sum);
    }
  }
  template <class F>
  [[nodiscard]] KVJAX_HD typename F::T Sum(const Place& in, uint32_t r) const {
    using T = typename F::T;
    constexpr int32_t kSums = 16, kLanes = Tile::size(), kOwn = kSums / kLanes;
    static_assert(kOwn * kLanes == kSums);
    const int32_t rank = tile_.rank();
    T sum[kOwn];
    for (T& x : sum) x = F::Zero();
    KVJAX_ROLLED
    for (int32_t c = rank; c < in.width; c += kSums) {
      for (int32_t m = 0; m < kOwn; ++m) {
        const int32_t column = c + m * kLanes;
        if (column < in.width)
          sum[m] = F::Of(sum[m], ReadAt<T>(in_.Element(in, r, static_cast<uint32_t>(column), sizeof(T))));
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
    return tile_.Shuffle(sum[0], 0);
  }

  [[nodiscard]] KVJAX_HD static uint32_t ItemOf(Place::Type type) {
    return type == Place::Type::kWord ? 4 : type == Place::Type::kBool ? 1 : 2;
  }
  [[nodiscard]] KVJAX_HD uint32_t Get(const Place& place, uint32_t r, uint32_t i) const {
    const Place::Type type = place.type;
    const std::byte* const from = in_.Element(place, r, i, ItemOf(type));
    if (type == Place::Type::kWord) return ReadAt<uint32_t>(from);
    if (type == Place::Type::kBool) return *from != std::byte{0} ? 1 : 0;
    const auto half = ReadAt<uint16_t>(from);
    return std::bit_cast<uint32_t>(type == Place::Type::kBFloat16 ? FromBFloat16(half) : FromFloat16(half));
  }
  KVJAX_HD void Put(const Place& place, uint32_t r, uint32_t i, uint32_t word) const {
    const Place::Type type = place.type;
    std::byte* const to = in_.Element(place, r, i, ItemOf(type));
    if (type == Place::Type::kWord) return WriteAt(to, word);
    if (type == Place::Type::kBool) return WriteAt(to, word != 0 ? std::byte{1} : std::byte{0});
    const auto x = std::bit_cast<float>(word);
    WriteAt(to, type == Place::Type::kBFloat16 ? ToBFloat16(x) : ToFloat16(x));
  }

  /// Elements from one place to another. A single one of a row is read and written by its lane.
  KVJAX_HD void Move(const Place& to, const Place& from, uint32_t rows) const {
    if (to.single || from.single) {
      if (!in_.Has(rows)) return;
      if (to.single) return WriteAt(in_.Single(to, in_.rank()), Get(from, in_.rank(), 0));
      return Put(to, in_.rank(), 0, ReadAt<uint32_t>(in_.Single(from, in_.rank())));
    }
    const uint32_t n = in_.Pieces(to);
    if (to.whole && from.whole) {
      const Operand in = in_.Find(from), out = in_.Find(to);
      Piece<uint32_t> some[kAtOnce];
      std::byte* there[kAtOnce];
      return in_.EachPiece(
          rows, n,
          [&](auto m, uint32_t turn, uint32_t k) {
            some[m] = in.template ReadPiece<uint32_t>(turn, k);
            there[m] = out.Of(turn, k);
          },
          [&](auto m) { WriteAt(there[m], some[m]); });
    }
    in_.Own(rows, [&](uint32_t, uint32_t r) {
      KVJAX_ROLLED
      for (uint32_t k = 0; k < n; ++k) {
        const uint32_t begin = in_.Column(k);
        uint32_t words[kPiece];
        for (uint32_t e = 0; e < kPiece; ++e)
          words[e] = begin + e < static_cast<uint32_t>(to.width) ? Get(from, r, begin + e) : 0;
        for (uint32_t e = 0; e < kPiece; ++e) {
          if (begin + e < static_cast<uint32_t>(to.width)) Put(to, r, begin + e, words[e]);
        }
      }
    });
  }

  KVJAX_HD void Pick(const Step& s, uint32_t rows) const {
    if (!in_.Has(rows)) return;
    const auto index = ReadAt<int32_t>(in_.Single(s.arg[1], in_.rank()));
    const int32_t last = s.arg[0].width - 1, column = index < 0 ? 0 : index < last ? index : last;
    WriteAt(in_.Single(s.out, in_.rank()), Get(s.arg[0], in_.rank(), static_cast<uint32_t>(column)));
  }

  template <bool kHalf>
  KVJAX_HD void Stochastic(const Step& s, uint32_t rows) const {
    if (s.out.single) {
      if (!in_.Has(rows)) return;
      const uint32_t r = in_.rank(), before = ReadAt<uint32_t>(in_.Single(s.arg[1], r));  // columns
      const auto x = ReadAt<float>(in_.Single(s.arg[0], r));
      return WriteAt(in_.Single(s.out, r), RoundedAtRandom<kHalf>(StateOf(r), before, x));
    }
    in_.Own(rows, [&](uint32_t, uint32_t r) {
      const uint32_t state = StateOf(r), before = ReadAt<uint32_t>(in_.Single(s.arg[1], r));
      KVJAX_ROLLED
      for (uint32_t k = 0, n = in_.Pieces(s.out); k < n; ++k) {
        const uint32_t begin = in_.Column(k);
        KVJAX_ROLLED
        for (uint32_t c = begin; c < begin + kPiece && c < static_cast<uint32_t>(s.out.width); ++c) {
          const auto x = std::bit_cast<float>(Get(s.arg[0], r, c));
          Put(s.out, r, c, std::bit_cast<uint32_t>(RoundedAtRandom<kHalf>(state, before + c, x)));
        }
      }
    });
  }
  /// Of a row in this step.
  [[nodiscard]] KVJAX_HD uint32_t StateOf(uint32_t r) const {
    return RandomState(p_.seed, step_, in_.Key(r));
  }

  KVJAX_INLINE KVJAX_HD void Run(const Step& s, uint32_t rows) const {
    switch (s.op) {
      case Opcode::k_load:
      case Opcode::k_store:
        return Move(s.out, s.arg[0], rows);
      case Opcode::k_pick:
        return Pick(s, rows);
      case Opcode::k_stochastic_bfloat16:
        return Stochastic<false>(s, rows);
      case Opcode::k_stochastic_float16:
        return Stochastic<true>(s, rows);
      case Opcode::k_loop:  // where a program goes on is above
      case Opcode::k_leave:
      case Opcode::k_again:
        return;
#define KVJAX_MAP(name, arity, In, Out, expression) \
  case Opcode::k_##name:                            \
    return Map<instruction::name##_map, arity>(s, rows);
#define KVJAX_FUSED(name, kinds, In, Out, calls) \
  case Opcode::k_##name:                         \
    return Map<instruction::name##_map, static_cast<int32_t>(sizeof(kinds)) - 1>(s, rows);
#define KVJAX_REDUCE(name, T, zero, expression) \
  case Opcode::k_##name:                        \
    return Reduce<instruction::name##_reduce>(s, rows);
#define KVJAX_MOVE(name, arity)
        KVJAX_INSTRUCTIONS(KVJAX_MAP, KVJAX_MAP, KVJAX_REDUCE, KVJAX_MOVE, KVJAX_FUSED)
#undef KVJAX_MOVE
#undef KVJAX_MAP
#undef KVJAX_FUSED
#undef KVJAX_REDUCE
      default:  // no other is in a program
        return;
    }
  }

  const ProgramView& p_;
  const Tile& tile_;
  LaneRows<Tile> in_;
  int64_t step_;
};

}  // namespace kvjax::device
