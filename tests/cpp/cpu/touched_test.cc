// The keys that cursors remember: those touched since, of any number of cursors that come and go.
#include "kvjax/ffi/cpu/touched.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_touched {

using kvjax::Touched;
using Set = std::set<uint64_t>;

std::optional<Set> Of(const Touched& touched, kvjax::CursorToken token) {
  const auto since = touched.At(token);
  if (!since) return std::nullopt;
  CHECK(since->keys.size() == Set(since->keys.begin(), since->keys.end()).size());
  return Set(since->keys.begin(), since->keys.end());
}

/// Against a set for each cursor, which is lost or not.
TEST(EachCursorHasTheKeysSinceThen) {
  data::Stream stream(3);
  Touched touched;
  std::map<kvjax::CursorToken, std::optional<Set>> model;
  for (int i = 0; i < 4000; ++i) {
    switch (stream.Below(12)) {
      case 0:
        model[touched.Open()] = Set();
        break;
      case 1:
        if (!model.empty()) {
          auto cursor = model.begin();
          std::advance(cursor, stream.Below(model.size()));
          touched.Close(cursor->first);
          CHECK(!Of(touched, cursor->first));
          model.erase(cursor);
        }
        break;
      case 2:
        if (stream.Below(20) == 0) {
          touched.Lose();
          for (auto& [token, keys] : model) keys.reset();
        }
        break;
      default: {
        data::Keys batch(stream.Below(9));
        for (uint64_t& key : batch) key = stream.Below(60);
        touched.Add(batch.data(), batch.size(), 100, [&](size_t j) { return batch[j] == 7; });
        for (auto& [token, keys] : model) {
          for (const uint64_t key : batch) {
            if (keys && key != 7) keys->insert(key);
          }
        }
      }
    }
    for (const auto& [token, keys] : model) CHECK(Of(touched, token) == keys);
  }
  for (const auto& [token, keys] : model) touched.Close(token);
  CHECK(!touched.wanted());
}

/// An old cursor waits, and a newer one moves on: keys that are touched again and again stand in the list no
/// more than twice, and each cursor still has its own.
TEST(AnOldCursorAndOneThatMovesOn) {
  data::Stream stream(5);
  Touched touched;
  const auto old = touched.Open();
  auto newer = touched.Open();
  Set all;
  for (int i = 0; i < 400; ++i) {
    Set since;
    for (int part = 0; part < 2; ++part) {
      data::Keys batch(500);
      for (uint64_t& key : batch) key = stream.Below(2000);
      touched.Add(batch.data(), batch.size(), 2000);
      since.insert(batch.begin(), batch.end());
      CHECK(touched.bytes() < (size_t{1} << 17) * 8 + 2000 * 48);
    }
    all.insert(since.begin(), since.end());
    if (i % 16 == 0) CHECK(Of(touched, newer) == since && Of(touched, old) == all);
    touched.Close(std::exchange(newer, touched.Open()));
  }
  CHECK(Of(touched, newer) == Set() && Of(touched, old) == all);
  touched.Close(old);
  CHECK(touched.bytes() < 1024);
  const std::vector<uint64_t> keys = {1, 2};
  touched.Add(keys.data(), keys.size(), 2000);
  CHECK(Of(touched, newer) == Set(keys.begin(), keys.end()));
}

/// Keys that are touched again between cursors that wait, so that the list is tidied up while they stand in
/// it.
TEST(CursorsKeepTheirKeysWhenTheListIsTidied) {
  constexpr size_t kKeys = 30'000;
  data::Stream stream(6);
  Touched touched;
  std::deque<std::pair<kvjax::CursorToken, std::vector<bool>>> model;
  data::Keys batch(20'000);
  for (int i = 0; i < 16; ++i) {
    model.emplace_back(touched.Open(), kKeys);
    for (uint64_t& key : batch) key = stream.Below(kKeys);
    touched.Add(batch.data(), batch.size(), kKeys);
    for (auto& [token, keys] : model) {
      for (const uint64_t key : batch) keys[key] = true;
      const auto since = touched.At(token);
      CHECK(since && since->keys.size() == static_cast<size_t>(std::count(keys.begin(), keys.end(), true)));
      for (const uint64_t key : since->keys) keys[key].flip();
      CHECK(std::find(keys.begin(), keys.end(), true) == keys.end());
      for (const uint64_t key : since->keys) keys[key].flip();
    }
    if (model.size() < 11) continue;
    touched.Close(model.front().first);
    model.pop_front();
  }
  CHECK(touched.bytes() < (size_t{1} << 17) * 8 + kKeys * 48);
}

TEST(MemoryIsTakenForCursorsAloneAndNoMoreThanRowsAreWorth) {
  Touched touched;
  data::Keys many(200'000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = i;
  touched.Add(many.data(), many.size(), many.size());
  CHECK(touched.bytes() == 0);
  const auto token = touched.Open();
  touched.Add(many.data(), many.size(), many.size());
  CHECK(Of(touched, token)->size() == many.size());
  CHECK(touched.bytes() < 30 * many.size());
  touched.Add(many.data(), 1, many.size() / 2);
  CHECK(!Of(touched, token) && touched.bytes() == 0);
  const auto later = touched.Open();
  touched.Add(many.data(), 10, 0);
  CHECK(!Of(touched, token) && Of(touched, later)->size() == 10);
  touched.Close(later);
  CHECK(touched.bytes() == 0);
}

TEST(CountsAreLostToTheCursorsOfTheirTime) {
  Touched touched;
  const auto before = touched.Open();
  touched.LoseCounts();
  const auto after = touched.Open();
  CHECK(touched.At(before)->counts_of_all && !touched.At(after)->counts_of_all);
  CHECK(!touched.At(after + 1));
}

}  // namespace cpu_touched
