// Rows under their keys: the index, and the planes of values, headers and slots that share one row id.
//
// A write does all that can fail first (Reserve..., and filling rows that are still free) and changes what
// others see only with calls that cannot.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/away.h"
#include "kvjax/ffi/core/headers.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/slab.h"

namespace kvjax {

class RowStore {
 public:
  RowStore(std::shared_ptr<SlabAllocator> allocator, size_t row_bytes)
      : allocator_(std::move(allocator)),
        values_(allocator_, (row_bytes + 3) / 4 * 4),
        slots_(allocator_, 0),
        headers_(allocator_) {}
  RowStore(RowStore&&) = default;
  RowStore& operator=(RowStore&&) = default;

  /// A store without rows that is made as this one was.
  [[nodiscard]] RowStore Empty() const {
    RowStore empty(allocator_, values_.stride());
    empty.reserved_ = reserved_;
    if (away_) empty.away_ = away_->Empty();
    return empty;
  }

  [[nodiscard]] size_t size() const { return index_.size(); }
  [[nodiscard]] const KeyIndex& index() const { return index_; }
  [[nodiscard]] size_t value_bytes() const { return away_ ? 0 : values_.bytes(next_row_); }
  [[nodiscard]] size_t header_bytes() const { return headers_.bytes(next_row_); }
  [[nodiscard]] size_t slot_bytes() const { return away_ ? 0 : slots_.bytes(next_row_); }
  /// Row ids in use are below this.
  [[nodiscard]] uint32_t end_row() const { return next_row_; }
  /// Whether it has ever held a key that 32 bits, signed or unsigned, cannot.
  [[nodiscard]] bool wide() const { return wide_; }

  // ---- one row -----------------------------------------------------------------------------------------

  [[nodiscard]] RowHeader Header(uint32_t row) const { return headers_.Get(row); }
  /// Its numbers are those that Widen knows of.
  void SetHeader(uint32_t row, const RowHeader& header) noexcept { headers_.Set(row, header); }
  /// The same with what change(header) makes of it.
  template <class Change>
  void ChangeHeader(uint32_t row, Change change) noexcept {
    RowHeader header = headers_.Get(row);
    change(header);
    headers_.Set(row, header);
  }
  void MarkSlots(uint32_t row) noexcept {
    ChangeHeader(row, [](RowHeader& header) { header.has_slots = 1; });
  }
  void SetVersion(uint32_t row, int64_t version) noexcept {
    ChangeHeader(row, [&](RowHeader& header) { header.version = version; });
  }
  [[nodiscard]] std::byte* Value(uint32_t row) const { return values_.At(PlaceOf(row)); }
  /// The record of all slots, or nullptr if there are none.
  [[nodiscard]] std::byte* Slots(uint32_t row) const {
    return layout_.empty() ? nullptr : slots_.At(PlaceOf(row));
  }

  /// Where the rows of such a table are, or nullptr; then only those of a call have values and slots.
  [[nodiscard]] RowsAway* away() const { return away_.get(); }
  void SetAway(std::unique_ptr<RowsAway> away) {
    away->Reserve(std::max<size_t>(next_row_, reserved_), 0);
    away_ = std::move(away);
  }
  /// Of one of the two planes that RowsAway fills.
  [[nodiscard]] std::byte* Record(uint32_t row, bool slots) const { return slots ? Slots(row) : Value(row); }
  /// Space for the records of n rows more to be in memory. Throws std::bad_alloc.
  void ReservePlaces(size_t n) const {
    const size_t places = away_->ReservePlaces(n);
    for (Plane* plane : {&values_, &slots_}) plane->Reserve(places);
  }
  /// Keeps no more of that space than `bytes` of each plane, and the first place.
  void ShrinkPlaces(size_t bytes) const noexcept {
    for (Plane* plane : {&values_, &slots_})
      plane->Shrink(std::max<size_t>(bytes / std::max<size_t>(plane->stride(), 1), 1));
  }

  /// What rows consist of, by bits.
  enum Part : uint8_t { kValue = RowsAway::kValues, kSlot = RowsAway::kSlots, kHeader = 4 };
  /// Before a call that uses parts of n rows, of which row_of(i) is the i-th or kNoRow. See ReadAhead.
  template <class RowOf>
  void ReadAheadOf(size_t n, unsigned parts, RowOf row_of) const {
    ReadAhead* const ahead = allocator_->read_ahead();
    if (ahead == nullptr || parts == 0) return;
    if (layout_.empty()) parts &= ~unsigned{kSlot};
    const auto sample = [&](size_t i) -> const std::byte* {
      const uint32_t row = row_of(i);
      if (row == kNoRow) return nullptr;
      return (parts & kSlot) != 0 ? slots_.At(row) : values_.At(row);
    };
    if (!ahead->Worth(n, sample)) return;
    try {
      std::vector<uintptr_t> pages;
      for (size_t i = 0; i < n; ++i) {
        const uint32_t row = row_of(i);
        if (row == kNoRow) continue;
        if ((parts & kValue) != 0) values_.AddPages(row, pages);
        if ((parts & kSlot) != 0) slots_.AddPages(row, pages);
        if ((parts & kHeader) != 0) headers_.AddPages(row, pages);
      }
      ReadAhead::Ask(std::move(pages));
    } catch (const std::bad_alloc&) {  // then the call waits for one page after the other
    }
  }

  // See PrefetchRecord.
  [[gnu::always_inline]] void PrefetchValue(uint32_t row) const { values_.Prefetch(PlaceOf(row)); }
  [[gnu::always_inline]] void PrefetchHeader(uint32_t row) const { headers_.Prefetch(row); }
  [[gnu::always_inline]] void PrefetchSlots(uint32_t row) const {
    if (!layout_.empty()) slots_.Prefetch(PlaceOf(row));
  }
  [[gnu::always_inline]] void Prefetch(uint32_t row) const {
    PrefetchValue(row);
    PrefetchHeader(row);
    PrefetchSlots(row);
  }

  /// Fetches where the index will look for a key.
  [[gnu::always_inline]] void PrefetchKey(uint64_t key) const { index_.Prefetch(key); }

  // ---- rows made and erased -----------------------------------------------------------------------------

  /// What all row ids are below once `n` more rows have come.
  [[nodiscard]] size_t EndWith(size_t n) const { return next_row_ + n - std::min(n, free_rows_.size()); }

  /// Reserves space for `n` more rows, which mostly come at once. Throws std::bad_alloc.
  void Reserve(size_t n, bool at_once = true) {
    const size_t rows = EndWith(n);
    try {
      EachPart([&](auto& part) { part.Reserve(rows, at_once ? rows : 0); });
      index_.Reserve(index_.size() + n);
      if (away_) away_->Reserve(rows, n);
      if (away_ && at_once) {
        ReservePlaces(n);
        for (size_t i = 0; i < n; ++i) away_->Place(FreeRow(i));
      }
    } catch (...) {  // what was gained is given back, or the next call would find no memory left
      EachPart([&](auto& part) { part.Shrink(std::max<size_t>(next_row_, reserved_)); });
      throw;
    }
  }
  void Count(uint32_t row, uint64_t occurrences, int64_t version) noexcept {
    headers_.Count(row, occurrences, version);
  }
  /// Makes space for the numbers of headers that a write will add and set. Throws std::bad_alloc.
  void Widen(uint64_t occurrences, int64_t version) { headers_.Widen(occurrences, version); }
  /// As Reserve, for `n` rows in all; Compact leaves them that space.
  void ReserveInAll(size_t n) {
    if (n > size()) Reserve(n - size(), /*at_once=*/false);
    reserved_ = std::max(reserved_, n);
  }
  /// Reserves space for `n` more rows to be erased. Throws std::bad_alloc.
  void ReserveErase(size_t n) {
    const size_t free = free_rows_.size() + n;
    if (free > free_rows_.capacity()) free_rows_.reserve(std::max(free, 2 * free_rows_.capacity()));
    if (away_) away_->ReserveErase(n);
  }

  /// The row id that the (i + 1)-th Insert from now on takes; if it has been reserved, it may be filled.
  [[nodiscard]] uint32_t FreeRow(size_t i) const {
    const size_t n = free_rows_.size();
    return i < n ? free_rows_[n - 1 - i] : next_row_ + static_cast<uint32_t>(i - n);
  }
  /// Gives a key that has none a row, in the space that was reserved.
  uint32_t Insert(uint64_t key) noexcept {
    const uint32_t row = FreeRow(0);
    Insert(&key, &row, 1);
    return row;
  }
  /// The same for n keys that are not equal, with the rows that FreeRow has promised; those whose row is
  /// kNoRow get none. Returns how many got one.
  size_t Insert(const uint64_t* keys, const uint32_t* rows, size_t n) noexcept {
    index_.Insert(keys, rows, n);
    size_t taken = 0;
    for (size_t i = 0; i < n; ++i) {
      if (rows[i] == kNoRow) continue;
      ++taken;
      if (away_) away_->Inserted(keys[i], rows[i]);
      wide_ |= IsWide(keys[i]);
    }
    const size_t again = std::min(taken, free_rows_.size());
    free_rows_.resize(free_rows_.size() - again);
    next_row_ += static_cast<uint32_t>(taken - again);
    return taken;
  }
  /// Takes the row of a key away, if it has one. Space must have been reserved.
  bool Erase(uint64_t key) noexcept {
    const uint32_t row = index_.Erase(key);
    if (row == kNoRow) return false;
    free_rows_.push_back(row);
    if (away_) away_->Erased(key, row);
    return true;
  }

  /// Once fewer than half of the rows are left, moves them together and gives the rest of the memory back.
  /// Returns whether row ids have changed.
  bool Compact() noexcept {
    constexpr size_t kWorthIt = 1024;  // rows: less than a page of headers is not
    const size_t live = size(), keep = std::max(live, reserved_);
    if (next_row_ < kWorthIt || 2 * keep > next_row_) return false;
    auto gap = free_rows_.begin();
    index_.ForEachMutable([&](uint64_t, uint32_t& row) {
      if (row < live) return;
      while (*gap >= live) ++gap;  // there is a gap below for every row above
      headers_.Set(*gap, headers_.Get(row));
      if (away_) {
        away_->Moved(row, *gap);
      } else {
        std::memcpy(values_.At(*gap), values_.At(row), values_.stride());
        if (!layout_.empty()) std::memcpy(slots_.At(*gap), slots_.At(row), slots_.stride());
      }
      row = *gap++;
    });
    if (away_) away_->Renumber([&](uint64_t key) { return index_.Find(key); });
    next_row_ = static_cast<uint32_t>(live);
    std::vector<uint32_t>().swap(free_rows_);
    EachPart([&](auto& part) { part.Shrink(keep); });
    index_.Shrink(keep);
    return true;
  }

  // ---- slots -------------------------------------------------------------------------------------------

  [[nodiscard]] const SlotLayout& layout() const { return layout_; }

  /// Slots that no row has yet.
  struct NewSlots {
    Plane plane;
    SlotLayout layout;
  };
  /// Makes slots for all rows and `more` to come, which are to be written. Throws std::bad_alloc.
  [[nodiscard]] NewSlots MakeSlots(const SlotLayout& layout, size_t more) const {
    Plane slots(allocator_, std::max<size_t>(layout.stride(), 4));  // slots may have no elements
    const size_t rows = away_ ? away_->ReservePlaces(more) : EndWith(more);
    slots.Reserve(std::max<size_t>(rows, !away_ && values_.bytes() > 0 ? reserved_ : 0), rows);
    return {std::move(slots), layout};
  }
  /// Gives every row slots, where there were none.
  void AttachSlots(NewSlots slots) noexcept {
    slots_ = std::move(slots.plane);
    layout_ = std::move(slots.layout);
  }
  /// The same in one. Throws std::bad_alloc.
  void AttachSlots(const SlotLayout& layout) {
    if (!layout.empty()) AttachSlots(MakeSlots(layout, 0));
  }
  void DetachSlots() noexcept {
    slots_ = Plane(allocator_, 0);
    layout_ = {};
    index_.ForEach(
        [&](uint64_t, uint32_t row) { ChangeHeader(row, [](RowHeader& header) { header.has_slots = 0; }); });
  }

 private:
  /// Calls f for what has a record of each row.
  template <class F>
  void EachPart(F f) {
    f(headers_);
    if (!away_) f(values_), f(slots_);
  }
  /// Where the records of a row are in the planes: of rows that live in an engine only those of a call are.
  [[nodiscard, gnu::always_inline]] uint32_t PlaceOf(uint32_t row) const {
    return away_ == nullptr ? row : away_->PlaceOf(row);
  }

  std::shared_ptr<SlabAllocator> allocator_;
  KeyIndex index_;
  mutable Plane values_, slots_;  // a read of rows that live in an engine brings them
  Headers headers_;
  SlotLayout layout_;
  std::vector<uint32_t> free_rows_;
  uint32_t next_row_ = 0;
  size_t reserved_ = 0;
  bool wide_ = false;
  std::unique_ptr<RowsAway> away_;
};

}  // namespace kvjax
