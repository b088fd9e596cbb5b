// Frozen: the rows of a table as they were at one moment, copied out part by part while writes go on.
//
// A write keeps the rows that it is about to change, unless they have been copied out (Keep). So there are
// two of a row only where a write has come to it before the reader, and only until the reader has.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/store.h"
#include "kvjax/ffi/cpu/kept.h"
#include "kvjax/ffi/cpu/row_set.h"

namespace kvjax {

class Frozen {
 public:
  /// Of all rows of `store`. Throws std::bad_alloc.
  Frozen(const ParallelFor& parallel, const RowStore& store, size_t row_bytes, bool with_slots,
         int64_t last_step)
      : row_bytes_(row_bytes),
        last_step_(last_step),
        list_(DealByBucket(parallel, store)),
        size_(list_.rows.size()),
        wanted_(parallel, store.end_row(), list_.rows),
        layout_(with_slots ? store.layout() : SlotLayout()),
        kept_(sizeof(RowHeader) + row_bytes_ + layout_.stride()),
        own_(std::make_shared<RowStore>(store.Empty())) {
    std::atomic<bool> pinned = false;
    parallel(wanted_.size(), kGrain, [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end && !pinned; ++row) {
        if (wanted_[row] && store.Header(static_cast<uint32_t>(row)).pinned != 0) pinned = true;
      }
    });
    pinned_ = pinned;
  }

  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] const std::vector<int64_t>& offsets() const { return list_.offsets; }
  [[nodiscard]] const SlotLayout& layout() const { return layout_; }
  [[nodiscard]] int64_t last_step() const { return last_step_; }
  /// Whether a row is pinned.
  [[nodiscard]] bool pinned() const { return pinned_; }

  // ---- by who writes, alone with the table --------------------------------------------------------------

  /// Keeps those of these rows that are still to be copied, before they change. Throws std::bad_alloc.
  void Keep(const ParallelFor& parallel, const RowStore& live, std::span<const uint32_t> rows) {
    written_ = true;
    if (free()) return;
    // Few of them are, as a rule, and to find these is what takes the time of each write while a save lasts.
    Unfilled<uint32_t> found(rows.size());
    std::atomic<size_t> count = 0;
    parallel(rows.size(), kSearch, [&](size_t begin, size_t end) {
      constexpr size_t kGroup = 64, kAhead = 64;
      std::array<uint32_t, kGroup> group;
      for (size_t i = begin; i < end;) {
        size_t n = 0;
        for (; i < end && n < kGroup; ++i) {
          if (i + kAhead < end) wanted_.Prefetch(rows[i + kAhead]);
          if (wanted_[rows[i]]) group[n++] = rows[i];
        }
        std::copy_n(group.begin(), n, found.begin() + static_cast<ptrdiff_t>(count.fetch_add(n)));
      }
    });
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        live.Prefetch(found[i + kAhead]);
        kept_.Prefetch(found[i + kAhead]);
      }
      if (wanted_[found[i]]) KeepOne(live, found[i]);  // a row may be there twice
    }
  }
  /// Keeps all of them.
  void KeepAll(const RowStore& live) {
    written_ = true;
    if (free()) return;
    for (size_t row = 0; row < wanted_.size(); ++row) {
      if (wanted_[row]) KeepOne(live, static_cast<uint32_t>(row));
    }
  }
  /// The table gets other rows, and these are nobody else's from now on.
  void TakeOver(RowStore& live) noexcept { *own_ = std::move(live), taken_over_ = true; }
  /// The same, where another one has taken them over.
  void TakeOver(const Frozen& other) noexcept { own_ = other.own_, taken_over_ = true; }
  /// Whether it no longer wants the table's rows.
  [[nodiscard]] bool free() const { return taken_over_ || copied_ == size_; }

  // ---- by who reads -------------------------------------------------------------------------------------

  /// Sorts the rows that come next; may be called while others write.
  void Sort() {
    const std::lock_guard lock(reading_);
    SortNext();
  }
  /// Copies the next rows, with their slots, to where there is space for some, and returns how many; 0 if
  /// none are left. Called while nobody writes. While writes go on they are few, and no other thread is asked
  /// to help.
  [[nodiscard]] size_t Next(const RowStore& live, SnapshotSpace to) {
    const std::lock_guard lock(reading_);
    SortNext();  // if another reader has taken those that were
    const auto started = std::chrono::steady_clock::now();
    const bool busy = std::exchange(written_, false);
    const size_t begin = copied_, most = busy ? kPart : kPart * kAlone;
    const size_t end = std::min(size_, begin + std::min(to.n, most));
    if (begin == end) return 0;
    to.layout = layout_;
    const std::span<const ListedRow> rows(list_.rows.data() + begin, end - begin);
    const auto copy = [&](size_t first, size_t last) {
      const std::span<const ListedRow> some = rows.subspan(first, last - first);
      CopyRows(taken_over_ ? *own_ : live, some, row_bytes_, to, first,
               [&](size_t i) { return wanted_[some[i].row] ? nullptr : kept_.Find(some[i].row); });
    };
    busy ? Serial(rows.size(), kPart, copy) : OnThreads(rows.size(), kPart, copy);
    for (const ListedRow& r : rows) {
      wanted_[r.row] ? wanted_.Remove(r.row) : kept_.Forget(r.row);
    }
    copied_ = end;
    GiveBack();
    pause_ =
        busy ? kPace * std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count() : 0;
    return end - begin;
  }
  /// Seconds to wait before the next rows, so that writes go on at about their pace.
  [[nodiscard]] double pause() const { return pause_; }

 private:
  static constexpr size_t kPart = size_t{1} << 12;  // rows, for which a write has to wait
  static constexpr size_t kAlone = 8;               // parts at once while there is none
  static constexpr double kPace = 39;               // so a fortieth of the time
  static constexpr size_t kGrain = size_t{1} << 14, kSearch = size_t{1} << 11;

  void KeepOne(const RowStore& live, uint32_t row) {
    std::byte* const to = kept_.Add(row);
    const RowHeader header = live.Header(row);
    std::memcpy(to, &header, sizeof(header));
    std::memcpy(to + sizeof(RowHeader), live.Value(row), row_bytes_);
    if (layout_.stride() > 0)
      std::memcpy(to + sizeof(RowHeader) + row_bytes_, live.Slots(row), layout_.stride());
    wanted_.Remove(row);
  }

  void SortNext() {
    const size_t to = std::min(size_, copied_ + kPart * kAlone), first = sorted_;
    size_t end = first;
    while (end < SortedRows::kParts && list_.Begin(end) < to) ++end;
    const auto sort = [&](size_t begin, size_t last) {
      for (size_t part = begin; part < last; ++part) list_.SortPart(first + part);
    };
    pause_ > 0 ? Serial(end - first, 1, sort) : OnThreads(end - first, 1, sort);
    sorted_ = end;
  }

  /// The memory of what will not be read any more.
  void GiveBack() noexcept {
    if (copied_ == size_) {
      own_.reset();
      UnfilledResult<ListedRow>().swap(list_.rows);
      wanted_ = RowSet();
      kept_ = KeptRows(0);
      return;
    }
    const auto address = [this](size_t row) { return reinterpret_cast<uintptr_t>(list_.rows.data() + row); };
    const uintptr_t from = std::max(given_back_, (address(0) + kHugePage - 1) & ~(kHugePage - 1));
    const uintptr_t to = address(copied_) & ~(kHugePage - 1);
    if (to <= from) return;
    GiveBackPages(reinterpret_cast<std::byte*>(from), to - from);
    given_back_ = to;
  }

  size_t row_bytes_;
  int64_t last_step_;
  SortedRows list_;
  size_t size_;
  RowSet wanted_;  // those that are still to be copied from the table
  SlotLayout layout_;
  KeptRows kept_;  // those rows of the list that are neither wanted nor copied
  bool pinned_ = false;
  size_t sorted_ = 0;  // parts of the list
  size_t copied_ = 0;
  uintptr_t given_back_ = 0;  // up to here
  bool written_ = false;      // since the last rows were copied
  double pause_ = 0;
  bool taken_over_ = false;
  std::shared_ptr<RowStore> own_;  // where the rows are once they are no longer the table's
  std::mutex reading_;
};

}  // namespace kvjax
