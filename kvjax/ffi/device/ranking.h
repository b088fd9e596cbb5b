// Rankings on the device: the rows that come first, found by counting them by the digits of their ranks,
// from the highest on. Nothing is sorted; until few rows are left to decide about, nothing is listed.
//
// Source: radix selection (Knuth, The Art of Computer Programming 3, 5.2.5 and 5.3.3), as in core/select.h.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/atomic.h"

namespace kvjax::device {

/// Where a row stands: its order in the ranking and, among equals, the hash of its key. No two are equal.
using Rank = unsigned __int128;

/// The state of a ranking, in device memory.
struct Ranking {
  enum class List : uint32_t { kNone, kFilling, kFilled };
  static constexpr uint32_t kUnknown = 129;

  uint64_t least, most;  // orders of the rows that may be evicted
  uint64_t order, hash;  // the last rank that is taken, with its order counted from `least`
  uint64_t wanted;       // so many of the open rows are taken: those whose first bits are the last rank's
  uint64_t listed;
  uint32_t open_bits;  // of ranks, that are still to be decided; kUnknown before the first digit
  uint32_t takes_none;
  List list;  // of the open rows, once they are few

  KVJAX_HD void Begin(uint64_t n) {
    *this = {.least = ~uint64_t{0},
             .most = 0,
             .order = 0,
             .hash = 0,
             .wanted = n,
             .listed = 0,
             .open_bits = n == 0 ? 0 : kUnknown,
             .takes_none = n == 0 ? 1u : 0u,
             .list = List::kNone};
  }
  [[nodiscard]] KVJAX_HD Rank RankOf(uint64_t row_order, uint64_t row_hash) const {
    return Rank{row_order - least} << 64 | row_hash;
  }
  [[nodiscard]] KVJAX_HD Rank last() const { return Rank{order} << 64 | hash; }
  KVJAX_HD void SetLast(Rank rank) {
    order = static_cast<uint64_t>(rank >> 64);
    hash = static_cast<uint64_t>(rank);
  }
  /// Whether the row is among the first, once all is decided.
  [[nodiscard]] KVJAX_HD bool Takes(uint64_t row_order, uint64_t row_hash) const {
    return takes_none == 0 && RankOf(row_order, row_hash) <= last();
  }
  [[nodiscard]] KVJAX_HD uint32_t OpenBits() const {
    return open_bits != kUnknown ? open_bits : 64 + (most < least ? 0 : BitWidth(most - least));
  }
};

/// Decides a ranking, digit by digit; see CountBins of the queues. rows(cell, order, hash) says whether the
/// row of a cell may be evicted, and where it stands.
template <class Rows>
struct RankDigits {
  static constexpr uint32_t kDigit = 11, kBins = 1u << kDigit;
  static constexpr uint64_t kList = uint64_t{1} << 16;

  Ranking* ranking;
  uint64_t* list;  // space for kList cells
  uint64_t cells;
  Rows rows;

  [[nodiscard]] KVJAX_HD uint64_t size() const {
    if (ranking->open_bits == 0) return 0;
    return ranking->list == Ranking::List::kFilled ? ranking->listed : cells;
  }
  KVJAX_HD uint32_t operator()(uint64_t i) const {
    const uint64_t cell = ranking->list == Ranking::List::kFilled ? list[i] : i;
    uint64_t order, hash;
    if (!rows(cell, order, hash)) return kBins;
    const Rank rank = ranking->RankOf(order, hash);
    const uint32_t bits = ranking->OpenBits(), low = Low(bits);
    if ((rank ^ ranking->last()) >> 1 >> (bits - 1) != 0) return kBins;  // two shifts, as one is below 128
    if (ranking->list == Ranking::List::kFilling) list[Add(ranking->listed, uint64_t{1})] = cell;
    return static_cast<uint32_t>(rank >> low) & ((1u << (bits - low)) - 1);
  }
  [[nodiscard]] KVJAX_HD uint64_t wanted() const { return ranking->wanted; }

  /// There are no more open rows than are wanted, which can only be found at the first digit.
  KVJAX_HD void SettleAll() const {
    ranking->SetLast(~Rank{0});
    ranking->open_bits = 0;
  }
  /// Of the bin, which has `count` rows, some are taken, and all `before` rows of those before.
  KVJAX_HD void Settle(uint32_t bin, uint64_t before, uint64_t count) const {
    const uint32_t low = Low(ranking->OpenBits());
    Rank last = ranking->last() | Rank{bin} << low;
    ranking->wanted -= before;
    const bool done = ranking->wanted == count;  // the whole bin, be its other digits what they may
    if (done) last |= (Rank{1} << low) - 1;
    ranking->SetLast(last);
    ranking->open_bits = done ? 0 : low;
    if (ranking->list == Ranking::List::kFilling) {
      ranking->list = Ranking::List::kFilled;
    } else if (ranking->list == Ranking::List::kNone && count <= kList) {
      ranking->list = Ranking::List::kFilling;
    }
  }

 private:
  KVJAX_HD static uint32_t Low(uint32_t bits) { return bits > kDigit ? bits - kDigit : 0; }
};

}  // namespace kvjax::device
