// Control and Report: what a table keeps about itself in device memory, and what the device writes for the
// host.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/device/atomic.h"

namespace kvjax::device {

/// Why a call was not let in. The host learns of it once the device has come so far, and raises it then.
enum class Refusal : uint32_t {
  kNone,
  kStale,
  kWidth,
  kCanary,
  kMerged,
  kInitial,
  kUses,
  kLength,
  kLengths,
  kFull,
  kUnplanned
};

/// The sum over the lanes of a tile, which all of them get.
template <class Tile, class T>
KVJAX_HD T SumOfLanes(const Tile& tile, T mine) {
  T sum = 0;
  for (int lane = 0; lane < tile.size(); ++lane) sum += tile.Shuffle(mine, lane);
  return sum;
}

/// Counts that a table keeps, each divided over lines of memory so that not all tiles add to the same one;
/// the four tiles of a warp share a line, because the memory takes what they add to it together.
struct Counts {
  static constexpr uint32_t kLines = 16, kWords = 4;
  struct alignas(128) Line {
    uint64_t words[kWords];
  };
  Line lines[kLines];

  KVJAX_HD void Add(uint64_t tile, uint64_t amount) {
    if (amount != 0) device::Add(lines[tile / kWords % kLines].words[tile % kWords], amount);
  }
  KVJAX_HD void Set(uint64_t sum) {
    for (Line& line : lines) line = {};
    lines[0].words[0] = sum;
  }
  /// By the lanes of a tile together.
  template <class Tile>
  [[nodiscard]] KVJAX_HD uint64_t Sum(const Tile& tile) const {
    uint64_t mine = 0;
    for (uint32_t line = tile.rank(); line < kLines; line += tile.size()) {
      for (const uint64_t word : lines[line].words) mine += word;
    }
    return SumOfLanes(tile, mine);
  }
  [[nodiscard]] KVJAX_HD uint64_t Sum() const {
    uint64_t sum = 0;
    for (const Line& line : lines) {
      for (const uint64_t word : line.words) sum += word;
    }
    return sum;
  }
};

/// In device memory; kernels of one call after the other read and write it.
struct Control {
  uint32_t version;
  uint32_t open;  // whether the call under way is let in
  int64_t step;   // of the training write under way
  int64_t last_step;
  uint64_t size;       // rows
  uint32_t next_row;   // row ids in use are below this
  uint32_t free_rows;  // of the stack of row ids that may be used again
  uint32_t entering;   // rows that the call under way has made
  uint32_t leaving;    // rows that it has taken away
  uint32_t active;     // keys before the padding
  uint32_t window;     // of waiting keys, see AdmissionSpec
  uint32_t refusing;   // whether there is a refusal that has not been raised
  uint32_t wide;       // whether there has been a key that IsWide
  uint64_t inserted, removed, admitted, distinct, over_capacity;
  Counts cells_used;     // of the index: in use, or erased and still marked
  Counts waiting;        // keys without a row that are counted one by one
  Counts waiting_cells;  // of their index, as cells_used
  Counts hits, misses, occurrences, refused;

  /// Takes what is about the contents from the control of others, which replace them; what calls have counted
  /// goes on.
  void Replace(const Control& by) {
    size = by.size, next_row = by.next_row, free_rows = by.free_rows;
    last_step = by.last_step, wide = by.wide, cells_used = by.cells_used;
    window = by.window, waiting = by.waiting, waiting_cells = by.waiting_cells;
  }
};

/// In memory that both sides see. The device alone writes it: words that both sides changed would need atomic
/// operations over the bus, which not every machine has. The host reads without waiting, and again if
/// `begun` says that what it has read is of two writes.
struct Report {
  uint32_t begun;
  uint64_t size;
  uint64_t cells_used;
  uint64_t waiting, waiting_cells;
  uint32_t next_row;
  uint32_t free_rows;
  uint32_t write;  // the last write that is in it
  uint32_t version;
  uint32_t refusals;  // how many there have been; the last one is
  uint32_t refusal;
  uint32_t op;  // an Op, of the refused call
  uint32_t got, want;
};

/// A call as its kernels know it.
struct CallView {
  Control* control;
  Report* report;
  const uint32_t* version;       // of the handle; nullptr for a read of whatever is live
  uint32_t op;                   // an Op
  bool narrow;                   // its keys had 32 bits
  uint32_t* refusing = nullptr;  // as Control::refusing, where the report is not the table's
  bool planned = false;          // of a write: another version than the live one says to do nothing

  /// Reports a refusal to the host; the first one is kept until it has been raised. A call may have a million
  /// lanes that come here, so all but one find that out in the device's own memory.
  KVJAX_HD void Refuse(Refusal why, uint32_t got, uint32_t want) const {
    if (planned && *version != control->version) return;
    uint32_t &taken = refusing != nullptr ? *refusing : control->refusing, none = 0;
    if (Load(taken) != 0 || !Exchange(taken, none, 1u)) return;
    StoreForHost(report->refusal, static_cast<uint32_t>(why));
    StoreForHost(report->op, op);
    StoreForHost(report->got, got);
    StoreForHost(report->want, want);
    FenceForHost();
    StoreForHost(report->refusals, report->refusals + 1);
  }
  /// Whether a read is let in; `first` says that this lane may report to the host.
  [[nodiscard]] KVJAX_HD bool Current(bool first) const {
    const bool current = version == nullptr || *version == control->version,
               fits = !(narrow && control->wide != 0);
    if (first && !current) Refuse(Refusal::kStale, *version, control->version);
    if (first && current && !fits) Refuse(Refusal::kWidth, 0, 0);
    return current && fits;
  }
  /// Refuses the write under way: kernels from the next one on do nothing.
  KVJAX_HD void Close(Refusal why, uint32_t got, uint32_t want) const {
    if (Load(control->open) != 0) Store(control->open, 0u);
    Refuse(why, got, want);
  }
  [[nodiscard]] KVJAX_HD bool open() const { return control->open != 0; }
};

}  // namespace kvjax::device
