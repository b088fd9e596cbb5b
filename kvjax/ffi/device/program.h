// Row programs on a device: one kernel runs an update on the rows of a step, where they lie.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/device/lane.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/training_kernels.h"

namespace kvjax::device {

/// The program in memory of the queue, for the calls that follow. shared: in device memory; lanes: that share
/// the memory of its registers.
template <class Q>
class DeviceProgram {
 public:
  DeviceProgram(Q& q, const Program& p, const SlotLayout& layout, const uint64_t* shared, uint64_t seed,
                size_t lanes)
      : steps_(q, p.initial.size() + p.update.size()),
        view_{steps_.data(),
              shared,
              p.scalars,
              static_cast<int32_t>(p.initial.size()),
              static_cast<int32_t>(p.initial.size() + p.update.size()),
              seed} {
    const std::vector<Step> steps = Steps(p, layout, Q::Tile::size(), lanes).All();
    WriteFromHost(q, steps_.data(), steps.data(), steps.size());
  }
  [[nodiscard]] const ProgramView& view() const { return view_; }

 private:
  Scratch<Q, Step> steps_;
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

/// Memory for the registers of the rows of a step, n of them at most.
template <class Q>
TileMemory<Q> RegistersFor(Q& q, const Program& p, size_t n) {
  return TileMemory<Q>(q, Steps::BytesFor(p, Q::Tile::size()), n * Q::Tile::size());
}

/// Updates the rows of a step; n is how many it has at most, and dim how many elements a gradient.
template <class Q>
void RunProgram(Q& q, const ProgramView& p, const StepView& step, const TileMemory<Q>& registers, size_t dim,
                size_t n) {
  q.Tiles(n * Q::Tile::size(), registers.view(),
          [=] KVJAX_HD(typename Q::Tile tile, size_t i, LaneMemory memory) {
            const size_t at = i / tile.size();
            const uint32_t row = step.rows.Row(at);
            if (row == kNoRow) return;
            const uint32_t gradient = step.rows.targets[2 * at + 1];
            const bool shared = gradient == ApplyTarget::kSharedGradient;
            RowHeader& header = step.rows.in.Header(row);
            const RowPlaces places{step.rows.in.Value(row),
                                   step.slots ? step.rows.in.Slots(row) : nullptr,
                                   shared ? step.shared_gradient
                                          : step.gradients + gradient * dim,
                                   step.facts != nullptr ? step.facts + at : nullptr,
                                   shared ? step.shared_key : step.keys[at],
                                   static_cast<int64_t>(uint64_t{step.step[1]} << 32 | step.step[0])};
            const Lane<typename Q::Tile> lane(p, tile, memory, places);
            lane.Run(/*fresh=*/tile.Shuffle(static_cast<uint32_t>(header.has_slots), 0) == 0);
            if (step.slots && tile.rank() == 0) header.has_slots = 1;
          });
}

}  // namespace kvjax::device
