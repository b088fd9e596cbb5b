// Tables of which a part is in pinned memory: the same as others, within their budget, and with the rows of
// frequent keys on the device.
#include <numeric>

#include "tests/cpp/support/pair.h"

namespace device_tiers {

using namespace pairs;
using kvjax::device::Budget;
using kvjax::device::CallView;
using kvjax::device::Contents;
using kvjax::device::Control;
using kvjax::device::HotRows;

constexpr size_t kSlab = 256;  // 21 rows of dim 3, or their slots

template <class T>
size_t Number(const T& table, const std::string& name) {
  const kvjax::Statistics stats = table.Stats();
  for (const auto& [known, number] : kvjax::kStatistics) {
    if (known == name) return stats.*number;
  }
  throw std::logic_error(name);
}

/// Knows how much shared memory there is.
class Apart : public Threads {
 public:
  Apart() : Threads(4, 8) {}
  static Apart Alone(int /*device*/ = 0) { return {}; }
  static void* AllocateShared(size_t bytes) {
    void* const memory = Threads::AllocateShared(bytes);
    shared[memory] = bytes;
    return memory;
  }
  static void FreeShared(void* memory) noexcept {
    CHECK_EQ(shared.erase(memory), 1u);
    Threads::FreeShared(memory);
  }
  /// Forgets what there is, the memory of reports among it, which stays.
  static void Begin() {
    (void)kvjax::device::ReportPool<Apart>::Take();
    shared.clear();
  }
  static size_t Pinned() {
    size_t sum = 0;
    for (const auto& [memory, bytes] : shared) sum += bytes;
    return sum;
  }
  static inline std::map<void*, size_t> shared;
};

TEST(StoragesSayTheBudget) {
  CHECK_EQ(Budget::Parse("device", "t").bytes, SIZE_MAX);
  CHECK_EQ(Budget::Parse("hybrid:0", "t").bytes, 0u);
  CHECK_EQ(Budget::Parse("hybrid:18446744073709551615", "t").bytes, SIZE_MAX);
  const Budget small = Budget::Parse("hybrid:1000:256", "t");
  CHECK(small.bytes == 1000 && small.slab_bytes == 256);
  for (const char* bad : {"hybrid:", "hybrid:-1", "hybrid:x", "hybrid:1x", "hybrid:1:", "hybrid:1:0",
                          "hybrid:1:2:3", "hybrid:18446744073709551616"}) {
    CHECK_THROWS(kInvalidArgument, Budget::Parse(bad, "t"));
  }
}

TEST(RandomCallsInTwoMemories) {
  for (const size_t bytes : {size_t{0}, 2 * kSlab, 7 * kSlab - 1, size_t{1} << 30}) {
    Pair pair(Spec(), Threads(4, 2), bytes, 180, {bytes, kSlab});
    pair.Sink();
    for (int i = 0; i < 6; ++i) pair.Write(14, 150);
    size_t most_pinned = 0;
    for (int i = 0; i < 12; ++i) {
      pair.Run(4, 150);
      const size_t all = Number(pair.gpu, "value_bytes") + Number(pair.gpu, "slot_bytes");
      const size_t pinned = Number(pair.gpu, "pinned_bytes");
      CHECK(all - pinned <= bytes);
      most_pinned = std::max(most_pinned, pinned);
    }
    CHECK_EQ(most_pinned > 0, bytes < 1 << 30);
    CHECK_EQ(pair.refusals, 0);
  }
}

TEST(WhatSlotsTakeValuesGive) {
  Apart::Begin();
  device::Device<Apart> t(Spec(), {}, {5 * kSlab, kSlab});
  const auto pinned = [&] {
    CHECK_EQ(Number(t, "pinned_bytes"), Apart::Pinned());
    return Apart::Pinned();
  };
  Keys keys(10 * 21);
  std::iota(keys.begin(), keys.end(), 0);
  t.Reserve(t.handle, keys.size());
  t.Ensure(keys);
  CHECK_EQ(pinned(), Number(t, "value_bytes") - 5 * kSlab);
  CHECK_EQ(Number(t, "pinned_rows"), keys.size() - 5 * 21);
  const Snapshot before = t.Copy();
  t.Train({{7}, {1}, Floats(3, 0.0f)}, device::Momentum(3), 1);
  CHECK(t.Copy().values == before.values);
  // Two slabs of each; one alone would speed up no row.
  CHECK_EQ(pinned(), Number(t, "value_bytes") + Number(t, "slot_bytes") - 4 * kSlab);
  CHECK_EQ(Number(t, "pinned_rows"), keys.size() - 2 * 21);
  t.ForgetSlots();
  CHECK(t.Copy().values == before.values);
  CHECK_EQ(pinned(), Number(t, "value_bytes") - 5 * kSlab);
  const Snapshot rows = t.Copy();
  t.Empty();
  CHECK_EQ(pinned(), Number(t, "value_bytes") - 5 * kSlab);  // what is reserved
  t.Restore(data::View(rows));
  CHECK_EQ(Number(t, "pinned_rows"), keys.size() - 5 * 21);
  CHECK(data::Same(t.Copy(), rows));
}

TEST(PinnedMemoryIsInFewPieces) {
  Apart::Begin();
  device::Device<Apart> t(Spec(), {}, {5 * kSlab, kSlab});
  Keys keys(21);  // a slab
  for (int i = 0; i < 400; ++i) {
    for (uint64_t& key : keys) key = t.handle * 100 + (&key - keys.data());
    t.Ensure(keys);
  }
  CHECK_EQ(Number(t, "pinned_bytes"), Apart::Pinned());
  CHECK(Number(t, "pinned_bytes") < (400 + 400 / 8 + 4) * kSlab);
  CHECK(Apart::shared.size() < 60);
}

TEST(RowsOfFrequentKeysComeToTheDevice) {
  const kvjax::SlotLayout layout = device::Momentum(3);
  device::Device<Threads> t(Spec(), Threads(4, 8), {4 * kSlab, kSlab});  // with slots that is 42 rows
  Gradients g;
  for (uint64_t key = 0; key < 200; ++key) g.keys.push_back(key);
  g.rows = Floats(3 * g.keys.size(), 0.5f);
  size_t rare = 0;
  for (const uint64_t hot : {1, 3}) {  // these grow out of fashion, and others come
    g.counts.assign(g.keys.size(), 1);
    for (size_t i = 0; i < 42; ++i) g.counts[4 * i + hot] = hot == 1 ? 1000 : 100000;
    t.Train(g, layout, 64);
    t.Train(g, layout, 200);
    rare += 2;
    CHECK_EQ(Number(t, "pinned_rows"), 200u - 42);
    CHECK_EQ(Number(t, "pinned_occurrences"), (200 - 42) * rare + (hot == 3 ? 42 * 2 * 999 : 0));
    CHECK_EQ(Number(t, "row_occurrences"), 200 * 4 * 1u * (hot / 2) + (200 * 2 * (1 - hot / 2)) +
                                               42 * 2 * 999 + (hot == 3 ? 42 * 2 * 99999u : 0));
  }
  // Rows that are loaded lie well at once.
  const Snapshot rows = t.Copy();
  t.Restore(data::View(rows));
  CHECK_EQ(Number(t, "pinned_occurrences"), (200 - 42) * rare + 42 * 2 * 999);
  CHECK(data::Same(t.Copy(), rows));
}

/// Contents whose rows say whose they are.
struct Rows {
  static constexpr size_t kStride = 20, kSlots = 12;

  Rows(uint64_t seed, size_t keys, size_t device_slabs, uint64_t frequencies)
      : in(q, kStride, keys, {device_slabs * 2 * kSlab, kSlab}), stream(seed) {
    kvjax::SlotLayout layout;
    layout.Add("s", "float32[3]", kSlots);
    in.Attach(q, layout);
    in.ReserveRows(q, &control, keys);
    std::vector<uint32_t> ids(keys);
    std::iota(ids.begin(), ids.end(), 0);
    for (size_t i = keys; i > 1; --i) std::swap(ids[i - 1], ids[stream.Below(i)]);
    const auto view = in.view();
    for (size_t i = 0; i < keys; ++i) {
      if (stream.Below(5) == 0) {
        view.free[control.free_rows++] = ids[i];
        continue;
      }
      const uint64_t key = stream.Next(), power = stream.Below(frequencies);
      bool took_empty;
      view.index.Insert(key, ids[i], took_empty);
      view.Header(ids[i]) = {
          .frequency = stream.Next() >> (63 - power), .pinned = key & 1, .has_slots = 1, .version = 5};
      Fill(key, view.Value(ids[i]), kStride);
      Fill(~key, view.Slots(ids[i]), kSlots);
      frequency[key] = view.Header(ids[i]).frequency;
    }
    control.next_row = static_cast<uint32_t>(keys);
    control.version = 1;
  }
  static void Fill(uint64_t key, std::byte* to, size_t bytes) {
    data::Stream of(key);
    for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(of.Next());
  }

  /// Every key has its row and every other id is free; returns the rows of the keys.
  std::map<uint64_t, uint32_t> Check() {
    std::map<uint64_t, uint32_t> out;
    std::set<uint32_t> ids(in.view().free, in.view().free + control.free_rows);
    const auto view = in.view();
    for (const auto& [key, count] : frequency) {
      const uint32_t row = out[key] = view.index.Find(key);
      CHECK(row < control.next_row && ids.insert(row).second);
      CHECK_EQ(view.Header(row).frequency, count);
      CHECK(view.Header(row).pinned == (key & 1) && view.Header(row).has_slots == 1);
      Bytes value(kStride), slots(kSlots);
      Fill(key, value.data(), kStride);
      Fill(~key, slots.data(), kSlots);
      CHECK(std::equal(value.begin(), value.end(), view.Value(row)));
      CHECK(std::equal(slots.begin(), slots.end(), view.Slots(row)));
    }
    CHECK_EQ(ids.size(), control.next_row);
    return out;
  }
  void Pass(size_t most) {
    const uint32_t version = handle;
    kvjax::device::KeepHot(q, CallView{&control, &report, &version, 0, false}, in, most);
  }

  Threads q{4, 1};
  Control control = {};
  kvjax::device::Report report = {};
  Contents<Threads> in;
  data::Stream stream;
  std::map<uint64_t, uint64_t> frequency;
  uint32_t handle = 1;
};

TEST(APassLeavesTheColdestInPinnedMemory) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const uint64_t powers = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 6 : 62;
    Rows rows(seed, 30 + 5 * seed, seed % 11, powers);
    const auto before = rows.Check();
    rows.handle = 7;
    rows.Pass(1000);
    CHECK(rows.Check() == before);  // the call was not let in
    rows.handle = 1;
    for (size_t moved = 0; moved < 400; moved += seed % 2 == 0 ? 400 : 100)
      rows.Pass(seed % 2 == 0 ? 400 : 100);
    const auto after = rows.Check();
    int coldest = HotRows::kBins, hottest = -1;
    for (const auto& [key, row] : after) {
      const int bin = HotRows::Bin(rows.frequency[key]);
      (row < rows.in.device_rows() ? coldest : hottest) =
          row < rows.in.device_rows() ? std::min(coldest, bin) : std::max(hottest, bin);
    }
    CHECK(hottest <= coldest);
    const auto* const free = rows.in.view().free;
    const auto on_device = [&](uint32_t row) { return row < rows.in.device_rows(); };
    if (hottest >= 0) CHECK(std::none_of(free, free + rows.control.free_rows, on_device));
    rows.Pass(400);
    CHECK(rows.Check() == after);  // nothing moves to and fro
    CHECK_EQ(rows.report.refusal, 0u);
  }
}

TEST(BinsAscendWithFrequencies) {
  CHECK(HotRows::Bin(0) == 0 && HotRows::Bin(1) == 1 && HotRows::Bin(kvjax::kMaxFrequency) < HotRows::kBins);
  for (uint64_t power = 0, last = 0; power < 62; ++power) {
    for (uint64_t quarter = 0; quarter < 4; ++quarter) {
      const uint64_t frequency = (4 + quarter) << power >> 2;
      CHECK(HotRows::Bin(frequency) >= HotRows::Bin(last));
      if (last >= 4) CHECK_EQ(HotRows::Bin(frequency), HotRows::Bin(last) + 1);
      if (last >= 4) CHECK_EQ(HotRows::Bin(frequency - 1), HotRows::Bin(last));
      last = frequency;
    }
  }
}

}  // namespace device_tiers
