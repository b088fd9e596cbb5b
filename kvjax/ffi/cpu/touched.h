// Touched: the keys that writes have touched since the cursors of deltas were put there.
//
// A key is all that is remembered: what it has become is read when a delta is made. So rows that came,
// changed, were pinned or went are one case, and so are counts of keys that wait. A cursor is a number of an
// epoch, and a key has the number of the one in which it was touched last: one index serves any number of
// cursors. Nothing here fails a write. Where there is no memory, or so much has changed that a delta is worth
// nothing, the keys are forgotten, and a delta has all rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

class Touched {
 public:
  /// A cursor that is here now. Throws std::bad_alloc.
  CursorToken Open() {
    const CursorToken token = NextCursor();
    cursors_.emplace(token, epoch_ + 1);
    ++epoch_;
    return token;
  }

  /// Forgets a cursor, if it is here, and the keys that were for it alone.
  void Close(CursorToken token) noexcept {
    if (cursors_.erase(token) == 0) return;
    const uint32_t oldest = Oldest();
    size_t kept = 0;
    keys_.ForEach([&](uint64_t, uint32_t epoch) { kept += epoch >= oldest; });
    if (kept == keys_.size()) return;
    KeyIndex rest;
    try {
      rest.Reserve(kept);
    } catch (const std::bad_alloc&) {
      return;  // they are forgotten with the next cursor
    }
    keys_.ForEach([&](uint64_t key, uint32_t epoch) {
      if (epoch >= oldest) rest.Insert(key, epoch);
    });
    keys_ = std::move(rest);
  }

  /// Whether there is a cursor to which keys matter.
  [[nodiscard]] bool wanted() const {
    return std::any_of(cursors_.begin(), cursors_.end(),
                       [&](const auto& cursor) { return cursor.second > lost_; });
  }
  [[nodiscard]] size_t bytes() const { return keys_.bytes(); }

  /// n keys are touched of a table of so many rows; those whose skip(i) is true are not.
  template <class Skip>
  void Add(const uint64_t* keys, size_t n, size_t rows, Skip skip) noexcept {
    if (!wanted()) return;
    if (!Fits(n, rows)) return Lose();
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) keys_.Prefetch(keys[i + kAhead]);
      if (skip(i)) continue;
      if (uint32_t* const epoch = keys_.Locate(keys[i])) {
        *epoch = epoch_;
      } else {
        keys_.Insert(keys[i], epoch_);
      }
    }
  }
  void Add(const uint64_t* keys, size_t n, size_t rows) noexcept {
    Add(keys, n, rows, [](size_t) { return false; });
  }

  /// All rows may be others.
  void Lose() noexcept {
    lost_ = epoch_;  // no cursor is beyond it
    keys_.Clear();
  }

  /// The counts of all keys that wait may be others.
  void LoseCounts() noexcept { lost_counts_ = epoch_; }

  struct Since {
    std::vector<uint64_t> keys;
    bool counts_of_all = false;
  };
  /// What has been touched since a cursor; nothing if that is not known.
  [[nodiscard]] std::optional<Since> At(CursorToken token) const {
    const auto cursor = cursors_.find(token);
    if (cursor == cursors_.end() || cursor->second <= lost_) return std::nullopt;
    Since since{{}, cursor->second <= lost_counts_};
    keys_.ForEach([&](uint64_t key, uint32_t epoch) {
      if (epoch >= cursor->second) since.keys.push_back(key);
    });
    return since;
  }

 private:
  static constexpr size_t kAhead = 16;
  static constexpr size_t kFew = size_t{1} << 16;  // keys that are always worth their memory

  /// The first epoch of which keys matter.
  [[nodiscard]] uint32_t Oldest() const {
    uint32_t oldest = kNoRow;
    for (const auto& [token, epoch] : cursors_) {
      if (epoch > lost_) oldest = std::min(oldest, epoch);
    }
    return oldest;
  }

  /// Whether n more keys are worth it, and have space.
  bool Fits(size_t n, size_t rows) noexcept {
    if (keys_.size() + n > std::max(kFew, rows)) return false;
    try {
      keys_.Reserve(keys_.size() + n);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  KeyIndex keys_;  // epochs instead of row ids
  std::map<CursorToken, uint32_t> cursors_;
  uint32_t epoch_ = 0, lost_ = 0, lost_counts_ = 0;
};

}  // namespace kvjax
