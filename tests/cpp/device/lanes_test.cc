// The device table with eight lanes to a tile, beside the CPU's.
#include "tests/cpp/support/lanes.h"

#include "tests/cpp/support/pair.h"

namespace device_lanes {

using device::Lanes;
using pairs::AdmissionSpec;
using pairs::Initializer;
using pairs::PairOn;
using pairs::RowType;
using pairs::Spec;

TEST(EightLanesDoWhatTheCpuDoes) {
  for (const int64_t dim : {3, 8}) {
    auto spec = Spec(dim);
    if (dim == 3) spec.type = RowType::kBFloat16;
    PairOn<Lanes> pair(spec, Lanes(), static_cast<uint64_t>(dim), 90);
    pair.Run(12, 40);
  }
}

TEST(EightLanesShareARow) {
  auto spec = Spec(4);
  spec.admission.kind = AdmissionSpec::Kind::kMinCount;
  spec.admission.threshold = 3;
  spec.admission.unadmitted = AdmissionSpec::Unadmitted::kShared;
  spec.admission.shared_key = 77;
  PairOn<Lanes> pair(spec, Lanes(), 5, 60);
  pair.Run(12, 30);
}

TEST(EightLanesTakeRowsThatAreGiven) {
  auto spec = Spec(5);
  spec.initializer.kind = Initializer::Kind::kGiven;
  PairOn<Lanes> pair(spec, Lanes(), 6, 60);
  pair.Run(10, 30);
}

/// More slots than one kernel takes are written and read back.
template <class Q>
void CheckManySlots(size_t num_slots) {
  const size_t n = 11, dim = 3;
  device::Device<Q> t(Spec(static_cast<int64_t>(dim)), Q());
  kvjax::SlotLayout layout;
  for (size_t s = 0; s < num_slots; ++s) layout.Add("s" + std::to_string(s), "x", 2 + 5 * (s % 4));
  device::Gradients g;
  for (uint64_t i = 0; i < n; ++i) g.keys.push_back(i * 3), g.counts.push_back(1);
  g.rows.assign(n * dim, 1.0f);
  t.Train(g, {});
  int64_t step = 0;
  std::vector<device::Bytes> all;
  for (const auto& slot : layout.slots()) all.emplace_back(n * slot.bytes);
  device::Bytes values(n * t.row_bytes());
  data::Stream stream(num_slots);
  const auto fill = [&](device::Bytes& bytes) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(stream.Next());
  };
  fill(values);
  for (auto& slot : all) fill(slot);
  const std::vector<device::Bytes> want = all;
  const device::Bytes wanted = values;
  std::vector<std::byte*> slots;
  for (auto& slot : all) slots.push_back(slot.data());
  t.Write([&](auto* handle, auto* next) {
    t.WriteStep(t.q, {.step = Of(g, handle, layout),
                      .values = values.data(),
                      .slots = {slots.begin(), slots.end()},
                      .next = next});
  });
  fill(values);
  for (auto& slot : all) fill(slot);
  const device::Mask fresh(new bool[n]);
  device::Keys keys(n);
  // Without gradients, which whoever asks has already.
  t.ReadStep(t.q, {.step = Of(g, &t.handle, layout),
                   .size = n,
                   .used_step = &step,
                   .values = values.data(),
                   .fresh = fresh.get(),
                   .row_keys = keys.data(),
                   .slots = slots});
  CHECK(keys == g.keys);
  CHECK(std::none_of(fresh.get(), fresh.get() + n, [](bool x) { return x; }));
  CHECK(data::SameBytes(values, wanted));
  for (size_t s = 0; s < num_slots; ++s) CHECK(data::SameBytes(all[s], want[s]));
}

TEST(SlotsOfAnyNumber) {
  for (const size_t slots : {1, 7, 8, 19}) {
    CheckManySlots<kvjax::device::Threads>(slots);
    CheckManySlots<Lanes>(slots);
  }
}

}  // namespace device_lanes
