// Touched: the keys that writes have touched since the cursors of deltas were put there.
//
// A key is all that is remembered: what it has become is read when a delta is made. So rows that came,
// changed, were pinned or went are one case, and so are counts of keys that wait. Keys are written down in
// the order in which they were touched, once since the newest cursor, and an index knows where each one
// stands last: a cursor is a place among them. So one list serves any number of cursors, and what one costs
// depends on what has been touched since, and not on what others still wait for. Nothing here fails a write.
// Where there is no memory, or so much has changed that a delta is worth nothing, the keys are forgotten, and
// a delta has all rows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
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
    cursors_.emplace(token, Cursor{.at = end()});
    return token;
  }

  /// Forgets a cursor, if it is here, and the keys that were for it alone.
  void Close(CursorToken token) noexcept {
    if (cursors_.erase(token) == 0) return;
    const auto oldest = std::find_if(cursors_.begin(), cursors_.end(), IsWanted);
    if (oldest == cursors_.end()) return Lose();
    const size_t go = oldest->second.at - first_, stay = log_.size() - go;
    if (go == 0) return;
    if (2 * stay < keys_.capacity()) {
      KeyIndex rest;
      try {
        rest.Reserve(stay);
      } catch (const std::bad_alloc&) {
        return;  // they are forgotten with the next cursor
      }
      EachLast(go, log_.size(), [&](uint64_t key, uint32_t at) { rest.Insert(key, at); });
      keys_ = std::move(rest);
    } else {
      EachLast(0, go, [&](uint64_t key, uint32_t) { keys_.Erase(key); });
    }
    log_.erase(log_.begin(), log_.begin() + static_cast<ptrdiff_t>(go));
    first_ += static_cast<uint32_t>(go);
  }

  /// Whether there is a cursor to which keys matter.
  [[nodiscard]] bool wanted() const { return std::any_of(cursors_.begin(), cursors_.end(), IsWanted); }
  [[nodiscard]] size_t bytes() const { return keys_.bytes() + log_.size() * sizeof(uint64_t); }

  /// n keys are touched of a table of so many rows; those whose skip(i) is true are not.
  template <class Skip>
  void Add(const uint64_t* keys, size_t n, size_t rows, Skip skip) noexcept {
    if (!wanted()) return;
    if (!Fits(n, rows)) return Lose();
    const uint32_t newest = cursors_.rbegin()->second.at;  // what stands behind it is known to all
    try {
      for (size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) keys_.Prefetch(keys[i + kAhead]);
        if (skip(i)) continue;
        uint32_t* const last = keys_.Locate(keys[i]);
        if (last != nullptr && *last >= newest) continue;
        log_.push_back(keys[i]);
        if (last != nullptr) {
          *last = end() - 1;
        } else {
          keys_.Insert(keys[i], end() - 1);
        }
      }
    } catch (const std::bad_alloc&) {
      Lose();
    }
  }
  void Add(const uint64_t* keys, size_t n, size_t rows) noexcept {
    Add(keys, n, rows, [](size_t) { return false; });
  }

  /// All rows may be others.
  void Lose() noexcept {
    for (auto& [token, cursor] : cursors_) cursor = {.lost = true};
    keys_.Clear();
    log_.clear();
    log_.shrink_to_fit();
    first_ = 0;
  }

  /// The counts of all keys that wait may be others.
  void LoseCounts() noexcept {
    for (auto& [token, cursor] : cursors_) cursor.lost_counts = true;
  }

  struct Since {
    std::vector<uint64_t> keys;
    bool counts_of_all = false;
  };
  /// What has been touched since a cursor; nothing if that is not known.
  [[nodiscard]] std::optional<Since> At(CursorToken token) const {
    const auto found = cursors_.find(token);
    if (found == cursors_.end() || found->second.lost) return std::nullopt;
    const auto& [at, lost, lost_counts] = found->second;
    Since since{{}, lost_counts};
    since.keys.reserve(log_.size() - (at - first_));
    EachLast(at - first_, log_.size(), [&](uint64_t key, uint32_t) { since.keys.push_back(key); });
    return since;
  }

 private:
  /// A place among the keys, from which on they matter to it unless they are lost.
  struct Cursor {
    uint32_t at = 0;
    bool lost = false, lost_counts = false;
  };
  static constexpr size_t kAhead = 16;
  static constexpr size_t kFew = size_t{1} << 16;  // keys that are always worth their memory

  static bool IsWanted(const std::pair<const CursorToken, Cursor>& cursor) { return !cursor.second.lost; }
  /// The place of the next key.
  [[nodiscard]] uint32_t end() const { return first_ + static_cast<uint32_t>(log_.size()); }

  /// Calls f(key, place) for those of the keys begin..end - 1 of the list that have not been touched again.
  template <class F>
  void EachLast(size_t begin, size_t end, F f) const {
    const bool all = log_.size() == keys_.size();
    for (size_t i = begin; i < end; ++i) {
      if (!all && i + kAhead < end) keys_.Prefetch(log_[i + kAhead]);
      const uint32_t at = first_ + static_cast<uint32_t>(i);
      if (all || keys_.Find(log_[i]) == at) f(log_[i], at);
    }
  }

  /// Leaves the places out of keys that have been touched again.
  void Tidy() noexcept {
    auto cursor = cursors_.begin();  // later ones stand behind earlier ones
    uint32_t kept = 0;
    for (size_t i = 0; i < log_.size(); ++i) {
      const uint32_t at = first_ + static_cast<uint32_t>(i);
      for (; cursor != cursors_.end() && cursor->second.at <= at; ++cursor) cursor->second.at = kept;
      if (i + kAhead < log_.size()) keys_.Prefetch(log_[i + kAhead]);
      uint32_t* const last = keys_.Locate(log_[i]);
      if (*last != at) continue;
      *last = kept;
      log_[kept++] = log_[i];
    }
    for (; cursor != cursors_.end(); ++cursor) cursor->second.at = kept;
    log_.resize(kept);
    first_ = 0;
  }

  /// Whether n more keys are worth it, and have space.
  bool Fits(size_t n, size_t rows) noexcept {
    if (keys_.size() + n > std::max(kFew, rows)) return false;
    const size_t places = log_.size() + n;
    if (places > 2 * std::max(kFew, keys_.size() + n) || first_ + places >= kNoRow) Tidy();
    if (log_.size() + n >= kNoRow) return false;
    try {
      keys_.Reserve(keys_.size() + n);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  KeyIndex keys_;             // where each stands last, instead of row ids
  std::deque<uint64_t> log_;  // keys, some of which stand again behind, from place first_ on
  uint32_t first_ = 0;
  std::map<CursorToken, Cursor> cursors_;
};

}  // namespace kvjax
