// The key index: any 64-bit key -> row id.
//
// Linear probing over 16-byte entries, four to a cache line. An empty entry is marked by its row id, so
// no key value is reserved. Removal shifts the entries behind it back (Knuth, TAOCP 3, 6.4 R): there are
// no tombstones, and a table that churns for ever probes as short as a new one. Growth copies the
// 16 bytes of each entry and never a row.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/pages.h"

namespace kvjax {

/// Row id of a key that has no row.
inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;

class KeyIndex {
 public:
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] size_t cells() const { return entries_.size(); }
  [[nodiscard]] size_t bytes() const { return entries_.size() * sizeof(Entry); }

  /// Row id of `key`, or kNoRow.
  [[nodiscard]] uint32_t Find(uint64_t key) const {
    if (entries_.empty()) return kNoRow;
    for (size_t i = Home(key);; i = Next(i)) {
      const Entry& entry = entries_[i];
      if (entry.row == kNoRow || entry.key == key) return entry.row;
    }
  }

  /// rows[i] = Find(keys[i]), with the cache lines of a group of keys fetched before any is read.
  void Find(const uint64_t* keys, size_t n, uint32_t* rows) const {
    constexpr size_t kGroup = 32;
    for (size_t i = 0; i < n; i += kGroup) {
      const size_t end = std::min(n, i + kGroup);
      for (size_t j = i; j < end; ++j) Prefetch(keys[j]);
      for (size_t j = i; j < end; ++j) rows[j] = Find(keys[j]);
    }
  }

  [[gnu::always_inline]] void Prefetch(uint64_t key) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[Home(key)]);
  }

  /// Reserves space for `n` keys in all. Throws std::bad_alloc and then has changed nothing.
  void Reserve(size_t n) {
    size_t cells = std::max<size_t>(entries_.size(), kSmallest);
    while (n > MaxSize(cells)) cells *= 2;
    if (cells != entries_.size()) Rebuild(cells);
  }

  /// Adds a key that is not in the index. Space must have been reserved.
  void Insert(uint64_t key, uint32_t row) noexcept {
    Place(Entry{key, row});
    ++size_;
  }

  /// Where the row id of `key` stands, or nullptr.
  [[nodiscard]] uint32_t* Locate(uint64_t key) noexcept {
    if (entries_.empty()) return nullptr;
    for (size_t i = Home(key);; i = Next(i)) {
      if (entries_[i].row == kNoRow) return nullptr;
      if (entries_[i].key == key) return &entries_[i].row;
    }
  }

  /// Removes `key`; returns the row id it had, or kNoRow.
  uint32_t Erase(uint64_t key) noexcept {
    if (entries_.empty()) return kNoRow;
    size_t hole = Home(key);
    while (entries_[hole].row != kNoRow && entries_[hole].key != key) hole = Next(hole);
    const uint32_t row = entries_[hole].row;
    if (row == kNoRow) return kNoRow;
    // An entry may fill the hole if the hole lies on its way from home to where it stands.
    const size_t mask = entries_.size() - 1;
    for (size_t i = Next(hole); entries_[i].row != kNoRow; i = Next(i)) {
      if (((i - Home(entries_[i].key)) & mask) >= ((i - hole) & mask)) {
        entries_[hole] = entries_[i];
        hole = i;
      }
    }
    entries_[hole] = Entry{};
    --size_;
    return row;
  }

  /// Calls f(key, row) for every key, in no particular order.
  template <class F>
  void ForEach(F f) const {
    for (const Entry& entry : entries_) {
      if (entry.row != kNoRow) f(entry.key, entry.row);
    }
  }

  /// As ForEach, but f may change the row id.
  template <class F>
  void ForEachMutable(F f) noexcept {
    for (Entry& entry : entries_) {
      if (entry.row != kNoRow) f(entry.key, entry.row);
    }
  }

  /// Gives back the memory that fewer than `n` keys do not need. Without memory to do so it stays as it is.
  void Shrink(size_t n) noexcept {
    size_t cells = kSmallest;
    while (std::max(n, size_) > MaxSize(cells)) cells *= 2;
    if (cells >= entries_.size()) return;
    try {
      Rebuild(cells);
    } catch (const std::bad_alloc&) {
    }
  }

  /// How far keys lie from their home, sampled over the first cells: 0 is the home itself.
  struct Probes {
    double mean = 0.0;
    size_t longest = 0;
  };
  [[nodiscard]] Probes SampleProbes() const {
    Probes probes;
    size_t total = 0, keys = 0;
    for (size_t i = 0; i < std::min<size_t>(entries_.size(), 4096); ++i) {
      if (entries_[i].row == kNoRow) continue;
      const size_t distance = (i - Home(entries_[i].key)) & (entries_.size() - 1);
      total += distance;
      probes.longest = std::max(probes.longest, distance);
      ++keys;
    }
    if (keys > 0) probes.mean = static_cast<double>(total) / static_cast<double>(keys);
    return probes;
  }

  /// How many keys fit before the index grows.
  [[nodiscard]] size_t capacity() const { return MaxSize(entries_.size()); }

  /// Forgets every key and gives the memory back.
  void Clear() noexcept {
    Entries().swap(entries_);
    size_ = 0;
  }

 private:
  struct Entry {
    uint64_t key = 0;
    uint32_t row = kNoRow;
  };
  static_assert(sizeof(Entry) == 16);
  using Entries = std::vector<Entry, PageAllocator<Entry>>;
  static constexpr size_t kSmallest = 16;

  // At 5/8 full a hit costs 1.8 probes and a miss 4.1 on average: mostly one cache line.
  static constexpr size_t MaxSize(size_t cells) { return cells / 8 * 5; }
  [[nodiscard]] size_t Home(uint64_t key) const { return Mix(key) >> shift_; }
  [[nodiscard]] size_t Next(size_t i) const { return (i + 1) & (entries_.size() - 1); }

  void Rebuild(size_t cells) {
    Entries old(cells, Entry{});
    old.swap(entries_);
    shift_ = 64 - std::countr_zero(cells);
    for (const Entry& entry : old) {
      if (entry.row != kNoRow) Place(entry);
    }
  }

  void Place(const Entry& entry) noexcept {
    size_t i = Home(entry.key);
    while (entries_[i].row != kNoRow) i = Next(i);
    entries_[i] = entry;
  }

  Entries entries_;
  size_t size_ = 0;
  int shift_ = 63;
};

}  // namespace kvjax
