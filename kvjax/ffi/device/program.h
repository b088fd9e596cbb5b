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

/// The program in memory of the queue, for the calls that follow. shared: in device memory.
template <class Q>
class DeviceProgram {
 public:
  DeviceProgram(Q& q, const Program& p, const SlotLayout& layout, const uint64_t* shared, uint64_t seed)
      : program_(p),
        fields_(q, p.fields.size()),
        initial_(q, p.initial.size()),
        update_(q, p.update.size()),
        shared_(shared),
        seed_(seed) {
    std::vector<FieldView> fields;
    for (const Field& field : p.fields) fields.push_back(FieldView::Of(field, layout, p.dim));
    WriteFromHost(q, fields_.data(), fields.data(), fields.size());
    WriteFromHost(q, initial_.data(), p.initial.data(), p.initial.size());
    WriteFromHost(q, update_.data(), p.update.data(), p.update.size());
  }
  [[nodiscard]] ProgramView view() const {
    const auto size = [](const auto& list) { return static_cast<int32_t>(list.size()); };
    return {fields_.data(),        initial_.data(),
            update_.data(),        shared_,
            program_.dim,          program_.vectors,
            program_.scalars,      size(program_.initial),
            size(program_.update), seed_};
  }

 private:
  const Program& program_;
  Scratch<Q, FieldView> fields_;
  Scratch<Q, Instruction> initial_, update_;
  const uint64_t* shared_;
  uint64_t seed_;
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

/// Memory for the registers of as many rows as are computed at a time.
template <class Q>
class RegisterScratch {
 public:
  RegisterScratch(Q& q, const Program& p, size_t n)
      : tiles_(TilesFor(p, n)),
        vectors_(q, tiles_ * static_cast<size_t>(p.vectors) * static_cast<size_t>(p.dim)),
        scalars_(q, tiles_ * Q::Tile::size() * static_cast<size_t>(p.scalars)) {}
  [[nodiscard]] size_t tiles() const { return tiles_; }
  [[nodiscard]] float* vectors() const { return vectors_.data(); }
  [[nodiscard]] uint64_t* scalars() const { return scalars_.data(); }

 private:
  /// What stays in the cache of a GPU, and more tiles than one runs at a time are of no use.
  static size_t TilesFor(const Program& p, size_t n) {
    constexpr size_t kBytes = size_t{32} << 20, kFewest = 64, kMost = 65536;
    const size_t row = sizeof(float) * static_cast<size_t>(p.vectors) * static_cast<size_t>(p.dim) +
                       sizeof(uint64_t) * Q::Tile::size() * static_cast<size_t>(p.scalars);
    return std::min(n, std::clamp(kBytes / std::max<size_t>(row, 1), kFewest, kMost));
  }

  size_t tiles_;
  Scratch<Q, float> vectors_;
  Scratch<Q, uint64_t> scalars_;
};

/// Updates the rows of a step; n is how many it has at most.
template <class Q>
void RunProgram(Q& q, const ProgramView& p, const StepView& step, const RegisterScratch<Q>& registers,
                size_t n) {
  const size_t tiles = registers.tiles(),
               vectors = static_cast<size_t>(p.vectors) * static_cast<size_t>(p.dim);
  float* const vector = registers.vectors();
  uint64_t* const scalar = registers.scalars();
  q.Tiles(tiles * Q::Tile::size(), [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    for (size_t at = i / tile.size(); at < n; at += tiles) {
      const uint32_t row = step.rows.Row(at);
      if (row == kNoRow) continue;
      const uint32_t gradient = step.rows.targets[2 * at + 1];
      const bool shared = gradient == ApplyTarget::kSharedGradient;
      RowHeader& header = step.rows.in.Header(row);
      const RowPlaces places{
          step.rows.in.Value(row),
          step.slots ? step.rows.in.Slots(row) : nullptr,
          shared ? step.shared_gradient : step.gradients + size_t{gradient} * static_cast<size_t>(p.dim),
          step.facts != nullptr ? step.facts + at : nullptr,
          shared ? step.shared_key : step.keys[at],
          static_cast<int64_t>(uint64_t{step.step[1]} << 32 | step.step[0])};
      const Lane<typename Q::Tile> lane(p, tile, vector + i / tile.size() * vectors,
                                        scalar + i * static_cast<size_t>(p.scalars), places);
      if (tile.Shuffle(static_cast<uint32_t>(header.has_slots), 0) == 0) lane.Run(p.initial, p.initials);
      lane.Run(p.update, p.updates);
      if (step.slots && tile.rank() == 0) header.has_slots = 1;
    }
  });
}

}  // namespace kvjax::device
