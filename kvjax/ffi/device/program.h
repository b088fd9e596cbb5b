// Row programs on a device: one kernel runs an update on the rows of a step, where they lie.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/device/lane.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/training_kernels.h"

namespace kvjax::device {

/// How many tiles n rows are.
inline size_t TilesOf(size_t n, size_t rows_each) { return (n + rows_each - 1) / rows_each; }

/// The program in memory of the queue, for the calls that follow, and memory for the registers of n rows.
/// shared: in device memory.
template <class Q>
class DeviceProgram {
 public:
  DeviceProgram(Q& q, const Steps& steps, const uint64_t* shared, uint64_t seed, size_t n)
      : DeviceProgram(q, steps, shared, seed, n, RowsOf(q, steps, n)) {}
  [[nodiscard]] const ProgramView& view() const { return view_; }
  [[nodiscard]] TileMemoryView registers() const { return registers_.view(); }

 private:
  DeviceProgram(Q& q, const Steps& steps, const uint64_t* shared, uint64_t seed, size_t n, size_t rows)
      : steps_(q, steps.all().size()),
        registers_(q, steps.BytesOf(rows), TilesOf(n, rows) * Q::Tile::size()),
        view_{steps_.data(),
              shared,
              steps.DealingOf(rows),
              static_cast<int32_t>(steps.initials()),
              static_cast<int32_t>(steps.all().size()),
              seed} {
    WriteFromHost(q, steps_.data(), steps.all().data(), steps.all().size());
  }
  /// As many of n rows to a tile as it has lanes, or fewer where more tiles are wanted to keep a device busy.
  static size_t RowsOf(const Q& q, const Steps& steps, size_t n) {
    size_t rows = Q::Tile::size();
    while (rows > 1 && !q.KeepBusy(TilesOf(n, rows), steps.BytesOf(rows))) rows /= 2;
    return rows;
  }
  Scratch<Q, Step> steps_;
  TileMemory<Q> registers_;
  ProgramView view_;
};

/// The rows of a step, and their gradients.
struct StepView {
  TargetsView rows;
  const uint64_t* keys;          // (n,)
  const float* gradients;        // (n, dim)
  const float* shared_gradient;  // of the row of the next
  uint64_t shared_key;
  const RowFacts* facts;  // (n,), or nullptr if nobody wants them
  const uint32_t* step;   // two words
  bool slots;             // whether rows have any
};

/// Updates the rows of a step; n is how many it has at most, and dim how many elements a gradient.
template <class Q>
void RunProgram(Q& q, const DeviceProgram<Q>& program, const StepView& step, size_t dim, size_t n) {
  const ProgramView p = program.view();
  const uint32_t each = p.dealing.rows;
  q.Tiles(TilesOf(n, each) * Q::Tile::size(), program.registers(),
          [=] KVJAX_HD(typename Q::Tile tile, size_t i, LaneMemory memory) {
            const auto rank = static_cast<uint32_t>(tile.rank());
            const size_t at = i / tile.size() * each + rank;
            const uint32_t row = rank < each ? step.rows.Row(at) : kNoRow;
            const bool has = row != kNoRow;
            RowPlaces places = {};
            bool fresh = false;
            if (has) {
              const uint32_t gradient = step.rows.targets[2 * at + 1];
              const bool shared = gradient == ApplyTarget::kSharedGradient;
              places = {step.rows.in.Value(row), step.slots ? step.rows.in.Slots(row) : nullptr,
                        shared ? step.shared_gradient : step.gradients + gradient * dim,
                        step.facts != nullptr ? step.facts + at : nullptr,
                        shared ? step.shared_key : step.keys[at]};
              fresh = step.rows.in.Header(row).has_slots == 0;
            }
            const auto now = static_cast<int64_t>(GetWords(step.step));
            const Lane<typename Q::Tile> lane(p, tile, memory, now, places);
            lane.Run(fresh);
            if (has && step.slots) step.rows.in.Header(row).has_slots = 1;
          });
}

}  // namespace kvjax::device
