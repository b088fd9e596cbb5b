// How rows come into a table and go from it: admission, capacity and eviction around a store.
//
// A write prepares a Change, which is where it may fail, and then commits it, which cannot.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/stats.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// Is given evicted rows, sorted by (bucket, key), before they go. What it throws stops the eviction.
using Sink = std::function<void(Snapshot rows, std::string_view reason)>;

/// The rows of a call's keys. `fresh` are the distinct keys without one in order of first occurrence, and
/// `numbers` has the place in it of each key whose row is kNoRow.
struct Located {
  std::vector<uint32_t> rows;
  std::vector<uint64_t> fresh;
  std::vector<uint32_t> numbers;
};

/// What a write is about to do: ids[f] is the row that fresh key f will have, kNoRow if it gets none.
struct Change {
  Located found;
  std::vector<uint32_t> ids;
  std::vector<std::pair<std::string, std::vector<KeyRow>>> leaving = {};  // by reason
  size_t over_capacity = 0;                                               // rows beyond what was asked for

  /// The row of each key of the call, once the change is committed; kNoRow for those that get none.
  [[nodiscard]] std::vector<uint32_t> Rows() && {
    for (size_t i = 0, m = 0; i < found.rows.size(); ++i) {
      if (found.rows[i] == kNoRow) found.rows[i] = ids[found.numbers[m++]];
    }
    return std::move(found.rows);
  }
  [[nodiscard]] size_t entering() const {
    return ids.size() - static_cast<size_t>(std::count(ids.begin(), ids.end(), kNoRow));
  }
};

class Contents {
 public:
  Contents(const TableSpec& spec, std::shared_ptr<SlabAllocator> allocator)
      : store(std::move(allocator), spec.row_bytes()), admission(spec.admission) {}

  RowStore store;
  Admission admission;
  int64_t last_step = 0;
  mutable Counters counters;  // reads count too
  Sink sink;
  ScoreFunction score;

  // ---- coming ------------------------------------------------------------------------------------------

  [[nodiscard]] Located Locate(const ParallelFor& parallel, KeySpan keys) const {
    Located found;
    found.rows.resize(keys.n);
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      store.index().Find(keys.data + begin, end - begin, found.rows.data() + begin);
    });
    const auto missing = static_cast<size_t>(std::count(found.rows.begin(), found.rows.end(), kNoRow));
    if (missing == 0) return found;
    KeyNumbering fresh(missing);
    found.numbers.reserve(missing);
    for (size_t i = 0; i < keys.n; ++i) {
      if (found.rows[i] == kNoRow) found.numbers.push_back(fresh.Add(keys.data[i]));
    }
    found.fresh = fresh.keys();
    return found;
  }

  /// A row for every key that has none. With `blank` the caller will write their values, otherwise they get
  /// their initial ones.
  [[nodiscard]] Change Enter(const ParallelFor& parallel, const TableSpec& spec, std::string_view op,
                             KeySpan keys, InitialRows initial, bool blank = false) {
    Change change{.found = Locate(parallel, keys), .ids = {}};
    change.ids.assign(change.found.fresh.size(), 0);
    MakeRoom(parallel, spec, op, change, last_step, false);
    Prepare(parallel, spec, op, change, initial, blank);
    return change;
  }

  /// Reserves all memory, and writes headers and values of the rows to come while they are still free. Sets
  /// `ids` of the fresh keys whose id is not kNoRow.
  void Prepare(const ParallelFor& parallel, const TableSpec& spec, std::string_view op, Change& change,
               InitialRows initial, bool blank) {
    const size_t entering = change.entering();
    if (store.size() + entering >= kNoRow) {
      throw MakeError(ErrorCode::kResourceExhausted, spec.name, op, "fewer than 2^32 - 1 rows",
                      std::to_string(store.size() + entering), "spread the table over several shards");
    }
    if (!blank && entering > 0) CheckInitial(spec, op, change.ids.size(), initial);
    store.Reserve(entering);
    uint32_t next = 0;
    for (uint32_t& id : change.ids) {
      if (id != kNoRow) id = store.FreeRow(next++);
    }
    parallel(change.ids.size(), blank ? kGrain : 64, [&](size_t begin, size_t end) {
      for (size_t f = begin; f < end; ++f) {
        if (change.ids[f] == kNoRow) continue;
        store.Header(change.ids[f]) = {.frequency = 0, .pinned = 0, .has_slots = 0, .version = last_step};
        if (!blank) StoreInitial(spec, op, change.found.fresh[f], f, initial, store.Value(change.ids[f]));
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
      SortByBucket(rows);
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
    throw MakeError(ErrorCode::kInvalidArgument, spec.name, op, "initial rows for all new keys",
                    std::to_string(initial.n), "this is a defect of kvjax: please report it");
  }

  /// Writes the initial row of a key; it is the f-th of the keys that `initial` has rows for.
  static void StoreInitial(const TableSpec& spec, std::string_view op, uint64_t key, size_t f,
                           InitialRows initial, std::byte* row) {
    if (spec.initializer.kind != Initializer::Kind::kGiven) {
      spec.initializer.Generate(
          key, spec.dim, [&](int64_t column, float value) { StoreElement(spec.type, row, column, value); });
    } else {
      CheckInitial(spec, op, f + 1, initial);
      std::memcpy(row, initial.data + f * spec.row_bytes(), spec.row_bytes());
    }
  }

  // ---- going -------------------------------------------------------------------------------------------

  /// Chooses what must go before the change can be made: by the table's policy where its time has come (with
  /// `timed`), and as much as the capacity asks for. Rows of the call stay.
  void MakeRoom(const ParallelFor& parallel, const TableSpec& spec, std::string_view op, Change& change,
                int64_t step, bool timed) {
    const size_t entering = change.entering(), after = store.size() + entering;
    const size_t excess = spec.max_capacity > 0 && after > spec.max_capacity ? after - spec.max_capacity : 0;
    const bool evicts = excess > 0 && spec.on_full == OnFull::kEvict;
    const bool due = timed && spec.evict_every > 0 && step / spec.evict_every > last_step / spec.evict_every;
    if (excess == 0 && !due) return;
    std::vector<Candidate> rows;
    size_t chosen = 0;
    if (evicts || due) {
      rows = Candidates(parallel, change.found.rows);
      Choose(parallel, spec, spec.policy, step, evicts ? excess : 0, rows, change);
      for (const auto& [reason, victims] : change.leaving) chosen += victims.size();
    }
    if (chosen >= excess) return;
    if (spec.on_full == OnFull::kGrow) {
      change.over_capacity = std::min(excess - chosen, entering);
      return;
    }
    const auto refuse = [&](std::string_view detail, std::string_view mend) {
      return MakeError(ErrorCode::kResourceExhausted, spec.name, op,
                       "at most max_capacity=" + std::to_string(spec.max_capacity) + " rows",
                       std::to_string(after).append(detail), mend);
    };
    if (!evicts) {
      throw refuse("", "evict or remove some first, or make the table with on_full='evict' or more capacity");
    }
    if (rows.size() < excess - chosen) {
      throw refuse(" of which " + std::to_string(chosen + rows.size()) + " may go",
                   "pinned rows and those of the batch stay: give the table more capacity");
    }
    static const Policy least_recent = Policy::Parse("capacity\nleast_recent:needed");
    Choose(parallel, spec, least_recent, step, excess - chosen, rows, change);
  }

  /// What `policy` evicts, by hand.
  [[nodiscard]] Change Evict(const ParallelFor& parallel, const TableSpec& spec, const Policy& policy,
                             int64_t step) {
    Change change;
    std::vector<Candidate> rows = Candidates(parallel, {});
    Choose(parallel, spec, policy, step, 0, rows, change);
    Prepare(parallel, spec, "evict", change, {}, true);
    return change;
  }

  void Commit(const Change& change) noexcept {
    counters.over_capacity += change.over_capacity;
    for (size_t f = 0; f < change.ids.size(); ++f) {
      if (change.ids[f] == kNoRow) continue;
      store.Insert(change.found.fresh[f]);
      admission.Forget(change.found.fresh[f]);
      ++counters.inserted;
    }
    for (const auto& [reason, rows] : change.leaving) {
      for (const KeyRow& r : rows) store.Erase(r.key);
      counters.evicted.find(reason)->second += rows.size();
    }
  }

 private:
  static constexpr size_t kGrain = 2048;  // keys: below this, waking a second thread costs more than it saves

  /// Rows that may go: neither pinned nor shared nor among `staying`, of which kNoRow means none.
  [[nodiscard]] std::vector<Candidate> Candidates(const ParallelFor& parallel,
                                                  const std::vector<uint32_t>& staying) const {
    std::vector<bool> stays(store.end_row());
    if (admission.shares()) {  // the row of many keys
      const uint32_t shared = store.index().Find(admission.spec().shared_key);
      if (shared != kNoRow) stays[shared] = true;
    }
    for (const uint32_t row : staying) {
      if (row != kNoRow) stays[row] = true;
    }
    std::vector<Candidate> rows;
    rows.reserve(store.size());
    store.index().ForEach([&](uint64_t key, uint32_t row) {
      if (!stays[row]) rows.push_back({key, row, {}});
    });
    parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
      constexpr size_t kAhead = 16;
      for (size_t i = begin; i < end; ++i) {
        if (i + kAhead < end) store.PrefetchHeader(rows[i + kAhead].row);
        rows[i].header = store.Header(rows[i].row);
      }
    });
    std::erase_if(rows, [](const Candidate& r) { return r.header.pinned != 0; });
    return rows;
  }

  /// Moves the rows that `policy` chooses from `rows` to `change.leaving`.
  void Choose(const ParallelFor& parallel, const TableSpec& spec, const Policy& policy, int64_t step,
              size_t needed, std::vector<Candidate>& rows, Change& change) const {
    if (policy.empty()) return;
    const Policy::View view{store, spec.type, spec.dim, step, needed, score, parallel};
    const std::vector<uint32_t> choice = policy.Choose(view, rows);
    const size_t first = change.leaving.size();
    for (size_t a = 0; a < policy.size(); ++a)
      change.leaving.emplace_back(policy.reason(a), std::vector<KeyRow>());
    size_t kept = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (choice[i] == 0) {
        rows[kept++] = rows[i];
      } else {
        change.leaving[first + choice[i] - 1].second.push_back({rows[i].key, rows[i].row});
      }
    }
    rows.resize(kept);
  }
};

}  // namespace kvjax
