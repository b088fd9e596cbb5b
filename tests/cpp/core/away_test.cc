// Rows that live in an engine: a call that brings some fails at each of its allocations once, and at the
// engine, and none of them is then taken for one that is in memory.
#include "kvjax/ffi/core/away.h"

#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "kvjax/ffi/core/store.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/faults.h"

namespace core_away {

using kvjax::RowsAway;
using Keys = std::vector<uint64_t>;

/// A store whose rows, the squares of their keys, an engine has.
struct Away {
  explicit Away(const Keys& keys) : store(std::make_shared<kvjax::HostSlabs>(), sizeof(uint64_t)) {
    kvjax::Engine engine{
        .get =
            [this](std::string_view, kvjax::Engine::Keys wanted, size_t width, std::byte* out) {
              if (refuses) throw std::runtime_error("not now");
              for (size_t i = 0; i < wanted.size(); ++i)
                std::memcpy(out + i * width, &engine_rows.at(wanted[i]), width);
            },
        .put =
            [this](std::string_view, kvjax::Engine::Keys given, size_t width,
                   const std::vector<std::byte>& in) {
              if (refuses || refuses_put) throw std::runtime_error("not now");
              CHECK_EQ(std::set(given.begin(), given.end()).size(), given.size());
              for (size_t i = 0; i < given.size(); ++i)
                std::memcpy(&engine_rows[given[i]], in.data() + i * width, width);
            },
        .remove =
            [this](kvjax::Engine::Keys) {
              if (refuses) throw std::runtime_error("not now");
            }};
    store.SetAway(
        std::make_unique<RowsAway>(std::make_shared<const kvjax::Engine>(engine), sizeof(uint64_t), 1));
    store.Reserve(keys.size());
    for (const uint64_t key : keys) {
      const uint64_t square = key * key;
      std::memcpy(store.Value(store.Insert(key)), &square, sizeof(square));
    }
    End(2);
  }
  void End(uint32_t version) { store.away()->End(store, version, /*planning=*/false, /*writes=*/true); }
  void Read(const Keys& keys, uint32_t version, bool planning) {
    store.away()->Enter();
    store.away()->Bring(store, keys, RowsAway::kBoth);
    CHECK_EQ(Here(keys), keys.size());
    store.away()->End(store, version, planning, /*writes=*/false);
  }

  /// How many of them are in memory, of which all must be theirs.
  size_t Here(const Keys& keys) {
    size_t here = 0;
    for (const uint64_t key : keys) {
      const uint32_t row = store.index().Find(key);
      if (!store.away()->here(row, RowsAway::kValues)) continue;
      ++here;
      uint64_t value = 0;
      std::memcpy(&value, store.Value(row), sizeof(value));
      CHECK_EQ(value, key * key);
    }
    return here;
  }

  bool refuses = false, refuses_put = false;
  std::map<uint64_t, uint64_t> engine_rows;
  kvjax::RowStore store;
};

TEST(ARowThatCouldNotBeBroughtIsStillAway) {
  Keys keys(40);
  std::iota(keys.begin(), keys.end(), 3);
  Away rows(keys);
  CHECK_EQ(rows.Here(keys), 0u);
  size_t failed = 0;
  for (bool done = false; !done; ++failed) {
    faults = {.armed = true, .fail_at = static_cast<int>(failed) + 1};
    try {
      rows.store.away()->Bring(rows.store, keys, RowsAway::kBoth);
      done = true;
    } catch (const std::bad_alloc&) {
      faults.armed = false;
      (void)rows.Here(keys);
      rows.End(2);
      CHECK_EQ(rows.Here(keys), 0u);
    }
    faults.armed = false;
  }
  CHECK(failed > 8);
  CHECK_EQ(rows.Here(keys), keys.size());
  rows.End(2);
  CHECK_EQ(rows.Here(keys), 0u);
}

/// So that a call touches as little memory as it has rows, and the next one the same.
TEST(RowsOfACallLieSideBySide) {
  Keys keys(10'000);
  std::iota(keys.begin(), keys.end(), 0);
  Away rows(keys);
  const kvjax::RowStore& store = rows.store;
  const auto at = [&](uint64_t key) { return store.Value(store.index().Find(key)); };
  std::byte* first = nullptr;
  for (const Keys& some : {Keys{3, 5000, 9999}, Keys{9000, 70, 4000}}) {
    store.away()->Bring(store, some, RowsAway::kValues);
    for (size_t i = 0; i < some.size(); ++i)
      CHECK_EQ(at(some[i]) - at(some[0]), static_cast<ptrdiff_t>(i * 8));
    CHECK(first == nullptr || at(some[0]) == first);
    first = at(some[0]);
    CHECK_EQ(rows.Here(keys), some.size());
    rows.End(2);
  }
}

TEST(ARowThatTheEngineDoesNotGiveIsStillAway) {
  const Keys keys = {5, 6, 7};
  Away rows(keys);
  rows.refuses = true;
  bool thrown = false;
  try {
    rows.store.away()->Bring(rows.store, keys, RowsAway::kValues);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown);
  CHECK_EQ(rows.Here(keys), 0u);
  rows.refuses = false;
  rows.store.away()->Bring(rows.store, keys, RowsAway::kValues);
  CHECK_EQ(rows.Here(keys), keys.size());
}

/// Also where the engine has refused its row and then the removal of it, so that both are known still.
TEST(AKeyThatComesBackIsPutOnce) {
  Away rows({5});
  RowsAway& away = *rows.store.away();
  away.Bring(rows.store, Keys{5}, RowsAway::kValues);
  rows.refuses = true;
  rows.End(3);
  rows.refuses = false;
  away.Begin(rows.store);
  rows.store.ReserveErase(1);
  CHECK(rows.store.Erase(5));
  rows.refuses = true;
  rows.End(4);
  rows.refuses = false;
  away.Begin(rows.store);
  rows.store.Reserve(1);
  const uint64_t value = 26;
  std::memcpy(rows.store.Value(rows.store.Insert(5)), &value, sizeof(value));
  rows.End(5);
  CHECK_EQ(rows.engine_rows.at(5), value);
}

/// While a step waits for its end, and while the engine refuses rows.
TEST(ReadsLeaveNothingInMemory) {
  Away rows({1, 2, 3, 4});
  const auto here = [&] { return rows.Here({1, 2, 3, 4}); };
  rows.store.away()->Bring(rows.store, Keys{1}, RowsAway::kValues);  // by the step
  for (const Keys& some : {Keys{1, 2}, Keys{3, 4}, Keys{2, 3}}) {
    rows.Read(some, 2, /*planning=*/true);
    CHECK_EQ(here(), 1u);
  }
  rows.refuses_put = true;
  rows.End(3);
  rows.Read({4, 1, 3}, 3, /*planning=*/false);
  CHECK_EQ(here(), 1u);
  rows.refuses_put = false;
  rows.End(3);
  CHECK_EQ(here(), 0u);
}

TEST(SlotsWithoutElementsAreNotInTheEngine) {
  Away rows({5});
  kvjax::SlotLayout layout;
  layout.Add("empty", "float32[0]", 0);
  rows.store.AttachSlots(layout);
  rows.store.MarkSlots(rows.store.index().Find(5));
  rows.refuses = true;
  rows.store.away()->Bring(rows.store, Keys{5}, RowsAway::kSlots);
  CHECK(rows.store.away()->here(rows.store.index().Find(5), RowsAway::kSlots));
}

}  // namespace core_away
