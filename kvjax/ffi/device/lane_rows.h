// The rows of a tile, as one of its lanes has them: its pieces of some, the single elements of one, and where
// all that is.
//
// The memory of a lane has words about its row first, then the scalars of that row, then its pieces of the
// registers of those rows of which it has some. Lanes lie side by side in each.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/steps.h"

namespace kvjax::device {

/// Where the parts of a row are. Every row has a value; others may be nullptr.
struct RowPlaces {
  std::byte *value, *slots;
  const float* gradient;
  const RowFacts* facts;
  uint64_t key;
};

/// Four elements of a row that follow each other.
template <class T>
struct alignas(Place::kPiece * sizeof(T)) Piece {
  T x[Place::kPiece];
};

/// At a multiple of its size; on the host, where rows need not lie so, anywhere.
template <class T>
[[nodiscard]] KVJAX_HD T ReadAt(const std::byte* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const T*>(from);
#else
  T x;
  memcpy(&x, from, sizeof(T));
  return x;
#endif
}
template <class T>
KVJAX_HD void WriteAt(std::byte* to, const T& x) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<T*>(to) = x;
#else
  memcpy(to, &x, sizeof(T));
#endif
}

/// Where a word says.
[[nodiscard]] KVJAX_HD inline std::byte* AddressAt(const std::byte* word) {
  return reinterpret_cast<std::byte*>(ReadAt<uint64_t>(word));
}

/// What a lane has of an operand: its pieces, or single elements of rows. Its rows are counted by turns: in
/// each it has pieces of one.
struct Operand {
  std::byte* at;   // in the first turn; or of the word that says where it is
  uint32_t turn;   // bytes to that of the next turn
  uint32_t begin;  // where a word says where it is, bytes from there on
  uint32_t step;   // bytes to the next piece
  bool single, apart;

  [[nodiscard]] KVJAX_HD std::byte* Of(uint32_t t, uint32_t k) const {
    std::byte* const there = at + size_t{t} * turn;
    return (apart ? AddressAt(there) + begin : there) + size_t{k} * step;
  }
  template <class T>
  [[nodiscard]] KVJAX_HD Piece<T> ReadPiece(uint32_t t, uint32_t k) const {
    if (!single) return ReadAt<Piece<T>>(Of(t, k));
    const T x = ReadAt<T>(Of(t, 0));
    return {{x, x, x, x}};
  }
};

template <class Tile>
class LaneRows {
 public:
  static constexpr uint32_t kPiece = Place::kPiece;
  /// Pieces that are on their way from memory at once. More of them take registers that are worth more.
  static constexpr uint32_t kAtOnce = 2;

  /// memory: at least Steps::BytesOf(rows) for each lane. row: of this lane; there is none without a value.
  KVJAX_HD LaneRows(const Dealing& dealing, const Tile& tile, const LaneMemory& memory,
                    const uint64_t* shared, const RowPlaces& row)
      : dealing_(dealing),
        tile_(tile),
        shared_(shared),
        memory_(memory.begin),
        lanes_(memory.lanes),
        first_(memory.lane - rank()),
        each_(kSize / dealing.lanes),
        own_(rank() / dealing.lanes),
        share_(rank() % dealing.lanes) {
    const uint64_t words[Dealing::kRowWords] = {Address(row.value), Address(row.slots), Address(row.gradient),
                                                Address(row.facts), row.key};
    for (uint32_t w = 0; w < Dealing::kRowWords; ++w) WriteAt(Word(w, rank()), words[w]);
    all_ = Which(row.value != nullptr);
    tile_.Sync();
  }

  [[nodiscard]] KVJAX_HD uint32_t rank() const { return static_cast<uint32_t>(tile_.rank()); }
  /// How many rows a tile has at most, and which there are, a bit each.
  [[nodiscard]] KVJAX_HD uint32_t rows() const { return dealing_.rows; }
  [[nodiscard]] KVJAX_HD uint32_t all() const { return all_; }
  /// Whether the row of this lane is one of these.
  [[nodiscard]] KVJAX_HD bool Has(uint32_t rows) const { return (rows >> rank() & 1) != 0; }
  /// The lanes that say yes, a bit each, for all of them.
  [[nodiscard]] KVJAX_HD uint32_t Which(bool yes) const {
    uint32_t all = 0;
    for (uint32_t l = 0; l < kSize; ++l) all |= tile_.Shuffle(yes ? 1u : 0u, static_cast<int>(l)) << l;
    return all;
  }

  /// Calls f(turn, row) for those of these rows of which this lane has pieces, one in each turn.
  template <class F>
  KVJAX_HD void Own(uint32_t rows, F f) const {
    KVJAX_ROLLED
    for (uint32_t turn = 0, r = own_; r < dealing_.rows; ++turn, r += each_) {
      if ((rows >> r & 1) != 0) f(turn, r);
    }
  }
  /// For several at a time of the n pieces that it has of each of them, calls read(m, turn, k) and then
  /// write(m), where m counts these: so that several are on their way from memory.
  template <class ReadOne, class WriteOne>
  KVJAX_HD void EachPiece(uint32_t rows, uint32_t n, ReadOne read, WriteOne write) const {
    if (n == 0) return;
    KVJAX_ROLLED
    for (uint32_t turn = 0, r = own_, k = 0; r < dealing_.rows;) {
      const auto several = [&]<uint32_t... kM>(std::integer_sequence<uint32_t, kM...>) {
        bool there[kAtOnce];
        const auto read_one = [&](auto m) {
          there[m] = r < dealing_.rows && (rows >> r & 1) != 0;
          if (there[m]) read(m, turn, k);
          if (++k == n) k = 0, ++turn, r += each_;
        };
        (read_one(std::integral_constant<uint32_t, kM>()), ...);
        ((there[kM] ? write(std::integral_constant<uint32_t, kM>()) : void()), ...);
      };
      several(std::make_integer_sequence<uint32_t, kAtOnce>());
    }
  }
  /// How many pieces it has of each of them.
  [[nodiscard]] KVJAX_HD uint32_t Pieces(const Place& place) const {
    const uint32_t all = (static_cast<uint32_t>(place.width) + kPiece - 1) / kPiece;
    return (all + dealing_.lanes - 1 - share_) / dealing_.lanes;
  }

  /// Where a place of row r begins that is no vector.
  [[nodiscard]] KVJAX_HD std::byte* Single(const Place& place, uint32_t r) const {
    if (place.space == Space::kScalars) return Word(Dealing::kRowWords + place.begin, r);
    if (place.space == Space::kShared) return Shared() + place.begin;
    return AddressAt(Word(static_cast<uint32_t>(place.space), r)) + place.begin;
  }
  /// Of a place that is single or whole.
  [[nodiscard]] KVJAX_HD Operand Find(const Place& place) const {
    const auto space = static_cast<uint32_t>(place.space);
    switch (place.space) {
      case Space::kVectors:
        return {.at = Vector(place.begin, 0, rank()),
                .turn = kBytes * dealing_.pieces * lanes_,
                .begin = 0,
                .step = kBytes * lanes_,
                .single = false,
                .apart = false};
      case Space::kScalars:
        return {.at = Single(place, own_),
                .turn = kWord * each_,
                .begin = 0,
                .step = 0,
                .single = true,
                .apart = false};
      case Space::kShared:
        return {
            .at = Shared() + place.begin, .turn = 0, .begin = 0, .step = 0, .single = true, .apart = false};
      default:
        return {.at = Word(space, own_),
                .turn = kWord * each_,
                .begin = place.begin + kBytes * share_,
                .step = kBytes * dealing_.lanes,
                .single = false,
                .apart = true};
    }
  }
  /// Any element of a place of row r, whichever lane has it.
  [[nodiscard]] KVJAX_HD std::byte* Element(const Place& place, uint32_t r, uint32_t i, uint32_t item) const {
    if (place.space != Space::kVectors) return Single(place, r) + size_t{i} * item;
    const uint32_t element = place.first + i, piece = element / kPiece, lanes = dealing_.lanes;
    return Vector(place.begin + piece / lanes, r / each_, r % each_ * lanes + piece % lanes) +
           sizeof(float) * (element % kPiece);
  }
  /// The key of row r.
  [[nodiscard]] KVJAX_HD uint64_t Key(uint32_t r) const { return ReadAt<uint64_t>(Word(Dealing::kKey, r)); }
  /// The column at which its piece k of a row begins.
  [[nodiscard]] KVJAX_HD uint32_t Column(uint32_t k) const { return kPiece * (dealing_.lanes * k + share_); }

 private:
  using Space = Place::Space;
  static constexpr uint32_t kBytes = kPiece * sizeof(float), kSize = Tile::size(), kWord = sizeof(uint64_t);

  template <class T>
  [[nodiscard]] KVJAX_HD static uint64_t Address(T* at) {
    return reinterpret_cast<uintptr_t>(at);
  }
  /// A word of lane l of this tile.
  [[nodiscard]] KVJAX_HD std::byte* Word(uint32_t w, uint32_t l) const {
    return memory_ + kWord * (w * lanes_ + first_ + l);
  }
  /// The piece of a vector that lane l has at this place, of its row of a turn.
  [[nodiscard]] KVJAX_HD std::byte* Vector(uint32_t at, uint32_t turn, uint32_t l) const {
    const uint32_t before = kWord * lanes_ * (Dealing::kRowWords + dealing_.scalars);
    return memory_ + before + size_t{kBytes} * ((turn * dealing_.pieces + at) * lanes_ + first_ + l);
  }
  [[nodiscard]] KVJAX_HD std::byte* Shared() const {  // which nothing writes
    return reinterpret_cast<std::byte*>(const_cast<uint64_t*>(shared_));
  }

  const Dealing& dealing_;
  const Tile& tile_;
  const uint64_t* shared_;
  std::byte* memory_;
  uint32_t lanes_, first_;  // that share it, and the first of the tile
  uint32_t each_, own_;     // rows of a turn, and which of these is its own
  uint32_t share_;          // its number among the lanes that share that row
  uint32_t all_ = 0;
};

}  // namespace kvjax::device
