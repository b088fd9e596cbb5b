// Frozen: the rows of a table as they were at one moment, copied out part by part while writes go on.
//
// A write keeps the rows that it is about to change, unless they have been copied out (Keep). So there are
// two of a row only where a write has come to it before the reader, and only until the reader has.
#pragma once
#include <algorithm>
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

namespace kvjax {

class Frozen {
 public:
  /// Of all rows of `store`. Throws std::bad_alloc.
  Frozen(const ParallelFor& parallel, const RowStore& store, size_t row_bytes, bool with_slots,
         int64_t last_step)
      : row_bytes_(row_bytes),
        last_step_(last_step),
        sorted_(SortByBucket(parallel, store)),
        place_(store.end_row()),
        own_(std::make_shared<RowStore>(store.Empty())) {
    if (with_slots) layout_ = store.layout();
    record_ = sizeof(RowHeader) + row_bytes_ + layout_.stride();
    parts_.resize(sorted_.rows.size() / kPart + 1);
    parallel(place_.size(), kGrain, [&](size_t begin, size_t end) {
      std::fill(place_.begin() + static_cast<ptrdiff_t>(begin), place_.begin() + static_cast<ptrdiff_t>(end),
                kNoRow);
    });
    parallel(size(), kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) place_[sorted_.rows[i].row] = static_cast<uint32_t>(i);
    });
    for (uint32_t row = 0; row < place_.size() && !pinned_; ++row)
      pinned_ = place_[row] != kNoRow && store.Header(row).pinned != 0;
  }

  [[nodiscard]] size_t size() const { return sorted_.rows.size(); }
  [[nodiscard]] const std::vector<int64_t>& offsets() const { return sorted_.offsets; }
  [[nodiscard]] const SlotLayout& layout() const { return layout_; }
  [[nodiscard]] int64_t last_step() const { return last_step_; }
  /// Whether a row is pinned.
  [[nodiscard]] bool pinned() const { return pinned_; }

  // ---- by who writes, alone with the table --------------------------------------------------------------

  /// Keeps those of these rows that are still to be copied, before they change. Throws std::bad_alloc.
  void Keep(const RowStore& live, std::span<const uint32_t> rows) {
    written_ = true;
    if (free()) return;
    for (const uint32_t row : rows) {
      if (row >= place_.size() || place_[row] == kNoRow || place_[row] < copied_) continue;
      Part& part = parts_[place_[row] / kPart];
      const size_t n = part.places.size();
      part.records.resize((n + 1) * record_);
      part.places.push_back(place_[row]);
      std::byte* const to = part.records.data() + n * record_;
      std::memcpy(to, &live.Header(row), sizeof(RowHeader));
      std::memcpy(to + sizeof(RowHeader), live.Value(row), row_bytes_);
      if (layout_.stride() > 0)
        std::memcpy(to + sizeof(RowHeader) + row_bytes_, live.Slots(row), layout_.stride());
      place_[row] = kNoRow;
    }
  }
  /// Keeps all of them.
  void KeepAll(const RowStore& live) {
    std::vector<uint32_t> rows;
    rows.reserve(size() - copied_);
    for (size_t i = copied_; i < size(); ++i) rows.push_back(sorted_.rows[i].row);
    Keep(live, rows);
  }
  /// The table gets other rows, and these are nobody else's from now on.
  void TakeOver(RowStore& live) noexcept { *own_ = std::move(live), taken_over_ = true; }
  /// The same, where another one has taken them over.
  void TakeOver(const Frozen& other) noexcept { own_ = other.own_, taken_over_ = true; }
  /// Whether it no longer wants the table's rows.
  [[nodiscard]] bool free() const { return taken_over_ || copied_ == size(); }

  // ---- by who reads, while nobody writes ----------------------------------------------------------------

  /// The next rows, with their slots; none are left if it is empty. While writes go on they are few, and no
  /// other thread is asked to help.
  [[nodiscard]] Snapshot Next(const RowStore& live) {
    const std::lock_guard lock(reading_);
    const auto started = std::chrono::steady_clock::now();
    const bool busy = std::exchange(written_, false);
    const size_t begin = copied_, end = std::min(size(), begin + (busy ? kPart : kPart * kAlone));
    Snapshot out;
    out.layout = layout_;
    out.last_step = last_step_;
    out.Resize(end - begin, row_bytes_);
    if (begin == end) return out;
    std::vector<const std::byte*> kept(end - begin);  // the records of rows
    for (size_t i = begin; i < end; i += kPart) {
      const Part& part = parts_[i / kPart];
      for (size_t k = 0; k < part.places.size(); ++k)
        kept[part.places[k] - begin] = part.records.data() + k * record_;
    }
    CopyRows(taken_over_ ? *own_ : live, {sorted_.rows.data() + begin, end - begin}, row_bytes_,
             busy ? ParallelFor(Serial) : ParallelFor(OnThreads), out, [&](size_t i) { return kept[i]; });
    for (size_t i = begin; i < end; i += kPart) parts_[i / kPart] = {};
    copied_ = end;
    if (copied_ == size()) own_.reset();
    pause_ =
        busy ? kPace * std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count() : 0;
    return out;
  }
  /// Seconds to wait before the next rows, so that writes go on at about their pace.
  [[nodiscard]] double pause() const { return pause_; }

 private:
  static constexpr size_t kPart = size_t{1} << 12;  // rows, for which a write has to wait
  static constexpr size_t kAlone = 8;               // parts at once while there is none
  static constexpr double kPace = 19;               // so a twentieth of the time
  static constexpr size_t kGrain = size_t{1} << 14;

  /// Records of rows of a part that were kept: header, value, slots.
  struct Part {
    Unfilled<std::byte> records;
    std::vector<uint32_t> places;
  };

  size_t row_bytes_, record_ = 0;
  int64_t last_step_;
  SortedRows sorted_;
  Unfilled<uint32_t> place_;  // of each row in them; kNoRow if it has none, or has been kept
  std::vector<Part> parts_;
  SlotLayout layout_;
  bool pinned_ = false;
  size_t copied_ = 0;
  bool written_ = false;  // since the last rows were copied
  double pause_ = 0;
  bool taken_over_ = false;
  std::shared_ptr<RowStore> own_;  // where the rows are once they are no longer the table's
  std::mutex reading_;
};

}  // namespace kvjax
