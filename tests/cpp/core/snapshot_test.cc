// The order of snapshots, by (bucket, key), and the bucket's offsets, against a sort by comparison.
#include "kvjax/ffi/core/snapshot.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_snapshot {

using kvjax::KeyRow;

std::tuple<uint32_t, int64_t> Order(const KeyRow& r) {
  return {kvjax::BucketOf(r.key), static_cast<int64_t>(r.key)};
}

void CheckSorted(std::vector<KeyRow> rows, const kvjax::SortedRows& sorted) {
  std::sort(rows.begin(), rows.end(), [](const KeyRow& a, const KeyRow& b) { return Order(a) < Order(b); });
  CHECK_EQ(sorted.rows.size(), rows.size());
  CHECK_EQ(sorted.offsets.size(), size_t{kvjax::kNumBuckets} + 1);
  for (size_t i = 0; i < rows.size(); ++i) {
    const KeyRow found = sorted.rows[i];
    CHECK_EQ(found.key, rows[i].key);
    CHECK_EQ(found.row, rows[i].row);
  }
  for (size_t b = 0, i = 0; b <= kvjax::kNumBuckets; ++b) {
    while (i < rows.size() && kvjax::BucketOf(rows[i].key) < b) ++i;
    CHECK_EQ(sorted.offsets[b], i);
  }
}

TEST(EverySetOfInstructionsSortsTheSame) {
  data::Stream stream(4);
  for (size_t n = 0; n <= kvjax::kFewRows; ++n) {
    std::vector<kvjax::ListedRow> rows(n), sorted(n);
    for (size_t i = 0; i < n; ++i) rows[i] = {i % 3 == 0 ? uint64_t{i} - n / 2 : stream.Next(), uint32_t(i)};
    if (n > 2) rows[1].key = static_cast<uint64_t>(INT64_MAX), rows[2].key = static_cast<uint64_t>(INT64_MIN);
    const auto check = [&](auto sort) {
      sort(rows.data(), n, sorted.data());
      for (size_t i = 1; i < n; ++i) CHECK(kvjax::Precedes(sorted[i - 1], sorted[i]));
      for (const kvjax::ListedRow& r : sorted) CHECK_EQ(rows[r.row].key, r.key);
    };
    check(kvjax::SortFewBaseline);
    check(kvjax::SortFew);
  }
}

TEST(LongRunsOfABucketAreMerged) {
  data::Stream stream(2);
  std::vector<kvjax::ListedRow> rows, sorted;
  for (const size_t n : {0, 1, 31, 32, 33, 64, 65, 96, 97, 1000}) {
    rows.resize(n), sorted.resize(n);
    for (size_t i = 0; i < n; ++i) rows[i] = {i % 3 == 0 ? uint64_t{i} - n / 2 : stream.Next(), uint32_t(i)};
    std::vector<kvjax::ListedRow> from = rows;
    kvjax::SortByKey(from.data(), n, sorted.data());
    std::sort(rows.begin(), rows.end(), kvjax::Precedes);
    for (size_t i = 0; i < n; ++i) CHECK_EQ(sorted[i].row, rows[i].row);
  }
}

TEST(RowsAreSortedHoweverManyThreadsDoIt) {
  data::Stream stream(1);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{200}, size_t{30'000}}) {
    std::vector<KeyRow> rows;
    // Small keys of both signs and any others.
    for (uint32_t i = 0; i < n; ++i) rows.push_back({i % 2 == 0 ? stream.Next() : uint64_t{i} - n / 2, i});
    for (const kvjax::ParallelFor& parallel : {kvjax::ParallelFor(kvjax::Serial), {kvjax::OnThreads}}) {
      for (const size_t chunks : {size_t{1}, size_t{7}}) {
        CheckSorted(rows, kvjax::SortByBucket(parallel, n, chunks, [&](size_t c, auto f) {
                      for (size_t i = n * c / chunks; i < n * (c + 1) / chunks; ++i) f(rows[i]);
                    }));
      }
    }
    std::vector<KeyRow> in_place = rows;
    kvjax::SortedRows sorted;
    sorted.offsets = kvjax::SortByBucket(in_place);
    for (const KeyRow& r : in_place) sorted.rows.push_back({r.key, r.row});
    CheckSorted(rows, sorted);
  }
}

TEST(RowsAreSortedAlikeWithoutPositions) {
  data::Stream stream(3);
  const size_t few = kvjax::SortedRows::kFew;
  for (const size_t n : {size_t{0}, size_t{1}, size_t{200}, few - 1, few, few + 1}) {
    std::vector<KeyRow> rows;
    for (uint32_t i = 0; i < n; ++i) rows.push_back({i % 2 == 0 ? stream.Next() : uint64_t{i} - n / 2, i});
    std::vector<KeyRow> sorted = rows;
    static_cast<void>(kvjax::SortByBucket(sorted));
    kvjax::SortRows(rows);
    for (size_t i = 0; i < n; ++i) CHECK_EQ(rows[i].row, sorted[i].row);
  }
}

}  // namespace core_snapshot
