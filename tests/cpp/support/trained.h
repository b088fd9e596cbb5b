// Training by a row program on a device table beside the CPU's.
#pragma once
#include <cstring>

#include "kvjax/ffi/cpu/table.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/program.h"

namespace programs {

inline kvjax::ApplyOperands Of(const device::Gradients& g, const kvjax::SlotLayout& layout,
                               const kvjax::Program& program, const uint64_t* shared) {
  kvjax::ApplyOperands o;
  o.step.keys = data::Span(g.keys);
  o.step.gradients = {g.counts.data(), g.rows.data(), g.canaries.data(), g.canaries.size()};
  o.step.step = &g.step, o.step.layout = layout, o.program = program, o.shared = shared;
  return o;
}

/// Steps of a table on a device, made of `on`, and of the CPU's: duplicates, padding, an empty one. Small
/// whole numbers, so that all sums are exact.
template <class Q, class On = Q>
void TrainBesideTheCpu(kvjax::TableSpec spec, size_t batch, On on = On()) {
  const auto dim = static_cast<size_t>(spec.dim);
  data::Live cpu(spec);
  device::Device<Q> gpu(spec, on);
  const kvjax::SlotLayout layout = kvjax::SlotLayout::Parse("n|int32[]|4");
  const kvjax::Program program = kvjax::Program::Parse("t", Sgd(static_cast<int32_t>(spec.dim)), spec.dim,
                                                       kvjax::RowType::kFloat32, layout);
  const float rate = 0.25f;
  uint64_t shared[2] = {0, 1};
  std::memcpy(shared, &rate, 4);
  data::Stream stream(batch);
  for (int64_t step = 1; step < 8; ++step) {
    device::Gradients g;
    g.step = step;
    for (size_t i = 0; i < (step == 4 ? 0 : batch); ++i) {
      g.keys.push_back(stream.Below(3) == 0 ? 5 : stream.Below(batch));
      g.counts.push_back(stream.Below(20) == 0 ? 0 : 1);
      for (size_t d = 0; d < dim; ++d) g.rows.push_back(static_cast<float>(stream.Below(64)) - 31);
    }
    auto o = Of(g, layout, program, shared);
    const uint32_t version = cpu.version();
    uint32_t next = 0;
    o.step.version = &version, o.next = &next;
    cpu.Apply(kvjax::Serial, o);
    gpu.Write([&](auto* handle, auto* after) {
      o.step.version = handle, o.next = after;
      gpu.Apply(gpu.q, o);
    });
  }
  CHECK(data::Same(cpu.Copy(), gpu.Export(gpu.handle, true)));
}

}  // namespace programs
