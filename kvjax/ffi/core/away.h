// Rows that live in the user's engine: they are in memory only while a call works on them.
//
// The index and the headers of such a table stay in memory, and its planes are scratch, where the rows of a
// call have places one behind the other: what it wants of them is brought from the engine first, which may
// fail and changes nothing; what it has changed is put back when it ends. Rows that the engine does not take
// stay in memory, and are tried again by the next write before it begins. So a table is always whole: what is
// here is newer than what is there.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/slab.h"

namespace kvjax {

/// What the user's object does for rows under their keys. What it throws stops the call.
struct Engine {
  using Keys = std::span<const uint64_t>;
  /// rows: (n, width) bytes
  std::function<void(std::string_view column, Keys keys, size_t width, std::byte* rows)> get;
  std::function<void(std::string_view column, Keys keys, size_t width, std::vector<std::byte> rows)> put;
  std::function<void(Keys keys)> remove;
};

class RowsAway {
 public:
  enum Column : uint8_t { kNone = 0, kValues = 1, kSlots = 2, kBoth = 3 };

  /// row_bytes: of a value; version: of the table now.
  RowsAway(std::shared_ptr<const Engine> engine, size_t row_bytes, uint32_t version)
      : engine_(std::move(engine)), row_bytes_(row_bytes), seen_(version) {}

  /// Of a store without rows, of the same table.
  [[nodiscard]] std::unique_ptr<RowsAway> Empty() const {
    return std::make_unique<RowsAway>(engine_, row_bytes_, seen_);
  }

  [[nodiscard]] bool here(uint32_t row, Column column) const { return (rows_[row] & column) == column; }

  // ---- where rows are in the planes ---------------------------------------------------------------------

  /// Its place while a call has the row; of others the first one, where no row is.
  [[nodiscard, gnu::always_inline]] uint32_t PlaceOf(uint32_t row) const { return rows_[row] / kPlace; }
  /// Makes space for n more, and returns how many places there are then. Throws std::bad_alloc.
  [[nodiscard]] size_t ReservePlaces(size_t n) {
    if (n >= UINT32_MAX / kPlace - placed_.size()) throw std::bad_alloc();
    Grow(placed_, n);
    return 1 + placed_.size() + n;
  }
  /// Gives a row the next place, unless it has one.
  void Place(uint32_t row) noexcept {
    if (PlaceOf(row) != 0) return;
    placed_.push_back(row);
    rows_[row] += static_cast<uint32_t>(placed_.size()) * kPlace;
  }

  // ---- rows that come and go with their keys, in space that has been reserved ---------------------------

  void Reserve(size_t rows, size_t more) {
    if (rows > rows_.size()) rows_.resize(std::max(rows, 2 * rows_.size()));
    promised_ = more;
    Grow(entries_, more);
  }
  void ReserveErase(size_t n) { Grow(gone_, n); }
  void Inserted(uint64_t key, uint32_t row) noexcept {
    rows_[row] |= kBoth;
    entries_.push_back({key, row});
    if (promised_ > 0) --promised_;
  }
  void Erased(uint64_t key, uint32_t row) noexcept {
    rows_[row] &= ~uint32_t{kBoth};
    gone_.push_back(key);
  }
  /// Its row id, to one that no key has.
  void Moved(uint32_t from, uint32_t to) noexcept {
    if (PlaceOf(from) != 0) placed_[PlaceOf(from) - 1] = to;
    if (PlaceOf(to) != 0) placed_[PlaceOf(to) - 1] = from;
    std::swap(rows_[from], rows_[to]);
  }
  /// Once rows have moved: find(key) gives the row that a key has now.
  template <class Find>
  void Renumber(Find find) noexcept {
    std::erase_if(entries_, [&](KeyRow& r) { return (r.row = find(r.key)) == kNoRow; });
  }

  /// The rows of `before` are replaced by those of `next`, all of which are in memory.
  template <class Store>
  void Replaces(const Store& before, const Store& next) {
    std::vector<uint64_t> gone = before.away()->gone_;
    before.index().ForEach([&](uint64_t key, uint32_t) {
      if (next.index().Find(key) == kNoRow) gone.push_back(key);
    });
    gone_ = std::move(gone);
    changed_ = true;
  }

  // ---- a call -------------------------------------------------------------------------------------------

  /// Before a call, which has its turn.
  void Enter() noexcept { before_ = {entries_.size(), placed_.size()}; }

  /// Before a write: what the engine has not taken yet. Nothing of it is known after that: a key that this
  /// write removes and a later one inserts would be in entries_ twice.
  template <class Store>
  void Begin(const Store& store) {
    if (!changed_) return;
    Flush(store);
    Forget(store, {});
  }

  /// Brings columns of the rows of keys, where there are such. Also slots of a table that has none yet: those
  /// that the call attaches are here then.
  template <class Store>
  void Bring(const Store& store, Engine::Keys keys, Column columns) {
    for (const Column column : {kValues, kSlots}) {
      if ((columns & column) == 0) continue;
      std::vector<KeyRow> rows, first;
      try {
        std::vector<uint32_t> ids(keys.size());
        store.index().Find(keys.data(), keys.size(), ids.data());
        for (size_t i = 0; i < keys.size(); ++i) {
          const KeyRow found{keys[i], ids[i]};
          if (found.row == kNoRow || here(found.row, column)) continue;
          if ((rows_[found.row] & kBoth) == kNone) first.push_back(found);
          rows.push_back(found);
          rows_[found.row] |= column;  // so that no row comes twice
        }
        Grow(entries_, first.size() + promised_);  // a commit that is planned takes no memory
        store.ReservePlaces(first.size());
        for (const KeyRow& r : first) Place(r.row);
        Read(store, column, rows, [&](const KeyRow& r, const std::byte* record) {
          std::memcpy(store.Record(r.row, column == kSlots), record, Width(store, column));
        });
      } catch (...) {
        for (const KeyRow& r : rows) rows_[r.row] &= ~uint32_t{column};
        throw;
      }
      entries_.insert(entries_.end(), first.begin(), first.end());
    }
  }

  /// Calls f(i, record) for those of the rows of which a column is only in the engine.
  template <class Store, class F>
  void ReadAll(const Store& store, Column column, std::span<const KeyRow> rows, F f) const {
    std::vector<KeyRow> away;
    std::vector<size_t> places;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (here(rows[i].row, column)) continue;
      away.push_back(rows[i]), places.push_back(i);
    }
    Read(store, column, away, [&](const KeyRow& r, const std::byte* record) {
      f(places[static_cast<size_t>(&r - away.data())], record);
    });
  }

  /// Calls f(row, record) for a column of rows as the engine has it; slots that nobody has written, or
  /// without elements, are not there.
  template <class Store, class F>
  void Read(const Store& store, Column column, std::span<const KeyRow> rows, F f) const {
    const size_t width = Width(store, column);
    if (width == 0) return;  // the engine has been given nothing
    std::vector<uint64_t> keys;
    std::vector<const KeyRow*> wanted;
    const auto get = [&] {
      if (keys.empty()) return;
      const auto records = std::make_unique_for_overwrite<std::byte[]>(keys.size() * width);
      engine_->get(Name(column), keys, width, records.get());
      for (size_t i = 0; i < keys.size(); ++i) f(*wanted[i], records.get() + i * width);
      keys.clear(), wanted.clear();
    };
    for (const KeyRow& r : rows) {
      if (column == kSlots && store.Header(r.row).has_slots == 0) continue;
      keys.push_back(r.key), wanted.push_back(&r);
      if (keys.size() == kBatch) get();
    }
    get();
  }

  /// After a call, of which the table has this version: puts back what has changed, and gives all places back
  /// unless the call has only planned what another one will do. What a read has brought goes in any case, or
  /// memory would fill up with what is read while the engine refuses rows, or a step waits for its end.
  template <class Store>
  void End(const Store& store, uint32_t version, bool planning, bool writes) noexcept {
    if (std::exchange(seen_, version) != version) changed_ = true;
    if (!writes) Forget(store, before_);
    if (planning) return;
    promised_ = 0;
    if (changed_ && (writes || !failed_)) {
      try {
        Flush(store);
      } catch (...) {  // MakeEngine has said so; the next write says it again
        failed_ = true;
      }
    }
    if (!changed_) Forget(store, {});
  }

 private:
  static constexpr size_t kBatch = size_t{1} << 16;  // rows of one call of the engine
  static constexpr size_t kKept = size_t{32} << 20;  // bytes of each plane, for the places of the next call
  static constexpr uint32_t kPlace = kBoth + 1;      // by which places are counted in rows_

  template <class T>
  static void Grow(std::vector<T>& items, size_t more) {
    const size_t n = items.size() + more;
    if (n > items.capacity()) items.reserve(std::max(n, 2 * items.capacity()));
  }
  template <class T>
  static void Drop(std::vector<T>& items, size_t keep) noexcept {
    items.erase(items.begin() + static_cast<ptrdiff_t>(keep), items.end());
    if (items.empty() && items.capacity() > kBatch) std::vector<T>().swap(items);
  }
  static std::string_view Name(Column column) { return column == kSlots ? "slots" : "values"; }
  template <class Store>
  [[nodiscard]] size_t Width(const Store& store, Column column) const {
    return column == kSlots ? store.layout().stride() : row_bytes_;
  }

  template <class Store>
  void Flush(const Store& store) {
    for (const Column column : {kValues, kSlots}) {
      const size_t width = Width(store, column);
      std::vector<uint64_t> keys;
      std::vector<std::byte> records;
      const auto put = [&] {
        if (!keys.empty()) engine_->put(Name(column), keys, width, std::move(records));
        keys.clear(), records = {};
      };
      for (const KeyRow& r : entries_) {
        if (width == 0 || !here(r.row, column) || store.index().Find(r.key) != r.row) continue;
        if (column == kSlots && store.Header(r.row).has_slots == 0) continue;
        if (keys.empty()) records.reserve(std::min(entries_.size(), kBatch) * width);
        keys.push_back(r.key);
        const std::byte* const record = store.Record(r.row, column == kSlots);
        records.insert(records.end(), record, record + width);
        if (keys.size() == kBatch) put();
      }
      put();
    }
    std::erase_if(gone_, [&](uint64_t key) { return store.index().Find(key) != kNoRow; });
    for (size_t begin = 0; begin < gone_.size(); begin += kBatch) {
      engine_->remove(Engine::Keys(gone_).subspan(begin, std::min(kBatch, gone_.size() - begin)));
    }
    std::vector<uint64_t>().swap(gone_);
    changed_ = failed_ = false;
  }

  /// How many rows have columns in memory, and how many have places.
  struct Sizes {
    size_t entries = 0, placed = 0;
  };
  /// No other rows than the first ones are in memory any more.
  template <class Store>
  void Forget(const Store& store, Sizes first) noexcept {
    for (size_t i = first.entries; i < entries_.size(); ++i) rows_[entries_[i].row] &= ~uint32_t{kBoth};
    for (size_t i = first.placed; i < placed_.size(); ++i) rows_[placed_[i]] &= kBoth;
    Drop(entries_, first.entries), Drop(placed_, first.placed);
    if (placed_.empty()) store.ShrinkPlaces(kKept);
  }

  std::shared_ptr<const Engine> engine_;
  size_t row_bytes_;
  uint32_t seen_;                 // the version at the end of the last call
  bool changed_ = false;          // whether what is here, or gone, is not what the engine has
  bool failed_ = false;           // whether it has refused that
  std::vector<uint32_t> rows_;    // by row: the columns that are in memory, and above these its place
  std::vector<KeyRow> entries_;   // rows with columns in memory
  std::vector<uint32_t> placed_;  // rows with places, from place 1 on
  Sizes before_;                  // when the call began
  size_t promised_ = 0;           // for how many more there must be space, as they are to be inserted
  std::vector<uint64_t> gone_;    // keys whose rows the engine still has
};

}  // namespace kvjax
