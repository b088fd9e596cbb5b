// Writes of rows by value: assign, add, accum and pin; and reads of what belongs to a row beside its value.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_update {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::RowType;
using kvjax::Serial;

constexpr size_t kDim = 3;

/// What the row type makes of a float.
float Rounded(RowType type, float value) {
  std::byte row[4];
  kvjax::StoreElement(type, row, 0, value);
  return kvjax::LoadElement(type, row, 0);
}

/// The row of a key in its type, as floats; nothing if it has none.
std::optional<Floats> RowOf(const Live& table, uint64_t key) {
  std::vector<std::byte> row(table.row_bytes());
  bool found;
  const bool mask = true;
  table.Lookup(Serial, table.version(), {&key, 1}, &mask, {}, kvjax::Missing::kTable, row.data(), &found);
  if (!found) return std::nullopt;
  Floats out;
  for (size_t d = 0; d < kDim; ++d) {
    out.push_back(kvjax::LoadElement(table.spec().type, row.data(), static_cast<int64_t>(d)));
  }
  return out;
}

Floats Initial(const kvjax::TableSpec& spec, uint64_t key) {
  Floats row;
  spec.initializer.Generate(key, kDim, [&](int64_t, float x) { row.push_back(Rounded(spec.type, x)); });
  return row;
}

Keys RandomKeys(data::Stream& stream) {
  Keys keys;
  for (uint64_t n = stream.Below(30); n > 0; --n) keys.push_back(data::kAwkward[stream.Below(17)]);
  return keys;
}

Floats RandomRows(data::Stream& stream, size_t n) {
  Floats rows;
  for (size_t i = 0; i < n * kDim; ++i) rows.push_back(static_cast<float>(stream.Below(10'000)) / 7);
  return rows;
}

TEST(RandomUpdatesMatchReference) {
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    auto spec = data::Spec(kDim);
    spec.type = type;
    Live table(spec);
    std::map<uint64_t, Floats> rows;
    std::map<uint64_t, int64_t> versions;
    data::Stream stream(4);
    for (int64_t call = 1; call < 600; ++call) {
      table.Begin({}, {}, {}, call);  // the step that later writes are marked with
      const Keys keys = RandomKeys(stream);
      const Floats a = RandomRows(stream, keys.size()), b = RandomRows(stream, keys.size());
      switch (stream.Below(4)) {
        case 0: {  // duplicates are summed in order, then added at once
          std::map<uint64_t, Floats> sums;
          for (size_t i = 0; i < keys.size(); ++i) {
            const auto [sum, first] = sums.try_emplace(keys[i], kDim);
            for (size_t d = 0; d < kDim; ++d) {
              sum->second[d] = first ? a[i * kDim + d] : sum->second[d] + a[i * kDim + d];
            }
          }
          for (const auto& [key, sum] : sums) {
            Floats& row = rows.try_emplace(key, Initial(spec, key)).first->second;
            for (size_t d = 0; d < kDim; ++d) row[d] = Rounded(type, row[d] + sum[d]);
            versions[key] = call;
          }
          table.Add(Serial, table.version(), data::Span(keys), a.data(), {});
          break;
        }
        case 1: {  // one key after the other
          const auto exists = std::make_unique<bool[]>(keys.size() + 1);
          for (size_t i = 0; i < keys.size(); ++i) {
            exists[i] = stream.Below(2) == 0;
            const bool present = rows.contains(keys[i]);
            if (present != exists[i]) continue;
            Floats& row = rows.try_emplace(keys[i], kDim).first->second;
            for (size_t d = 0; d < kDim; ++d) {
              const float fresh = b[i * kDim + d];
              row[d] = Rounded(type, present ? row[d] + (fresh - a[i * kDim + d]) : fresh);
            }
            versions[keys[i]] = call;
          }
          table.Accum(Serial, table.version(), data::Span(keys), a.data(), b.data(), exists.get());
          break;
        }
        case 2: {  // overwrites what is there; the last one wins
          std::vector<std::byte> values(keys.size() * table.row_bytes());
          for (size_t i = 0; i < keys.size(); ++i) {
            Floats row;
            for (size_t d = 0; d < kDim; ++d) {
              kvjax::StoreElement(type, values.data() + i * table.row_bytes(), static_cast<int64_t>(d),
                                  a[i * kDim + d]);
              row.push_back(Rounded(type, a[i * kDim + d]));
            }
            if (rows.contains(keys[i])) rows[keys[i]] = row, versions[keys[i]] = call;
          }
          table.Assign(Serial, table.version(), data::Span(keys), values.data());
          break;
        }
        default:
          table.Drop({keys.begin(), keys.begin() + static_cast<long>(keys.size() / 3)});
          for (size_t i = 0; i < keys.size() / 3; ++i) rows.erase(keys[i]);
      }
      for (const uint64_t key : data::kAwkward) {
        const auto row = RowOf(table, key);
        CHECK_EQ(row.has_value(), rows.contains(key));
        if (!row || !rows.contains(key)) continue;
        CHECK(*row == rows[key]);
        CHECK(table.Of(key) == (Live::Info{true, 0, versions[key]}));  // these writes are no occurrences
      }
    }
  }
}

TEST(AccumGoesOneByOne) {
  Live table(1);
  const Keys keys = {7, 7, 7, 7, 8, 8};
  const bool exists[] = {true, false, true, false, true, true};
  const Floats old_values = {0, 0, 1, 0, 0, 0}, new_values = {1, 10, 3, 99, 5, 5};
  table.Accum(Serial, table.version(), data::Span(keys), old_values.data(), new_values.data(), exists);
  CHECK(table.Rows({7}) == Floats({12}));  // skipped, inserted, 3 - 1 added, skipped
  CHECK_EQ(table.Size(table.version()), 1u);
}

TEST(PinnedRowsStay) {
  Live table(1);
  table.Put({1, 2, 3}, {1, 2, 3});
  table.Pin({2, 2, 9});  // 9 gets a row
  CHECK(table.Rows({2}) == Floats({2}));
  CHECK(table.KeySet() == std::set<uint64_t>({1, 2, 3, 9}));
  table.Put({2}, {5});  // a write does not unpin
  table.Train({2, 9});
  const kvjax::Snapshot s = table.Copy();
  for (size_t i = 0; i < s.keys.size(); ++i) {
    CHECK_EQ(s.pinned[i] == std::byte{1}, s.keys[i] == 2 || s.keys[i] == 9);
  }
  Live other(1);
  other.Restore(data::View(s));
  for (Live* t : {&table, &other}) {
    t->Unpin(t->version(), data::Span({9, 3, 1000}));
    t->Evict("all\nleast_recent:-0");
    CHECK(t->KeySet() == std::set<uint64_t>{2});
    t->Drop({2});  // by hand it may be evicted
    t->Ensure({2});
    t->Evict("all\nleast_recent:-0");  // the row that comes back is not pinned
    CHECK(t->KeySet().empty());
  }
  kvjax::SnapshotView without = data::View(s);
  without.pinned = nullptr;
  other.Restore(without);
  other.Evict("all\nleast_recent:-0");
  CHECK(other.KeySet().empty());
}

TEST(SlotsAreReadByName) {
  Live table(1);
  float out[3] = {7, 7, 7};
  const auto read = [&](const char* name, size_t bytes) {
    const Keys keys = {1, 2, 3};
    table.ReadSlot(Serial, table.version(), name, bytes, data::Span(keys), reinterpret_cast<std::byte*>(out));
    return Floats(out, out + 3);
  };
  CHECK_THROWS(kFailedPrecondition, read("mu", 4));
  kvjax::SlotLayout layout;
  layout.Add("flag", "bool", 1);
  layout.Add("mu", "float32", 4);
  table.Begin({1, 2}, {1, 1}, layout);
  CHECK(read("mu", 4) == Floats({0, 0, 0}));
  const auto targets = table.Open({1, 2}, {1, 1}, layout);
  const Floats values(1), mu = {5};
  const std::byte flag{1};
  table.Scatter(Serial, table.token, targets.data(), 1, data::Bytes(values), {&flag, data::Bytes(mu)}, true);
  CHECK(read("mu", 4) == Floats({5, 0, 0}));
  CHECK_THROWS(kFailedPrecondition, read("mu", 8));
  CHECK_THROWS(kFailedPrecondition, read("nu", 4));
  table.Drop({1});
  table.Ensure({1});
  CHECK(read("mu", 4) == Floats({0, 0, 0}));
}

TEST(FindMissingSkipsWhatTheMaskHides) {
  Live table(1);
  table.Ensure({1});
  const Keys keys = {5, 1, 6, 5, 7};
  const bool mask[] = {false, true, true, true, false};
  Keys missing(keys.size() + 1);
  missing.resize(table.FindMissing(Serial, table.version(), data::Span(keys), mask, missing.data()));
  CHECK(missing == Keys({6, 5}));
}

TEST(CallsWithoutKeys) {
  Live table(2);
  table.Ensure({});
  table.Put({}, {});
  table.Pin({});
  table.Unpin(table.version(), data::Span({}));
  table.Add(Serial, table.version(), data::Span({}), nullptr, {});
  table.Accum(Serial, table.version(), data::Span({}), nullptr, nullptr, nullptr);
  table.Assign(Serial, table.version(), data::Span({}), nullptr);
  table.Drop({});
  CHECK(table.Rows({}).empty());
  CHECK_EQ(table.version(), 8u);
  CHECK(table.KeySet().empty());
}

TEST(CountersTellWhatHappened) {
  auto spec = data::Spec(1);
  spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 3};
  Live table(spec);
  table.Ensure({1, 2, 2});
  table.Begin({1, 5, 6}, {4, 2, 3});
  (void)table.Rows({1, 5, 1, 9});
  table.Drop({1, 77, 1});
  table.Observe([](const kvjax::Contents& c) {
    CHECK_EQ(c.counters.inserted, 3u);
    CHECK_EQ(c.counters.admitted, 1u);
    CHECK_EQ(c.counters.refused, 2u);
    CHECK_EQ(c.counters.occurrences, 9u);
    CHECK_EQ(c.counters.distinct, 3u);
    CHECK_EQ(c.counters.hits, 2u);
    CHECK_EQ(c.counters.misses, 2u);
    CHECK_EQ(c.counters.removed, 1u);
    CHECK_EQ(c.admission.tracked(), 1u);
  });
}

}  // namespace cpu_update
