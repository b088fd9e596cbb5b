// Table against a plain map: rows, headers, versions, whole-table copies.
#include "kvjax/ffi/cpu/table.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_table {

using data::Floats;
using data::Keys;
using data::Live;

constexpr size_t kDim = 3;

Floats InitialRow(const kvjax::TableSpec& spec, uint64_t key) {
  Floats row(static_cast<size_t>(spec.dim));
  spec.initializer.Generate(key, spec.dim,
                            [&](int64_t column, float value) { row[static_cast<size_t>(column)] = value; });
  return row;
}

struct Entry {
  Floats row;
  int64_t frequency = 0;
  int64_t version = 0;
};
using Reference = std::map<uint64_t, Entry>;

/// Every read of every key must be what the reference says.
void CheckSame(const Live& table, const Reference& reference, const Keys& keys) {
  CHECK_EQ(table.Size(table.version()), reference.size());
  std::vector<uint8_t> found;
  const Floats rows = table.Rows(keys, &found);
  const auto inspected = std::make_unique<bool[]>(keys.size()),
             pinned = std::make_unique<bool[]>(keys.size());
  std::vector<int64_t> frequencies(keys.size()), versions(keys.size());
  table.Inspect(kvjax::Serial, "inspect", table.version(), data::Span(keys), inspected.get(),
                frequencies.data(), versions.data(), pinned.get());
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto entry = reference.find(keys[i]);
    const bool known = entry != reference.end();
    CHECK_EQ(found[i] != 0, known);
    CHECK_EQ(inspected[i], known);
    CHECK_EQ(frequencies[i], known ? entry->second.frequency : 0);
    CHECK_EQ(versions[i], known ? entry->second.version : -1);
    const Floats row = known ? entry->second.row : InitialRow(table.spec(), keys[i]);
    CHECK(std::equal(row.begin(), row.end(), rows.begin() + static_cast<long>(i * kDim)));
  }
}

/// A random batch of keys, some of them more than once, and rows for them.
struct Batch {
  Keys keys;
  Floats rows;
  Batch(data::Stream& stream, const Keys& universe) {
    const size_t n = stream.Below(40);
    for (size_t i = 0; i < n; ++i) keys.push_back(universe[stream.Below(universe.size())]);
    for (size_t i = 0; i < n * kDim; ++i) rows.push_back(static_cast<float>(stream.Below(1000)));
  }
  [[nodiscard]] Floats Row(size_t i) const {
    return {rows.begin() + static_cast<long>(i * kDim), rows.begin() + static_cast<long>((i + 1) * kDim)};
  }
};

/// One step of training that sets the rows of the batch's distinct keys to those of the batch.
void Train(Live& table, Reference& reference, const Batch& batch, data::Stream& stream, int64_t step) {
  const std::set<uint64_t> distinct(batch.keys.begin(), batch.keys.end());
  const Keys keys(distinct.begin(), distinct.end());
  std::vector<int32_t> counts;
  for (size_t i = 0; i < keys.size(); ++i) counts.push_back(static_cast<int32_t>(1 + stream.Below(3)));
  const auto ids = table.Open(keys, counts, {}, step);
  CHECK_EQ(ids.size(), keys.size());
  Floats values(keys.size() * kDim);
  const auto fresh = std::make_unique<bool[]>(keys.size());
  table.Gather(kvjax::Serial, table.token, ids.data(), ids.size(),
               reinterpret_cast<std::byte*>(values.data()), fresh.get(), {});
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto [entry, inserted] = reference.try_emplace(keys[i], Entry{InitialRow(table.spec(), keys[i])});
    CHECK(std::equal(entry->second.row.begin(), entry->second.row.end(),
                     values.begin() + static_cast<long>(i * kDim)));
    entry->second.row = batch.Row(i);
    entry->second.frequency += counts[i];
    entry->second.version = step;
  }
  table.Scatter(kvjax::Serial, table.token, ids.data(), ids.size(), data::Bytes(batch.rows), {}, true);
}

TEST(RandomCallsMatchReference) {
  data::Stream stream(11);
  Keys universe = data::kAwkward;
  while (universe.size() < 150) universe.push_back(stream.Next());
  Live table(kDim);
  Reference reference;
  int64_t step = 0;
  for (int call = 0; call < 1500; ++call) {
    const Batch batch(stream, universe);
    const uint32_t version = table.version();
    switch (stream.Below(4)) {
      case 0:
        table.Ensure(batch.keys);
        for (uint64_t key : batch.keys)
          reference.try_emplace(key, Entry{InitialRow(table.spec(), key), 0, step});
        break;
      case 1:
        table.Put(batch.keys, batch.rows);
        for (size_t i = 0; i < batch.keys.size(); ++i) {
          Entry& entry = reference[batch.keys[i]];
          entry = {batch.Row(i), entry.frequency, step};  // the last of equal keys wins
        }
        break;
      case 2:
        table.Drop(batch.keys);
        for (uint64_t key : batch.keys) reference.erase(key);
        break;
      default:
        Train(table, reference, batch, stream, ++step);
    }
    CHECK_EQ(table.version(), version + 1);
    if (call % 10 == 0) CheckSame(table, reference, universe);
  }
  CheckSame(table, reference, universe);
  table.Clear(table.version());
  CheckSame(table, {}, universe);
}

TEST(RemovedRowsAreUsedAgain) {
  Live table(kDim);
  table.Ensure({1, 2, 3, 4});
  const auto before = table.Begin({1, 2, 3, 4}, {1, 1, 1, 1});
  table.Drop({2, 4, 4, 99});
  const auto after = table.Begin({12, 14}, {1, 1});
  CHECK(std::set({after[0].row, after[1].row}) == std::set({before[1].row, before[3].row}));
  CHECK(table.Rows({12}) == InitialRow(table.spec(), 12));
  CHECK_EQ(table.Begin({1}, {1})[0].row, before[0].row);
}

TEST(StepsCountOnFromTheLast) {
  Live table(kDim);
  const auto version_of = [&](uint64_t key) { return table.Of(key).version; };
  table.Begin({1}, {1});
  CHECK_EQ(version_of(1), 1);
  table.Begin({1}, {1}, {}, int64_t{1} << 40);
  table.Begin({2}, {1}, {}, 7);  // a lower step counts as the next one
  CHECK_EQ(version_of(2), (int64_t{1} << 40) + 1);
  table.Begin({2}, {1});
  CHECK_EQ(version_of(2), (int64_t{1} << 40) + 2);
  CHECK_EQ(table.Begin({5, 6, 0, 0}, {1, 2, 0, 0}).size(), 2u);  // padding inserts nothing
  CHECK_EQ(version_of(0), -1);
}

}  // namespace cpu_table
