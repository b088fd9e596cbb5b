// Contents: a row store with the admission, the counters and the functions of the user that decide about its
// rows.
//
// A write makes a Change, makes space for it (space.h), prepares it, which is where it may fail last, and
// then commits it, which cannot.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/clock.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/load.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/stats.h"
#include "kvjax/ffi/core/store.h"
#include "kvjax/ffi/cpu/change.h"
#include "kvjax/ffi/cpu/frozen.h"
#include "kvjax/ffi/cpu/initial_rows.h"
#include "kvjax/ffi/cpu/shortlist.h"
#include "kvjax/ffi/cpu/space.h"
#include "kvjax/ffi/cpu/touched.h"

namespace kvjax {

class Contents {
 public:
  Contents(const TableSpec& spec, std::shared_ptr<SlabAllocator> allocator)
      : store(std::move(allocator), spec.row_bytes()), admission(spec.admission) {}

  RowStore store;
  Admission admission;
  int64_t last_step = 0;
  mutable Shortlists shortlists;  // a plan that comes to nothing may fill them
  mutable Counters counters;      // reads count too
  Touched touched;
  Sink sink;
  ScoreFunction score;

  /// Other rows take the place of all.
  void Replace(RowStore rows, int64_t step) {
    if (rows.away() != nullptr) rows.away()->Replaces(store, rows);
    const Frozen* owner = nullptr;
    EachFrozen([&](Frozen& frozen) {
      owner == nullptr ? frozen.TakeOver(store) : frozen.TakeOver(*owner);
      if (owner == nullptr) owner = &frozen;
    });
    store = std::move(rows), last_step = step;
    shortlists.Clear();
    touched.Lose();
  }

  // ---- what is being copied out --------------------------------------------------------------------------

  /// From now on writes keep for it what they are about to change. Throws std::bad_alloc.
  void Watch(const std::shared_ptr<Frozen>& frozen) {
    EachFrozen([](Frozen&) {});
    frozen_.push_back(frozen);
  }
  /// Before these rows change; those that are kNoRow are passed over. Throws std::bad_alloc.
  void Keep(const ParallelFor& parallel, std::span<const uint32_t> rows) {
    EachFrozen([&](Frozen& frozen) { frozen.Keep(parallel, store, rows); });
  }
  void KeepAll() {
    EachFrozen([&](Frozen& frozen) { frozen.KeepAll(store); });
  }
  /// As the store's, unless its rows have to stay where they are.
  void Compact() noexcept {
    EachFrozen([](Frozen&) {});
    if (frozen_.empty()) store.Compact();
  }

  // ---- coming ------------------------------------------------------------------------------------------

  /// `distinct`: no key is there twice.
  [[nodiscard]] Located Locate(const ParallelFor& parallel, KeySpan keys, bool distinct = false) const {
    RowIds rows(keys.n);
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      store.index().Find(keys.data + begin, end - begin, rows.data() + begin);
    });
    return Numbered(keys, std::move(rows), distinct);
  }
  /// The same of keys whose rows are known.
  [[nodiscard]] static Located Numbered(KeySpan keys, RowIds rows, bool distinct) {
    Located found{.rows = std::move(rows)};
    const auto missing = static_cast<size_t>(std::count(found.rows.begin(), found.rows.end(), kNoRow));
    if (missing == 0) return found;
    found.places.resize(missing);
    for (size_t i = 0, m = 0; m < missing; ++i) {
      found.places[m] = static_cast<uint32_t>(i);  // without a branch, which nobody could foresee
      m += found.rows[i] == kNoRow;
    }
    found.numbers.resize(missing);
    if (distinct) {
      std::iota(found.numbers.begin(), found.numbers.end(), 0);
      found.fresh.reserve(missing);
      for (const uint32_t place : found.places) found.fresh.push_back(keys.data[place]);
      return found;
    }
    KeyNumbering fresh(missing);
    for (size_t m = 0; m < missing; ++m) found.numbers[m] = fresh.Add(keys.data[found.places[m]]);
    found.fresh = std::move(fresh).keys();
    return found;
  }

  /// A row for every key that has none.
  [[nodiscard]] Change Enter(const ParallelFor& parallel, KeySpan keys) const {
    Change change{.found = Locate(parallel, keys), .ids = {}, .by_hand = true};
    change.ids.assign(change.found.fresh.size(), 0);
    return change;
  }

  [[nodiscard]] SpaceMaker::Source source(const TableSpec& spec) const {
    return {spec, store, admission, score, shortlists};
  }
  /// Whether the table's policy runs by itself between its last step and this one.
  [[nodiscard]] bool Due(const TableSpec& spec, int64_t step) const {
    return IsDue(spec.evict_every, last_step, step);
  }

  /// Reserves all memory, keeps the rows that will change, and writes headers and values of the rows to come
  /// while they are still free; with `blank` the caller will write their values, otherwise they get their
  /// initial ones. Sets `ids` of the fresh keys whose id is not kNoRow. Shows the sink the victims.
  void Prepare(const ParallelFor& parallel, const TableSpec& spec, std::string_view op, Change& change,
               InitialRows initial, bool blank) {
    const size_t entering = change.entering();
    if (store.size() + entering >= kNoRow) {
      throw RowsError(spec.name, op, store.size() + entering);
    }
    if (!blank && entering > 0) CheckInitial(spec, op, change.ids.size(), initial);
    store.Reserve(entering);
    uint32_t next = 0;
    for (uint32_t& id : change.ids) {
      if (id != kNoRow) id = store.FreeRow(next++);
    }
    for (size_t f = 0; f < change.ids.size() && change.by_hand && admission.tracked() > 0; ++f) {
      if (change.ids[f] != kNoRow) store.Widen(admission.Count(change.found.fresh[f]), last_step);
    }
    Keep(parallel, change.found.rows);
    Keep(parallel, change.ids);  // of which some may have been others' rows
    const bool given = spec.initializer.kind == Initializer::Kind::kGiven;
    parallel(change.ids.size(), blank ? kGrain : 64, [&](size_t begin, size_t end) {
      InitialRowWriter writer(spec.initializer, spec.type, spec.dim);
      for (size_t f = begin; f < end; ++f) {
        if (change.ids[f] == kNoRow) continue;
        const uint64_t counted = change.by_hand ? admission.Count(change.found.fresh[f]) : 0;
        store.SetHeader(change.ids[f],
                        {.frequency = counted, .pinned = 0, .has_slots = 0, .version = last_step});
        std::byte* const row = store.Value(change.ids[f]);
        if (!blank && given) StoreGiven(spec, op, f, initial, row);
        if (!blank && !given) writer.Add(change.found.fresh[f], row);
      }
    });
    size_t leaving = 0;
    for (auto& [reason, rows] : change.leaving) {
      leaving += rows.size();
      counters.evicted.try_emplace(reason, 0);
    }
    store.ReserveErase(leaving);
    for (auto& [reason, rows] : change.leaving) {
      if (!sink || rows.empty()) continue;
      SortRows(rows);
      constexpr size_t kBatch = size_t{1} << 16;  // so that the copies stay small beside the table
      for (size_t begin = 0; begin < rows.size(); begin += kBatch) {
        const auto first = rows.begin() + static_cast<ptrdiff_t>(begin);
        const auto n = static_cast<ptrdiff_t>(std::min(kBatch, rows.size() - begin));
        sink(CopyRows(store, {first, first + n}, spec.row_bytes(), true), reason);
      }
    }
  }

  /// Whether the first n new keys of the call have initial rows.
  static void CheckInitial(const TableSpec& spec, std::string_view op, size_t n, InitialRows initial) {
    if (spec.initializer.kind != Initializer::Kind::kGiven || n <= initial.n) return;
    throw InitialError(spec.name, op, initial.n);
  }

  /// Writes the f-th of the initial rows that have come with the call.
  static void StoreGiven(const TableSpec& spec, std::string_view op, size_t f, InitialRows initial,
                         std::byte* row) {
    CheckInitial(spec, op, f + 1, initial);
    std::memcpy(row, initial.data + f * spec.row_bytes(), spec.row_bytes());
  }

  /// Keys whose rows are others now; where `rows` are given, those that have none are not.
  void Touch(KeySpan keys, const uint32_t* rows = nullptr) noexcept {
    touched.Add(keys.data, keys.n, store.size(), [&](size_t i) { return rows && rows[i] == kNoRow; });
  }

  void Commit(const Change& change) noexcept {
    counters.over_capacity += change.over_capacity;
    Touch({change.found.fresh.data(), change.ids.size()}, change.ids.data());
    counters.inserted += store.Insert(change.found.fresh.data(), change.ids.data(), change.ids.size());
    const bool listed = !shortlists.empty();
    for (size_t f = 0; f < change.ids.size(); ++f) {
      const uint64_t key = change.found.fresh[f];
      const uint32_t row = change.ids[f];
      if (row == kNoRow) continue;
      admission.Forget(key);
      if (listed) shortlists.Add({key, row, store.Header(row)});
    }
    for (const auto& [reason, rows] : change.leaving) {
      for (size_t i = 0; i < rows.size(); ++i) {
        if (i + kAhead < rows.size()) store.PrefetchKey(rows[i + kAhead].key);
        Touch({&rows[i].key, 1});
        store.Erase(rows[i].key);
      }
      counters.evicted.find(reason)->second += rows.size();
    }
  }

 private:
  static constexpr size_t kGrain = 2048;  // keys: below this, waking a second thread costs more than it saves
  static constexpr size_t kAhead = 16;    // keys: how far ahead their cells are fetched

  /// Calls f for those that want rows of the table, and forgets the others.
  template <class F>
  void EachFrozen(F f) {
    std::erase_if(frozen_, [&](const std::weak_ptr<Frozen>& weak) {
      const std::shared_ptr<Frozen> frozen = weak.lock();
      if (frozen == nullptr || frozen->free()) return true;
      f(*frozen);
      return false;
    });
  }

  std::vector<std::weak_ptr<Frozen>> frozen_;
};

/// Contents that are to replace those of a table of this version.
struct LoadedContents {
  uint32_t version;
  RowStore store;
  Admission admission;
  int64_t last_step;
  StoreFill fill{};
};

}  // namespace kvjax
