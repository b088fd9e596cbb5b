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
#include <type_traits>
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
  [[nodiscard]] uint32_t Find(uint64_t key) const { return FindFrom(Home(key), key); }

  /// Finds n keys in three stages, each a group of keys behind the one before, so that the cache lines that
  /// one wants are on their way while the others work: hashes keys, probes for them, and uses their rows. The
  /// probe ends with found(i, row), which may fetch what use(i, what found has returned) will read.
  template <class Found, class Use>
  void FindEach(const uint64_t* keys, size_t n, Found found, Use use) const {
    constexpr size_t kGroup = 32, kRing = 2 * kGroup;
    size_t homes[kRing];
    std::invoke_result_t<Found, size_t, uint32_t> founds[kRing];
    const auto stage = [n](size_t begin, auto&& work) {
      for (size_t i = begin, end = std::min(n, begin + kGroup); i < end; ++i) work(i);
    };
    for (size_t begin = 0; begin < n + 2 * kGroup; begin += kGroup) {
      stage(begin, [&](size_t i) { PrefetchCell(homes[i % kRing] = Home(keys[i])); });
      if (begin >= kGroup) {
        stage(begin - kGroup,
              [&](size_t i) { founds[i % kRing] = found(i, FindFrom(homes[i % kRing], keys[i])); });
      }
      if (begin >= 2 * kGroup) stage(begin - 2 * kGroup, [&](size_t i) { use(i, founds[i % kRing]); });
    }
  }

  /// rows[i] = Find(keys[i]).
  void Find(const uint64_t* keys, size_t n, uint32_t* rows) const {
    FindEach(
        keys, n, [](size_t, uint32_t row) { return row; }, [&](size_t i, uint32_t row) { rows[i] = row; });
  }

  // See PrefetchRecord.
  [[gnu::always_inline]] void Prefetch(uint64_t key) const { PrefetchCell(Home(key)); }

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
    ForEach(0, 1, f);
  }
  /// The same for the keys in one of so many parts of the index.
  template <class F>
  void ForEach(size_t part, size_t parts, F f) const {
    const size_t end = entries_.size() * (part + 1) / parts;
    for (size_t i = entries_.size() * part / parts; i < end; ++i) {
      if (entries_[i].row != kNoRow) f(entries_[i].key, entries_[i].row);
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

  [[gnu::always_inline]] void PrefetchCell(size_t i) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[i]);
  }

  [[nodiscard]] uint32_t FindFrom(size_t home, uint64_t key) const {
    if (entries_.empty()) return kNoRow;
    for (size_t i = home;; i = Next(i)) {
      const Entry& entry = entries_[i];
      if (entry.row == kNoRow || entry.key == key) return entry.row;
    }
  }

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
