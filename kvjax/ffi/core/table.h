// The table on the CPU: key index and rows under one row id.
//
// version.h says which calls are let in. Writes give the strong guarantee: all that can fail (checks, memory)
// comes before the first change.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/initial.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/slab.h"
#include "kvjax/ffi/core/version.h"

namespace kvjax {

/// Far beyond any use; it keeps sizes in bytes away from the ends of the integers.
inline constexpr int64_t kMaxDim = int64_t{1} << 20;

struct TableSpec {
  std::string name;
  int64_t dim = 0;
  RowType type = RowType::kFloat32;
  Initializer initializer;
};

/// n keys as a call brings them. `narrow` says that JAX held them in 32 bits while 64-bit integers were
/// switched off, so that ids of 64 bits would have been cut.
struct KeySpan {
  const uint64_t* data;
  size_t n;
  bool narrow = false;
};

class Table {
 public:
  Table(TableSpec spec, std::shared_ptr<SlabAllocator> allocator, uint32_t first_version)
      : spec_(std::move(spec)),
        allocator_(std::move(allocator)),
        values_(allocator_, (static_cast<size_t>(spec_.dim) * ItemSize(spec_.type) + 3) / 4 * 4),
        headers_(allocator_, sizeof(RowHeader)),
        slots_(allocator_, 0),
        gate_(first_version) {}

  [[nodiscard]] const TableSpec& spec() const { return spec_; }
  [[nodiscard]] uint32_t version() const { return gate_.version(); }
  [[nodiscard]] size_t row_bytes() const { return static_cast<size_t>(spec_.dim) * ItemSize(spec_.type); }

  // ---- reads -------------------------------------------------------------------------------------------

  /// out: (n, dim) of the row type; a key without a row reads as its initial row. found: (n,).
  void Lookup(const ParallelFor& parallel, uint32_t version, KeySpan keys, std::byte* out,
              bool* found) const {
    const auto lock = Read(version, "lookup", keys);
    const size_t bytes = row_bytes();
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      constexpr size_t kGroup = 32;
      uint32_t rows[kGroup];
      for (size_t i = begin; i < end; i += kGroup) {
        const size_t m = std::min(kGroup, end - i);
        index_.Find(keys.data + i, m, rows);
        for (size_t j = 0; j < m; ++j) {
          if (rows[j] != kNoRow) values_.Prefetch(rows[j]);
        }
        for (size_t j = 0; j < m; ++j) {
          found[i + j] = rows[j] != kNoRow;
          std::byte* target = out + (i + j) * bytes;
          if (found[i + j]) {
            std::memcpy(target, values_.At(rows[j]), bytes);
          } else {
            StoreInitial(keys.data[i + j], target);
          }
        }
      }
    });
  }

  /// What is known of each key beside its row: found (n,), frequency (n,) or 0, version (n,) or -1.
  void Inspect(const ParallelFor& parallel, std::string_view op, uint32_t version, KeySpan keys, bool* found,
               int64_t* frequency, int64_t* row_version) const {
    const auto lock = Read(version, op, keys);
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const uint32_t row = index_.Find(keys.data[i]);
        found[i] = row != kNoRow;
        frequency[i] = found[i] ? static_cast<int64_t>(Header(row).frequency) : 0;
        row_version[i] = found[i] ? Header(row).version : -1;
      }
    });
  }

  // ---- writes: each returns the next version -----------------------------------------------------------

  /// Gives every key without a row its initial row.
  uint32_t Insert(const ParallelFor& parallel, uint32_t version, KeySpan keys) {
    const auto lock = Write(version, "lookup_or_insert", keys);
    FindOrInsert(parallel, keys);
    return gate_.Next();
  }

  /// Overwrites or inserts; values: (n, dim) of the row type; of equal keys the last one wins.
  uint32_t Upsert(const ParallelFor& parallel, uint32_t version, KeySpan keys, const std::byte* values) {
    const auto lock = Write(version, "upsert", keys);
    const std::vector<uint32_t> rows = FindOrInsert(parallel, keys);
    for (size_t i = 0; i < keys.n; ++i) {
      PrefetchAhead(rows.data(), i, keys.n);
      std::memcpy(values_.At(rows[i]), values + i * row_bytes(), row_bytes());
      Header(rows[i]).version = last_step_;
    }
    return gate_.Next();
  }

  /// Removes rows with all that belongs to them; keys without a row are passed over.
  uint32_t Remove(uint32_t version, KeySpan keys) {
    const auto lock = Write(version, "remove", keys);
    const size_t free = free_rows_.size() + std::min(keys.n, index_.size());
    if (free > free_rows_.capacity()) free_rows_.reserve(std::max(free, 2 * free_rows_.capacity()));
    for (size_t i = 0; i < keys.n; ++i) {
      if (const uint32_t row = index_.Erase(keys.data[i]); row != kNoRow) free_rows_.push_back(row);
    }
    return gate_.Next();
  }

  /// Removes every row and gives the memory back.
  uint32_t Clear(uint32_t version) {
    const auto lock = Write(version, "clear", {});
    Become(Table(spec_, allocator_, 0));
    return gate_.Next();
  }

  /// Forgets the optimizer's slots of every row, so that another optimizer can take over.
  uint32_t ClearSlots(uint32_t version) {
    const auto lock = Write(version, "clear_slots", {});
    DetachSlots();
    index_.ForEach([&](uint64_t, uint32_t row) { Header(row).has_slots = 0; });
    return gate_.Next();
  }

  // ---- the training write: BeginApply, then Gather and Scatter for each chunk of rows ---------------------
  //
  // BeginApply makes every row that the step needs and all memory it takes, and moves the version on; until
  // the last Scatter nobody else can hold that version, because it is handed on only with the result of the
  // step.

  /// keys are distinct; counts: (n,) occurrences; zeros, all at the end, are padding. Writes the row ids of
  /// the first `active` keys and counts the step in. A negative `step` stands for the one after the last.
  uint32_t BeginApply(const ParallelFor& parallel, uint32_t version, KeySpan keys, const int32_t* counts,
                      int64_t step, const SlotLayout& layout, uint32_t* row_ids, int32_t* active) {
    const auto lock = Write(version, "apply", keys);
    keys.n = CheckMerged(keys, counts);
    const bool had_slots = !layout_.empty();
    AttachSlots(layout);
    std::vector<uint32_t> rows;
    try {
      rows = FindOrInsert(parallel, keys);
    } catch (...) {
      if (!had_slots) DetachSlots();
      throw;
    }
    step = step < 0 ? last_step_ + 1 : step;
    for (size_t i = 0; i < keys.n; ++i) {
      if (i + kAhead < keys.n) headers_.Prefetch(rows[i + kAhead]);
      RowHeader& header = Header(rows[i]);
      header.frequency += static_cast<uint64_t>(counts[i]);
      header.version = step;
    }
    last_step_ = std::max(last_step_, step);
    std::copy(rows.begin(), rows.end(), row_ids);
    *active = static_cast<int32_t>(keys.n);
    return gate_.Next();
  }

  /// Copies n rows out: values (n, dim), fresh (n,) true where no optimizer has written slots yet, and one
  /// array per slot.
  void Gather(const ParallelFor& parallel, uint32_t version, const uint32_t* row_ids, size_t n,
              std::byte* values, bool* fresh, const std::vector<std::byte*>& slots) const {
    const auto lock = Read(version, "apply", {});
    CheckChunk(row_ids, n, slots.size());
    parallel(n, kRowGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        PrefetchAhead(row_ids, i, end);
        const uint32_t row = row_ids[i];
        std::memcpy(values + i * row_bytes(), values_.At(row), row_bytes());
        fresh[i] = Header(row).has_slots == 0;
        for (size_t s = 0; s < slots.size(); ++s) {
          const Slot& slot = layout_.slots()[s];
          std::memcpy(slots[s] + i * slot.bytes, slots_.At(row) + slot.offset, slot.bytes);
        }
      }
    });
  }

  /// Writes back what Gather copied out.
  void Scatter(const ParallelFor& parallel, uint32_t version, const uint32_t* row_ids, size_t n,
               const std::byte* values, const std::vector<const std::byte*>& slots) {
    const auto lock = Write(version, "apply", {});
    CheckChunk(row_ids, n, slots.size());
    parallel(n, kRowGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        PrefetchAhead(row_ids, i, end);
        const uint32_t row = row_ids[i];
        std::memcpy(values_.At(row), values + i * row_bytes(), row_bytes());
        if (!slots.empty()) Header(row).has_slots = 1;  // an optimizer without slots leaves them unwritten
        for (size_t s = 0; s < slots.size(); ++s) {
          const Slot& slot = layout_.slots()[s];
          std::memcpy(slots_.At(row) + slot.offset, slots[s] + i * slot.bytes, slot.bytes);
        }
      }
    });
  }

  // ---- whole tables, from the host ---------------------------------------------------------------------

  [[nodiscard]] size_t Size(uint32_t version) const {
    const auto lock = Read(version, "size", {});
    return index_.size();
  }

  /// Calls f(size, layout, last_step, for_each) under the reader's lock, where for_each(g) calls
  /// g(key, header, value, slots) for every row. snapshot.h is built on this.
  template <class F>
  void Visit(uint32_t version, F f) const {
    const auto lock = Read(version, "export", {});
    f(index_.size(), layout_, last_step_, [&](auto g) {
      index_.ForEach([&](uint64_t key, uint32_t row) {
        g(key, Header(row), values_.At(row), layout_.empty() ? nullptr : slots_.At(row));
      });
    });
  }

  /// Replaces the contents by n rows; row(i) gives {key, header, value, slot record or nullptr}. The table is
  /// unchanged if this throws.
  template <class Row>
  uint32_t Replace(uint32_t version, size_t n, const SlotLayout& layout, int64_t last_step, Row row) {
    Table next(spec_, allocator_, 0);
    next.AttachSlots(layout);
    next.index_.Reserve(n);
    next.ReserveRows(n);
    for (size_t i = 0; i < n; ++i) {
      const auto [key, header, value, slots] = row(i);
      if (next.index_.Find(key) != kNoRow) {
        throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "load", "distinct keys",
                        "key " + std::to_string(static_cast<int64_t>(key)) + " twice",
                        "remove the duplicates first");
      }
      const uint32_t id = next.TakeRow();
      next.index_.Insert(key, id);
      next.NoteWidth(key);
      next.Header(id) = header;
      std::memcpy(next.values_.At(id), value, row_bytes());
      if (slots != nullptr) std::memcpy(next.slots_.At(id), slots, layout.stride());
    }
    next.last_step_ = last_step;
    const auto lock = Write(version, "load", {});
    Become(std::move(next));
    return gate_.Next();
  }

 private:
  static constexpr size_t kGrain = 2048;  // keys: below this, waking a second thread costs more than it saves

  static constexpr size_t kRowGrain = 256;  // rows: the same for copying them with their slots
  static constexpr size_t kAhead = 16;      // rows: how far ahead their cache lines are fetched

  // ---- checks ------------------------------------------------------------------------------------------

  [[nodiscard]] VersionGate::ReadLock Read(uint32_t version, std::string_view op, KeySpan keys) const {
    auto lock = gate_.Read(spec_.name, op, version);
    CheckWidth(op, keys);
    return lock;
  }
  [[nodiscard]] VersionGate::WriteLock Write(uint32_t version, std::string_view op, KeySpan keys) {
    auto lock = gate_.Write(spec_.name, op, version);
    CheckWidth(op, keys);
    return lock;
  }
  void CheckWidth(std::string_view op, KeySpan keys) const {
    if (!keys.narrow || !wide_) return;
    throw MakeError(ErrorCode::kInvalidArgument, spec_.name, op, "64-bit keys, as this table holds them",
                    "32-bit keys made while jax_enable_x64 is off, where JAX cuts 64-bit integers to 32",
                    "pass kvjax.keys(numpy_ids), which is exact; for ids that really have 32 bits, "
                    "kvjax.keys(array) says so");
  }

  /// Number of keys before the padding. Refuses what merging cannot have made: with a key twice, or with
  /// padding in between, an update would be lost.
  [[nodiscard]] size_t CheckMerged(KeySpan keys, const int32_t* counts) const {
    const int32_t* const end = counts + keys.n;
    const int32_t* const padding = std::find_if(counts, end, [](int32_t count) { return count <= 0; });
    const auto active = static_cast<size_t>(padding - counts);
    KeyNumbering distinct(active);
    for (size_t i = 0; i < active; ++i) distinct.Add(keys.data[i]);
    if (distinct.keys().size() < active ||
        std::any_of(padding, end, [](int32_t count) { return count != 0; })) {
      throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "apply", "distinct keys, then padding",
                      "a merged gradient that was changed or joined to another",
                      "give the gradients to kvjax.merge together");
    }
    return active;
  }

  void CheckChunk(const uint32_t* row_ids, size_t n, size_t num_slots) const {
    const bool rows = std::all_of(row_ids, row_ids + n, [&](uint32_t row) { return row < next_row_; });
    if (rows && (num_slots == 0 || num_slots == layout_.slots().size())) return;
    throw MakeError(ErrorCode::kInvalidArgument, spec_.name, "apply", "rows and slots made by BeginApply",
                    "others", "this is a defect of kvjax: please report it");
  }

  // ---- rows --------------------------------------------------------------------------------------------

  [[nodiscard]] RowHeader& Header(uint32_t row) const {
    return *std::launder(reinterpret_cast<RowHeader*>(headers_.At(row)));
  }
  void StoreInitial(uint64_t key, std::byte* row) const {
    spec_.initializer.Generate(
        key, spec_.dim, [&](int64_t column, float value) { StoreElement(spec_.type, row, column, value); });
  }

  /// Row ids of all keys; those without a row get one with their initial value.
  std::vector<uint32_t> FindOrInsert(const ParallelFor& parallel, KeySpan keys) {
    std::vector<uint32_t> rows(keys.n);
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
      index_.Find(keys.data + begin, end - begin, rows.data() + begin);
    });
    const auto missing = static_cast<size_t>(std::count(rows.begin(), rows.end(), kNoRow));
    if (missing == 0) return rows;
    KeyNumbering fresh(missing);
    std::vector<uint32_t> number(missing);
    for (size_t i = 0, m = 0; i < keys.n; ++i) {
      if (rows[i] == kNoRow) number[m++] = fresh.Add(keys.data[i]);
    }
    std::vector<uint32_t> ids(fresh.keys().size());
    index_.Reserve(index_.size() + ids.size());
    ReserveRows(ids.size());
    // Rows are filled while they are still free, because `parallel` may fail: it allocates.
    parallel(ids.size(), 64, [&](size_t begin, size_t end) {
      for (size_t f = begin; f < end; ++f) {
        ids[f] = FreeRow(f);
        Header(ids[f]) = {.frequency = 0, .has_slots = 0, .version = last_step_};
        StoreInitial(fresh.keys()[f], values_.At(ids[f]));
      }
    });
    // From here on nothing can fail.
    for (size_t f = 0; f < ids.size(); ++f) {
      index_.Insert(fresh.keys()[f], TakeRow());
      NoteWidth(fresh.keys()[f]);
    }
    for (size_t i = 0, m = 0; i < keys.n; ++i) {
      if (rows[i] == kNoRow) rows[i] = ids[number[m++]];
    }
    return rows;
  }

  /// Makes room for `n` more rows.
  void ReserveRows(size_t n) {
    const size_t rows = next_row_ + (n > free_rows_.size() ? n - free_rows_.size() : 0);
    if (rows >= kNoRow) {
      throw MakeError(ErrorCode::kResourceExhausted, spec_.name, "insert", "fewer than 2^32 - 1 rows",
                      std::to_string(rows), "spread the table over several shards");
    }
    try {
      values_.Reserve(rows);
      headers_.Reserve(rows);
      slots_.Reserve(rows);
    } catch (...) {
      for (Plane* plane : {&values_, &headers_, &slots_}) plane->Shrink(next_row_);
      throw;
    }
  }
  /// What the (i + 1)-th TakeRow from now on returns.
  [[nodiscard]] uint32_t FreeRow(size_t i) const {
    const size_t n = free_rows_.size();
    return i < n ? free_rows_[n - 1 - i] : next_row_ + static_cast<uint32_t>(i - n);
  }
  uint32_t TakeRow() noexcept {
    if (free_rows_.empty()) return next_row_++;
    const uint32_t row = free_rows_.back();
    free_rows_.pop_back();
    return row;
  }

  void NoteWidth(uint64_t key) {
    const auto k = static_cast<int64_t>(key);
    if (k < INT32_MIN || k > static_cast<int64_t>(UINT32_MAX)) wide_ = true;
  }

  void AttachSlots(const SlotLayout& layout) {
    if (layout == layout_ || layout.empty()) return;
    if (!layout_.empty()) {
      throw MakeError(ErrorCode::kFailedPrecondition, spec_.name, "apply",
                      "the optimizer whose slots the table holds (" + layout_.ToString() + ")",
                      "one with " + layout.ToString(),
                      "table.clear_slots() forgets the old optimizer's state");
    }
    Plane slots(allocator_, std::max<size_t>(layout.stride(), 4));  // slots may have no elements
    slots.Reserve(next_row_);
    SlotLayout copy = layout;
    slots_ = std::move(slots);
    layout_ = std::move(copy);
  }

  void DetachSlots() noexcept {
    slots_ = Plane(allocator_, 0);
    layout_ = {};
  }

  void PrefetchAhead(const uint32_t* row_ids, size_t i, size_t n) const {
    if (i + kAhead >= n) return;
    values_.Prefetch(row_ids[i + kAhead]);
    headers_.Prefetch(row_ids[i + kAhead]);
    if (!layout_.empty()) slots_.Prefetch(row_ids[i + kAhead]);
  }

  /// Takes over the contents of `other`; name and version stay.
  void Become(Table&& other) noexcept {
    index_ = std::move(other.index_);
    values_ = std::move(other.values_);
    headers_ = std::move(other.headers_);
    slots_ = std::move(other.slots_);
    layout_ = std::move(other.layout_);
    free_rows_ = std::move(other.free_rows_);
    next_row_ = other.next_row_;
    last_step_ = other.last_step_;
    wide_ = other.wide_;
  }

  TableSpec spec_;
  std::shared_ptr<SlabAllocator> allocator_;
  KeyIndex index_;
  Plane values_;
  Plane headers_;
  Plane slots_;
  SlotLayout layout_;
  std::vector<uint32_t> free_rows_;
  uint32_t next_row_ = 0;
  int64_t last_step_ = 0;
  bool wide_ = false;
  VersionGate gate_;
};

}  // namespace kvjax
