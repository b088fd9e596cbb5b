// The device table's index against a plain map, and with many lanes at once.
#include "kvjax/ffi/device/index.h"

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvjax/ffi/threads/threads.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace device_index {

using data::Keys;
using kvjax::kNoRow;
using kvjax::device::IndexView;
using kvjax::device::Threads;
using Index = kvjax::device::Index<Threads>;

constexpr uint64_t kCells = IndexView::kCells;

uint64_t Hash(uint64_t key) { return kvjax::PlaceHash(key, kvjax::Secret()); }
uint64_t Home(uint64_t key, uint64_t buckets) { return (Hash(key) >> 16) & (buckets - 1); }
uint64_t Digest(uint64_t key) { return Hash(key) >> 57; }

/// n keys that are first looked for in one bucket; with `digest`, all of that one.
Keys KeysOf(uint64_t home, uint64_t buckets, size_t n, std::optional<uint64_t> digest = {}) {
  Keys keys;
  for (uint64_t key = 1; keys.size() < n; ++key) {
    if (Home(key, buckets) == home && (!digest || Digest(key) == *digest)) keys.push_back(key);
  }
  return keys;
}

/// An index beside the map that it should be, and the number of its cells in use.
struct Twin {
  explicit Twin(size_t keys) : index(q, keys), view(index.view()) {}

  void Insert(uint64_t key) {
    bool took_empty = false;
    view.Insert(key, next, took_empty);
    map.emplace(key, next++);
    used += took_empty;
    ever = std::max(ever, used);
  }
  void Erase(uint64_t key) {
    bool gave_empty = false;
    const auto it = map.find(key);
    CHECK_EQ(view.Erase(key, gave_empty), it == map.end() ? kNoRow : it->second);
    if (it == map.end()) CHECK(!gave_empty);
    if (it != map.end()) map.erase(it);
    used -= gave_empty;
    CHECK_EQ(view.Find(key), kNoRow);
  }
  /// All keys are where they should be, and nothing else is.
  void Check() const {
    size_t there = 0;
    for (uint64_t cell = 0; cell < view.cells(); ++cell) {
      const IndexView::Entry* const entry = view.At(cell);
      if (entry == nullptr) continue;
      ++there;
      const auto it = map.find(entry->key);
      CHECK(it != map.end() && it->second == entry->row);
    }
    CHECK_EQ(there, map.size());
    CHECK(used >= there);
    for (const auto& [key, row] : map) CHECK_EQ(view.Find(key), row);
  }

  Threads q;
  Index index;
  IndexView view;
  std::unordered_map<uint64_t, uint32_t> map;
  uint32_t next = 0;
  size_t used = 0, ever = 0;
};

TEST(AnyKeyIsAKey) {
  Twin twin(0);
  for (const uint64_t key : data::kAwkward) CHECK_EQ(twin.view.Find(key), kNoRow);
  for (const uint64_t key : data::kAwkward) twin.Erase(key);
  for (const uint64_t key : data::kAwkward) twin.Insert(key);
  twin.Check();
  for (const uint64_t key : data::kAwkward) {
    twin.Erase(key);
    twin.Erase(key);
    twin.Check();
  }
  CHECK_EQ(twin.used, 0u);  // no bucket was full
}

TEST(RandomSequences) {
  data::Stream stream(1);
  for (int round = 0; round < 6; ++round) {
    Twin twin(400);
    Keys universe = data::kAwkward;
    for (size_t i = 0; i < 600; ++i) universe.push_back(stream.Next());
    for (int step = 0; step < 20000; ++step) {
      const uint64_t key = universe[stream.Below(universe.size())];
      if (stream.Below(3) == 0 || twin.map.contains(key)) {
        twin.Erase(key);
      } else if (twin.used < twin.index.capacity()) {
        twin.Insert(key);
      }
      if (step % 1000 == 0) twin.Check();
    }
    twin.Check();
  }
}

TEST(KeysThatCollideByTheFrozenHashAreSpread) {
  Twin twin(2'000);
  for (const uint64_t key : data::Colliding(2'000, /*low=*/false)) twin.Insert(key);
  uint64_t farthest = 0;
  for (uint64_t cell = 0; cell < twin.view.cells(); ++cell) {
    if (twin.view.At(cell) != nullptr) farthest = std::max(farthest, twin.view.Distance(cell));
  }
  CHECK(farthest < 20);  // else up to 125
}

TEST(SearchesGoOverFullBucketsAndAroundTheEnd) {
  const uint64_t buckets = Twin(0).view.cells() / kCells;
  for (const uint64_t home : {uint64_t{0}, buckets - 1}) {
    Twin twin(0);
    const Keys keys = KeysOf(home, buckets, 3 * kCells + 6);
    uint64_t farthest = 0;
    for (const uint64_t key : keys) twin.Insert(key);
    twin.Check();
    for (uint64_t cell = 0; cell < twin.view.cells(); ++cell) {
      if (twin.view.At(cell) != nullptr) farthest = std::max(farthest, twin.view.Distance(cell));
    }
    CHECK_EQ(farthest, 3u);
    CHECK_EQ(twin.used, keys.size());

    // Those of full buckets stay marked, and are used again before any other.
    const uint64_t first = keys[3], last = keys.back();
    twin.Erase(first);
    CHECK_EQ(twin.used, keys.size());
    twin.Check();
    twin.Erase(last);
    CHECK_EQ(twin.used, keys.size() - 1);
    twin.Insert(last);
    CHECK_EQ(twin.used, keys.size() - 1);
    twin.Check();
    twin.Insert(first);
    CHECK_EQ(twin.used, keys.size());
    twin.Check();
    for (const uint64_t key : keys) twin.Erase(key);
    CHECK_EQ(twin.used, 3 * kCells);
    twin.Check();
    for (const uint64_t key : data::kAwkward) CHECK_EQ(twin.view.Find(key), kNoRow);
  }
}

TEST(EqualDigestsAreToldApart) {
  const uint64_t buckets = Twin(0).view.cells() / kCells;
  for (const uint64_t digest : {0, 1, 64, 127}) {
    Twin twin(0);
    const Keys keys = KeysOf(2, buckets, 20, digest);
    for (size_t i = 0; i < 18; ++i) twin.Insert(keys[i]);
    twin.Check();
    CHECK_EQ(twin.view.Find(keys[18]), kNoRow);
    twin.Erase(keys[19]);
    for (size_t i = 0; i < 18; i += 2) twin.Erase(keys[i]);
    twin.Check();
    twin.Insert(keys[19]);
    twin.Insert(keys[0]);
    twin.Check();
  }
}

TEST(AFullIndexAnswersAndAnErasedOneToo) {
  // Beyond its capacity, to the last cell: then no search meets an empty one.
  Twin twin(0);
  data::Stream stream(2);
  while (twin.map.size() < twin.view.cells()) twin.Insert(stream.Next());
  twin.Check();
  for (int i = 0; i < 100; ++i) CHECK_EQ(twin.view.Find(stream.Next()), kNoRow);
  for (int i = 0; i < 100; ++i) twin.Erase(stream.Next());
  const auto all = twin.map;
  for (const auto& [key, row] : all) twin.Erase(key);
  CHECK_EQ(twin.used, twin.view.cells());
  for (const auto& [key, row] : all) CHECK_EQ(twin.view.Find(key), kNoRow);
}

TEST(RoomIsWhatWasAskedFor) {
  Threads q;
  for (const size_t keys : {0, 1, 56, 57, 112, 113, 1000, 7 << 10, (7 << 10) + 1}) {
    const Index index(q, keys);
    CHECK(index.capacity() >= keys);
    CHECK(index.capacity() < index.cells());
    CHECK(keys <= 56 || index.capacity() < 2 * keys);
    CHECK_EQ(index.cells(), index.view().cells());
  }
}

// ---- many lanes at once ----------------------------------------------------------------------------------

/// Gives all keys rows at once; returns how many cells came into use.
size_t InsertAll(Threads& q, IndexView view, const Keys& keys, uint32_t first_row = 0) {
  std::atomic<size_t> used = 0;
  q.Each(keys.size(), [&](size_t i) {
    bool took_empty = false;
    view.Insert(keys[i], first_row + static_cast<uint32_t>(i), took_empty);
    used += took_empty;
  });
  return used;
}

/// How many lanes have got a row; each is right, and none is handed out twice.
size_t EraseAll(Threads& q, IndexView view, const Keys& keys,
                const std::unordered_map<uint64_t, uint32_t>& map, std::atomic<size_t>& used) {
  std::vector<uint32_t> rows(keys.size());
  q.Each(keys.size(), [&](size_t i) {
    bool gave_empty = false;
    rows[i] = view.Erase(keys[i], gave_empty);
    used -= gave_empty;
  });
  std::unordered_set<uint32_t> got;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (rows[i] == kNoRow) continue;
    CHECK(map.contains(keys[i]) && map.at(keys[i]) == rows[i]);
    CHECK(got.insert(rows[i]).second);
  }
  return got.size();
}

TEST(ManyLanesInsertIntoOneBucket) {
  for (int round = 0; round < 100; ++round) {
    Threads q(4, /*grain=*/1 + round % 3);
    const Index index(q, 100);
    const IndexView view = index.view();
    Keys keys = KeysOf(static_cast<uint64_t>(round) % 8, view.cells() / kCells, 50);
    keys.insert(keys.end(), data::kAwkward.begin() + 2, data::kAwkward.end());  // 0 and 1 aside
    CHECK_EQ(InsertAll(q, view, keys), keys.size());
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(view.Find(keys[i]), i);
    size_t there = 0;
    for (uint64_t cell = 0; cell < view.cells(); ++cell) there += view.At(cell) != nullptr;
    CHECK_EQ(there, keys.size());
  }
}

TEST(ManyLanesEraseOneKey) {
  for (int round = 0; round < 100; ++round) {
    Threads q(4, /*grain=*/1);
    const Index index(q, 100);
    const IndexView view = index.view();
    const Keys keys = KeysOf(1, view.cells() / kCells, round % 2 == 0 ? 5 : 40);
    // The four first, so that they are in their home: a full bucket, where there are 40, whose cells stay
    // used.
    const Keys first(keys.begin(), keys.begin() + 4), rest(keys.begin() + 4, keys.end());
    std::atomic<size_t> used = InsertAll(q, view, first) + InsertAll(q, view, rest, 4);
    std::unordered_map<uint64_t, uint32_t> map;
    for (size_t i = 0; i < keys.size(); ++i) map[keys[i]] = static_cast<uint32_t>(i);
    Keys victims;
    for (size_t i = 0; i < 64; ++i) victims.push_back(keys[i % 4]);
    CHECK_EQ(EraseAll(q, view, victims, map, used), 4u);
    CHECK_EQ(used, keys.size() - (round % 2 == 0 ? 4 : 0));
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(view.Find(keys[i]), i < 4 ? kNoRow : i);
  }
}

TEST(WavesOfInsertionsAndErasures) {
  // As much as there is space for, in few buckets, so that cells are used again and again.
  data::Stream stream(3);
  for (int round = 0; round < 4; ++round) {
    Threads q(4, /*grain=*/static_cast<size_t>(1) << (2 * round % 5));
    const Index index(q, 448);
    const IndexView view = index.view();
    std::atomic<size_t> used = 0;
    std::unordered_map<uint64_t, uint32_t> map;
    for (int wave = 0; wave < 60; ++wave) {
      Keys keys;
      while (used + keys.size() < index.capacity() && keys.size() < 200) {
        const uint64_t key = stream.Next();
        if (map.emplace(key, static_cast<uint32_t>(1000 * wave + keys.size())).second) keys.push_back(key);
      }
      used += InsertAll(q, view, keys, static_cast<uint32_t>(1000 * wave));
      for (const auto& [key, row] : map) CHECK_EQ(view.Find(key), row);
      Keys victims;
      for (const auto& [key, row] : map) {
        if (stream.Below(2) == 0) victims.insert(victims.end(), 1 + stream.Below(3), key);
        victims.push_back(stream.Next());  // nobody's
      }
      const size_t before = map.size();
      const size_t erased = EraseAll(q, view, victims, map, used);
      for (const uint64_t key : victims) map.erase(key);
      CHECK_EQ(erased, before - map.size());
      for (const uint64_t key : victims) CHECK_EQ(view.Find(key), kNoRow);
    }
  }
}

TEST(OneLaneFindsWhileOthersDo) {
  Threads q(4, /*grain=*/8);
  const Index index(q, 1000);
  const IndexView view = index.view();
  Keys keys = data::kAwkward;
  for (uint64_t key = 1000; key < 1900; ++key) keys.push_back(key << 20);
  InsertAll(q, view, keys);
  std::atomic<size_t> wrong = 0;
  q.Each(4 * keys.size(), [&](size_t i) { wrong += view.Find(keys[i / 4]) != i / 4; });
  CHECK_EQ(wrong, 0u);
}

}  // namespace device_index
