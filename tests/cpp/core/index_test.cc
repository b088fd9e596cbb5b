// KeyIndex against std::unordered_map.
#include "kvjax/ffi/core/index.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_index {

using data::Keys;
using kvjax::KeyIndex;
using kvjax::kNoRow;
using Reference = std::unordered_map<uint64_t, uint32_t>;

void Insert(KeyIndex& index, uint64_t key, uint32_t row) {
  index.Reserve(index.size() + 1);
  index.Insert(key, row);
}

uint32_t RowOf(const Reference& reference, uint64_t key) {
  const auto found = reference.find(key);
  return found == reference.end() ? kNoRow : found->second;
}

/// All that the public interface returns, batched and one by one, must be what the reference returns.
void CheckSame(const KeyIndex& index, const Reference& reference, const Keys& universe) {
  CHECK_EQ(index.size(), reference.size());
  std::vector<uint32_t> rows(universe.size());
  index.Find(universe.data(), universe.size(), rows.data());
  for (size_t i = 0; i < universe.size(); ++i) {
    CHECK_EQ(rows[i], RowOf(reference, universe[i]));
    CHECK_EQ(rows[i], index.Find(universe[i]));
  }
  for (const uint32_t* const known : {static_cast<const uint32_t*>(nullptr), std::as_const(rows).data()}) {
    std::vector<uint32_t> used;
    const auto found = [](size_t i, uint32_t row) { return std::pair(i, row); };
    const auto use = [&](size_t i, std::pair<size_t, uint32_t> of) {
      CHECK(of.first == i && used.size() == i);
      used.push_back(of.second);
    };
    index.FindEach(universe.data(), universe.size(), found, use, known);
    CHECK(used == rows);
  }
  size_t visited = 0;
  index.ForEach([&](uint64_t key, uint32_t row) {
    ++visited;
    CHECK_EQ(row, RowOf(reference, key));
  });
  CHECK_EQ(visited, reference.size());
}

/// The first key from `from` on that is at home in that one of four buckets.
uint64_t KeyAt(uint64_t home, uint64_t from) {
  while (kvjax::PlaceHash(from, kvjax::Secret()) >> 62 != home) ++from;
  return from;
}

TEST(BatchesEnterInAnyNumberWhileItGrows) {
  KeyIndex index;
  Reference reference;
  Keys universe = data::kAwkward;
  data::Stream random(7);
  const std::vector<uint32_t> none(universe.size(), kNoRow);
  index.Insert(universe.data(), none.data(), none.size());
  CheckSame(index, reference, universe);
  const size_t sizes[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 5, 3000, 0, 20'000};
  for (const size_t n : sizes) {
    const size_t begin = reference.empty() ? 0 : universe.size();  // the awkward ones first
    while (universe.size() < begin + n) universe.push_back(random.Next());
    std::vector<uint32_t> rows;
    for (size_t i = begin; i < universe.size(); ++i) {
      rows.push_back(i % 5 == 3 ? kNoRow : static_cast<uint32_t>(i));
      if (rows.back() != kNoRow) reference[universe[i]] = rows.back();
    }
    index.Reserve(index.size() + rows.size());
    index.Insert(universe.data() + begin, rows.data(), rows.size());
    CheckSame(index, reference, universe);
  }
}

/// Bucket by bucket, since what an index uses is the best set alone.
TEST(EverySetOfInstructionsFindsTheSame) {
  data::Stream random(11);
  kvjax::Bucket buckets[8] = {};
  Keys keys;
  std::vector<const kvjax::Bucket*> of;
  for (kvjax::Bucket& bucket : buckets) {
    for (const uint64_t key : {uint64_t{0}, ~uint64_t{0}, random.Next()}) keys.push_back(key);  // of no row
    for (size_t c = random.Below(kvjax::Bucket::kCells + 1); c > 0; --c) {
      keys.push_back(c % 2 == 0 ? random.Next() : random.Below(100) << 32);
      bucket.Add(keys.back(), static_cast<uint32_t>(random.Next()) >> 1);
    }
    if (bucket.used > 0 && random.Below(2) == 0) bucket.Remove(0);  // the cell keeps an old key
    bucket.passed = random.Below(2) == 0 ? 0 : (1u << 29) - 1;
    of.resize(keys.size(), &bucket);
  }
  for (const kvjax::search::InBuckets in_buckets :
       {&kvjax::search::InBucketsBaseline, kvjax::search::Best()}) {
    std::vector<uint32_t> which(keys.size()), rows(keys.size()), expected;
    std::iota(which.begin(), which.end(), 0);
    which.resize(in_buckets(keys.data(), of.data(), which.data(), keys.size(), rows.data(), which.data()));
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint32_t cell = of[i]->Find(keys[i]);
      CHECK_EQ(rows[i], cell < kvjax::Bucket::kCells ? of[i]->rows[cell] : kNoRow);
      if (rows[i] == kNoRow && of[i]->passed > 0) expected.push_back(static_cast<uint32_t>(i));
    }
    CHECK(which == expected);
  }
}

TEST(EmptyIndexFindsNothing) {
  KeyIndex index;
  CHECK_EQ(index.Find(0), kNoRow);
  CHECK_EQ(index.Erase(0), kNoRow);
  CHECK_EQ(index.cells(), 0u);
  CheckSame(index, {}, data::kAwkward);
  index.Find(nullptr, 0, nullptr);
}

TEST(AwkwardKeysAreOrdinary) {
  KeyIndex index;
  Reference reference;
  const Keys keys(data::kAwkward.begin(), data::kAwkward.end());
  for (uint32_t i = 0; i < keys.size(); ++i) {
    if (!reference.emplace(keys[i], i).second) continue;
    Insert(index, keys[i], i);
    CheckSame(index, reference, keys);
  }
  while (!reference.empty()) {
    const auto [key, row] = *reference.begin();
    reference.erase(key);
    CHECK_EQ(index.Erase(key), row);
    CHECK_EQ(index.Erase(key), kNoRow);
    CheckSame(index, reference, keys);
  }
}

TEST(KeysThatHavePassedAFullBucketAreFound) {
  // Twelve keys that want the last bucket, so seven stand at the front; every order of erasure must keep the
  // rest.
  Keys keys;
  for (uint64_t from = 0; keys.size() < 12; from = keys.back() + 1) keys.push_back(KeyAt(3, from));
  for (size_t first = 0; first < keys.size(); ++first) {
    for (size_t second = 0; second < keys.size(); ++second) {
      KeyIndex index;
      Reference reference;
      for (uint32_t i = 0; i < keys.size(); ++i) {
        Insert(index, keys[i], i);
        reference.emplace(keys[i], i);
      }
      CHECK_EQ(index.cells(), 20u);
      for (uint64_t key : {keys[first], keys[second]}) {
        CHECK_EQ(index.Erase(key), RowOf(reference, key));
        reference.erase(key);
        CheckSame(index, reference, keys);
      }
    }
  }
}

TEST(GrowthFromBucketsThatHaveAllBeenPassed) {
  KeyIndex index;
  Reference reference;
  Keys universe;
  uint64_t next = 0;
  for (uint64_t home = 0; home < 4; ++home) {
    Keys keys;
    for (size_t i = 0; i < (home == 0 ? 6 : 5); ++i, ++next) keys.push_back(next = KeyAt(home, next));
    for (const uint64_t key : keys) Insert(index, key, static_cast<uint32_t>(key));
    universe.insert(universe.end(), keys.begin(), keys.end());
    for (const uint64_t key : keys) {
      if (key != keys.back()) index.Erase(key);
    }
    reference.emplace(keys.back(), static_cast<uint32_t>(keys.back()));
  }
  CHECK_EQ(index.cells(), 20u);
  CheckSame(index, reference, universe);
  index.Reserve(18);
  CHECK(index.cells() > 20u);
  CheckSame(index, reference, universe);
}

TEST(AnIndexWorksWhileItGrows) {
  KeyIndex index;
  Reference reference;
  Keys universe;
  data::Stream stream(9);
  index.Reserve(30'000);
  while (index.size() < index.capacity()) {
    universe.push_back(stream.Next());
    Insert(index, universe.back(), static_cast<uint32_t>(universe.size()));
    reference.emplace(universe.back(), static_cast<uint32_t>(universe.size()));
  }
  const size_t bytes = index.bytes();
  size_t growing = 0;
  for (int step = 0; step < 40; ++step) {
    for (int i = 0; i < 100; ++i) {
      universe.push_back(stream.Next());
      Insert(index, universe.back(), static_cast<uint32_t>(universe.size()));
      reference.emplace(universe.back(), static_cast<uint32_t>(universe.size()));
      const uint64_t gone = universe[stream.Below(universe.size())];
      CHECK_EQ(index.Erase(gone), RowOf(reference, gone));
      reference.erase(gone);
    }
    CheckSame(index, reference, universe);
    growing += index.bytes() > 2 * bytes;
  }
  CHECK(growing > 10 && growing < 40);  // for a while there are two arrays
  index.ForEachMutable([](uint64_t, uint32_t& row) { ++row; });
  for (auto& [key, row] : reference) ++row;
  CheckSame(index, reference, universe);
}

// An index whose array is mapped, so that it gives memory back as it empties.
TEST(AnIndexThatGrowsTakesLittleMoreMemory) {
  KeyIndex index;
  Keys keys, others;
  data::Stream stream(4);
  const auto add = [&](size_t n) {
    index.Reserve(index.size() + n);
    for (; n > 0; --n) {
      keys.push_back(stream.Next()), others.push_back(stream.Next());
      index.Insert(keys.back(), static_cast<uint32_t>(keys.size() - 1));
    }
  };
  add(400'000);
  size_t arrays = 0;
  for (size_t cells = index.cells(); keys.size() < 800'000;
       arrays += std::exchange(cells, index.cells()) < index.cells()) {
    add(5'000);
    CHECK(index.bytes() <= 23 * keys.size() + 4 * kvjax::kHugePage);  // two of each array
  }
  CHECK(arrays >= 1);
  std::vector<uint32_t> rows(keys.size());
  index.Find(keys.data(), keys.size(), rows.data());
  for (uint32_t i = 0; i < rows.size(); ++i) CHECK_EQ(rows[i], i);
  index.Find(others.data(), others.size(), rows.data());
  CHECK(std::all_of(rows.begin(), rows.end(), [](uint32_t row) { return row == kNoRow; }));
}

TEST(RandomOperationsMatchReference) {
  for (uint64_t universe_size : {20u, 300u, 5000u}) {
    data::Stream stream(universe_size);
    Keys universe = data::kAwkward;
    // Small, strided and random keys: the hash must distribute them all.
    for (uint64_t i = 0; universe.size() < universe_size; ++i) {
      universe.push_back(i % 3 == 0 ? 100 + i : i % 3 == 1 ? i << 40 : stream.Next());
    }
    KeyIndex index;
    Reference reference;
    for (uint32_t op = 0; op < 60'000; ++op) {
      const uint64_t key = universe[stream.Below(universe.size())];
      if (stream.Below(2) == 0) {
        CHECK_EQ(index.Erase(key), RowOf(reference, key));
        reference.erase(key);
      } else if (reference.emplace(key, op).second) {
        Insert(index, key, op);
      }
      CHECK_EQ(index.Find(key), RowOf(reference, key));
      if (op % 5000 == 0) CheckSame(index, reference, universe);
    }
    CheckSame(index, reference, universe);
    index.Clear();
    CHECK_EQ(index.bytes(), 0u);
    CheckSame(index, {}, universe);
    Insert(index, 5, 6);  // a cleared index works on
    CHECK_EQ(index.Find(5), 6u);
  }
}

TEST(GrowthKeepsEveryKeyAndReserveIsExact) {
  KeyIndex index;
  Reference reference;
  Keys universe;
  index.Reserve(1000);
  const size_t capacity = index.cells();
  for (uint32_t i = 0; i < 1000; ++i) {
    index.Insert(i, i);  // without another Reserve
    reference.emplace(i, i);
    universe.push_back(i);
  }
  CHECK_EQ(index.cells(), capacity);
  CheckSame(index, reference, universe);
  index.Reserve(10);  // never shrinks
  CHECK_EQ(index.cells(), capacity);
  index.Reserve(100'000);
  CHECK(index.cells() > capacity);
  CHECK(index.capacity() >= 100'000);
  CheckSame(index, reference, universe);
}

double SecondsToFind(const KeyIndex& index, const Keys& keys) {
  std::vector<uint32_t> rows(keys.size());
  return data::Seconds([&] { index.Find(keys.data(), keys.size(), rows.data()); });
}

TEST(KeysThatCollideByTheFrozenHashAreSpread) {
  KeyIndex index;
  Reference reference;
  const Keys keys = data::Colliding(20'000, /*low=*/true);
  for (const uint64_t key : keys) {
    Insert(index, key, static_cast<uint32_t>(reference.size()));
    reference.emplace(key, static_cast<uint32_t>(reference.size()));
  }
  CHECK(index.SampleProbes().longest < 200);
  CheckSame(index, reference, keys);
  const uint64_t secret = std::exchange(kvjax::Secret(), 0);  // and by the hash of the format
  KeyIndex together;
  for (const uint64_t key : keys) Insert(together, key, 0);
  CHECK(together.SampleProbes().longest > 1000);
  kvjax::Secret() = secret;
}

TEST(TheLongestProbeIsThatOfAnyKey) {
  KeyIndex index;
  index.Reserve(100'000);
  const size_t buckets = index.cells() / 5;
  Keys keys;  // behind those that the mean is sampled of
  for (uint64_t key = 0; keys.size() < 23; ++key) {
    if (kvjax::MulHigh(kvjax::PlaceHash(key, kvjax::Secret()), buckets) == buckets / 2) keys.push_back(key);
  }
  for (const uint64_t key : keys) Insert(index, key, 0);
  CHECK_EQ(index.SampleProbes().longest, 4u);
  for (const uint64_t key : keys) index.Erase(key);
  CHECK_EQ(index.SampleProbes().longest, 4u);
  index.Reserve(300'000);  // which begins another array
  CHECK_EQ(index.SampleProbes().longest, 0u);
}

TEST(ChurnDoesNotWearTheIndexOut) {
  constexpr uint64_t kLive = 40'000, kChurn = 1'000'000;
  KeyIndex index;
  index.Reserve(kLive);  // just below growth
  for (uint64_t i = 0; i < kLive; ++i) Insert(index, i, static_cast<uint32_t>(i));
  const size_t capacity = index.cells();
  for (uint64_t i = 0; i < kChurn; ++i) {
    CHECK_EQ(index.Erase(i), static_cast<uint32_t>(i % kLive));
    Insert(index, i + kLive, static_cast<uint32_t>(i % kLive));
  }
  CHECK_EQ(index.cells(), capacity);
  KeyIndex fresh;  // the same keys in an index without a past
  fresh.Reserve(kLive);
  Reference reference;
  Keys live, erased;
  for (uint64_t i = kChurn; i < kChurn + kLive; ++i) {
    live.push_back(i);
    erased.push_back(i - kLive);
    Insert(fresh, i, static_cast<uint32_t>(i % kLive));
    reference.emplace(i, static_cast<uint32_t>(i % kLive));
  }
  CheckSame(index, reference, live);
  CheckSame(index, reference, erased);
  // Tombstones would make a miss walk the whole index, 10,000 times as long; a busy machine is not that slow.
  CHECK(SecondsToFind(index, erased) < 20 * SecondsToFind(fresh, erased) + 1e-3);
}

}  // namespace core_index
