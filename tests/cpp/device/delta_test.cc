// Deltas of a device table: exactly the rows that are others, and the keys that have none any more, whatever
// has been done; and digests that see each bit of a row, and nothing else.
#include <map>
#include <numeric>

#include "tests/cpp/support/lanes.h"
//
#include "tests/cpp/support/deltas.h"

namespace device_delta {

using namespace pairs;
using deltas::Check;
using deltas::CheckRandomWrites;
using device::Lanes;
using kvjax::Delta;
using kvjax::SlotLayout;
using kvjax::device::Contents;
using kvjax::device::Control;
using kvjax::device::DifferenceOf;
using kvjax::device::RowMark;

TEST(RowsThatAreOthersAndNoMore) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    TableSpec spec = Spec(seed == 0 ? 4 : 3);
    if (seed == 1) spec.type = RowType::kBFloat16;  // rows that end within a word
    if (seed == 2) spec.admission = {.kind = AdmissionSpec::Kind::kMinCount, .threshold = 3};
    CHECK(CheckRandomWrites<Threads>(spec, Threads(4, 8), seed) > 10);
    CHECK(CheckRandomWrites<Lanes>(spec, Lanes(), seed) > 10);
  }
}

TEST(RowsThatOnlyMoveBetweenTheTiersAreTheSame) {
  CHECK(CheckRandomWrites<Threads>(Spec(), Threads(4, 2), 5, {1000, 256}) > 10);
  device::Device<Threads> t(Spec(), Threads(4, 8), {4 * 256, 256});
  Gradients g;
  for (uint64_t key = 0; key < 200; ++key) g.keys.push_back(key);
  g.rows = Floats(3 * g.keys.size(), 0.5f);
  g.counts.assign(g.keys.size(), 1);
  t.Train(g, device::Momentum(3), 64);
  const auto token = t.OpenCursor(t.handle);
  const Snapshot before = t.Copy();
  Gradients some{.keys = {150, 170, 190}, .counts = {500, 500, 500}, .rows = Floats(9, 0.5f)};
  t.Train(some, device::Momentum(3), 3);
  CHECK(t.Stats().pinned_occurrences > 1500);
  for (int step = 0; step < 100; ++step) t.Train(some, device::Momentum(3), 3);
  CHECK(t.Stats().pinned_occurrences < 500);  // these rows have changed places with others
  const Delta delta = t.ExportSince(t.handle, token, true);
  CHECK_EQ(delta.rows.keys.size(), 3u);
  Check(t, before, delta);
}

TEST(WhatHasBeenLoadedIsCompared) {
  device::Device<Threads> t(Spec(), Threads(4, 8));
  Keys keys(100);
  std::iota(keys.begin(), keys.end(), 0);
  t.Ensure(keys);
  const auto token = t.OpenCursor(t.handle);
  const Snapshot before = t.Copy();
  CHECK_THROWS(kFailedPrecondition, (void)t.OpenCursor(t.handle + 1));
  CHECK_THROWS(kFailedPrecondition, (void)t.ExportSince(t.handle - 1, token, true));
  t.Drop({1, 2, 3});
  t.Restore(data::View(before));  // other row ids
  Delta delta = t.ExportSince(t.handle, token, true);
  CHECK(delta.rows.keys.empty() && delta.removed.empty() && !delta.whole);
  t.Empty();
  delta = t.ExportSince(t.handle, token, false);
  CHECK(delta.rows.keys.empty() && delta.removed.size() == 100);
  const auto nothing = t.OpenCursor(t.handle);
  t.Put({5, 6}, Bytes(2 * t.row_bytes()));
  Check(t, before, t.ExportSince(t.handle, token, true));
  delta = t.ExportSince(t.handle, nothing, true);
  CHECK(delta.rows.keys.size() == 2 && delta.removed.empty());
}

/// Rows of two slots, of which no part ends with a word; the rest of their records is `padding`.
template <class Q>
struct Marked {
  static constexpr size_t kRow = 6, kKeys = 40;

  Marked(Q queue, uint8_t padding) : q(queue), in(q, kRow, kKeys) {
    SlotLayout layout;
    layout.Add("a", "x", 5);
    layout.Add("b", "y", 3);
    layout.Add("c", "z", 8);  // which begins where the one before has ended in a multiple of four
    in.Attach(q, layout);
    in.ReserveRows(q, &control, kKeys + 3);
    for (uint32_t row = 0; row < kKeys; ++row) {
      bool took_empty;
      in.view().index.Insert(1000 + row, row + 1, took_empty);
      std::memset(in.view().Value(row + 1), padding, 8);
      std::memset(in.view().Slots(row + 1), padding, 20);
      in.view().Header(row + 1) = {.frequency = row, .pinned = 0, .has_slots = row % 4 != 0, .version = 5};
      for (std::byte* const byte : BytesOf(row + 1)) *byte = static_cast<std::byte>(++filled * 7);
    }
    control.next_row = kKeys + 2;
  }
  std::vector<std::byte*> BytesOf(uint32_t row) {
    std::vector<std::byte*> out;
    for (size_t b = 0; b < kRow; ++b) out.push_back(in.view().Value(row) + b);
    if (in.view().Header(row).has_slots == 0) return out;
    for (const auto& slot : in.layout().slots()) {
      for (size_t b = 0; b < slot.bytes; ++b) out.push_back(in.view().Slots(row) + slot.offset + b);
    }
    return out;
  }
  std::vector<RowMark> Now() { return MarksOf(q, in, kRow, control).rows; }

  Q q;
  Control control = {};
  Contents<Q> in;
  uint32_t filled = 0;
};

TEST(DigestsSeeEachBitOfARowAndNothingElse) {
  Marked<Threads> rows(Threads(4, 8), 0x55);
  const std::vector<RowMark> before = rows.Now();
  CHECK_EQ(before.size(), rows.kKeys + 2);
  CHECK(before == Marked<Lanes>(Lanes(), 0xAA).Now());
  CHECK(before[0] == RowMark{} && before.back() == RowMark{});
  for (const uint32_t row : {1u, 2u, 7u}) {
    const auto check = [&] {
      const auto other = DifferenceOf(before, rows.Now());
      CHECK(other.rows.size() == 1 && other.removed.empty());
      CHECK(!other.rows.empty() && other.rows[0].row == row && other.rows[0].key == before[row].key);
    };
    for (std::byte* const byte : rows.BytesOf(row)) {
      for (int bit = 0; bit < 8; ++bit) {
        *byte ^= std::byte{1} << bit;
        check();
        *byte ^= std::byte{1} << bit;
      }
    }
    kvjax::RowHeader& header = rows.in.view().Header(row);
    const kvjax::RowHeader was = header;
    for (const kvjax::RowHeader& other :
         {kvjax::RowHeader{was.frequency + 1, was.pinned, was.has_slots, was.version},
          kvjax::RowHeader{was.frequency, 1, was.has_slots, was.version},
          kvjax::RowHeader{was.frequency, was.pinned, was.has_slots == 0, was.version},
          kvjax::RowHeader{was.frequency, was.pinned, was.has_slots, -1}}) {
      header = other;
      check();
      header = was;
    }
    CHECK(before == rows.Now());
  }
}

TEST(DifferencesByRowId) {
  const std::vector<RowMark> before = {{0, 1}, {0, 0}, {5, 2}, {6, 3}, {7, 4}, {8, 5}};
  using Found = std::pair<std::map<uint64_t, uint32_t>, std::set<uint64_t>>;
  const auto found = [&](const std::vector<RowMark>& now) {
    const auto [rows, removed] = DifferenceOf(before, now);
    Found out;
    for (const auto& [key, row] : rows) CHECK(out.first.emplace(key, row).second);
    for (const auto& [key, row] : removed) CHECK(out.second.insert(key).second);
    return out;
  };
  CHECK(found(before) == Found());
  CHECK(found({}) == Found({}, {0, 5, 6, 7, 8}));
  CHECK(DifferenceOf({}, before).rows.size() == 5);
  // Another one, one that has moved, one that has moved and is another, one that went, and a new one.
  CHECK(found({{0, 9}, {5, 2}, {6, 9}, {7, 4}, {0, 0}, {8, 5}, {9, 1}}) ==
        Found({{0, 0}, {6, 2}, {9, 6}}, {}));
  CHECK(found({{0, 0}, {0, 1}, {6, 3}, {5, 2}}) == Found({}, {7, 8}));
}

}  // namespace device_delta
