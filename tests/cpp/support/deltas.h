// Deltas of a device table beside whole copies of it, whatever has been done.
#pragma once
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "tests/cpp/support/pair.h"

namespace deltas {

using device::Bytes;
using kvjax::Delta;
using kvjax::Snapshot;

/// All that a row has, slots only where it has any.
using Whole = std::map<int64_t, Bytes>;
inline Whole RowsOf(const Snapshot& all, size_t row_bytes) {
  Whole out;
  for (size_t i = 0; i < all.keys.size(); ++i) {
    Bytes& row = out[all.keys[i]];
    const auto add = [&](const auto& column, size_t width) {
      const auto* const from = reinterpret_cast<const std::byte*>(column.data() + i * width);
      row.insert(row.end(), from, from + width * sizeof(column[0]));
    };
    kvjax::EachColumn(row_bytes, [&](const char*, size_t width, auto& column) { add(column, width); }, all);
    if (all.has_slots[i] == std::byte{0}) continue;
    for (size_t s = 0; s < all.slots.size(); ++s) add(all.slots[s], all.layout.slots()[s].bytes);
  }
  return out;
}

/// Checks a delta of what there was before.
template <class Q>
void Check(const device::Device<Q>& t, const Snapshot& before, const Delta& delta) {
  const Snapshot now = t.Copy();
  CHECK_EQ(delta.whole, !before.layout.empty() && before.layout != now.layout);
  if (delta.whole) return;
  const Whole old = RowsOf(before, t.row_bytes()), rows = RowsOf(now, t.row_bytes());
  Whole want;
  std::set<int64_t> removed;
  for (const auto& [key, row] : rows) {
    const auto found = old.find(key);
    if (found == old.end() || found->second != row) want[key] = row;
  }
  for (const auto& [key, row] : old) {
    if (!rows.contains(key)) removed.insert(key);
  }
  CHECK(RowsOf(delta.rows, t.row_bytes()) == want);
  CHECK(std::set<int64_t>(delta.removed.begin(), delta.removed.end()) == removed);
  CHECK_EQ(delta.rows.keys.size() + delta.removed.size(), want.size() + removed.size());
  CHECK(delta.rows.layout == now.layout && delta.rows.last_step == now.last_step);
  std::vector<int64_t> offsets(kvjax::kNumBuckets + 1);
  const auto bucket = [](int64_t key) { return kvjax::BucketOf(static_cast<uint64_t>(key)); };
  for (const int64_t key : delta.rows.keys) ++offsets[bucket(key) + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  CHECK(delta.rows.offsets == offsets);
  const auto sorted = [&](const auto& keys) {
    return std::is_sorted(keys.begin(), keys.end(), [&](int64_t x, int64_t y) {
      return std::pair(bucket(x), x) < std::pair(bucket(y), y);
    });
  };
  CHECK(sorted(delta.rows.keys) && sorted(delta.removed));
  const auto waiting = t.ExportAdmission(t.handle);
  CHECK(delta.counts_of_all && delta.admission.keys == waiting.keys &&
        delta.admission.counts == waiting.counts);
}

/// Any writes between any number of cursors. Returns how many deltas there were that are not of all.
template <class Q, class On = Q>
int CheckRandomWrites(const kvjax::TableSpec& spec, On on, uint64_t seed, kvjax::device::Budget budget = {}) {
  pairs::PairOn<Q> pair(spec, on, seed, 150, budget);
  std::map<kvjax::CursorToken, Snapshot> cursors;
  int known = 0;
  for (int round = 0; round < 12; ++round) {
    const auto token = pair.gpu.OpenCursor(pair.gpu.handle);
    CHECK(cursors.emplace(token, pair.gpu.Copy()).second);
    while (cursors.size() > 4) {
      const auto gone = cursors.begin()->first;
      pair.gpu.CloseCursor(gone);
      CHECK(pair.gpu.ExportSince(pair.gpu.handle, gone, true).whole);
      cursors.erase(gone);
    }
    pair.Run(2, 60);
    if (round % 3 == 1) cursors[pair.gpu.OpenCursor(pair.gpu.handle)] = pair.gpu.Copy();
    for (const auto& [at, before] : cursors) {
      const Delta delta = pair.gpu.ExportSince(pair.gpu.handle, at, true);
      known += delta.whole ? 0 : 1;
      Check(pair.gpu, before, delta);
    }
  }
  return known;
}

}  // namespace deltas
