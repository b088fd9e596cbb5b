// The key index: any 64-bit key -> row id.
//
// It grows by half, and a part at a time: a second, larger array takes over the homes of the first one after
// the other, some for every key that comes. So no call waits until all keys have moved, and the first one
// gives back its memory as it empties: at most 23 bytes a key are in use.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>

#include "kvjax/ffi/core/buckets.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/search.h"
#include "kvjax/ffi/core/secret.h"

namespace kvjax {

/// Whether 32 bits, signed or unsigned, cannot hold a key.
KVJAX_HD inline bool IsWide(uint64_t key) {
  const auto id = static_cast<int64_t>(key);
  return id < INT32_MIN || id > static_cast<int64_t>(UINT32_MAX);
}

class KeyIndex {
 public:
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] size_t cells() const { return newest().size() * Bucket::kCells; }
  /// Of memory that is in use.
  [[nodiscard]] size_t bytes() const {
    if (!growing()) return first().bytes();
    const auto share = static_cast<double>(moved_) / static_cast<double>(first().size());
    return first().bytes() + next().bytes(static_cast<size_t>(share * static_cast<double>(next().size())));
  }
  /// How many keys fit before the index grows.
  [[nodiscard]] size_t capacity() const { return MaxSize(newest().size()); }

  /// Row id of `key`, or kNoRow.
  [[nodiscard]] uint32_t Find(uint64_t key) const { return FindFrom(Home(key), key); }

  /// rows[i] = Find(keys[i]).
  void Find(const uint64_t* keys, size_t n, uint32_t* rows) const {
    for (size_t begin = 0; begin < n; begin += kChunk)
      FindChunk(keys + begin, std::min(n - begin, kChunk), rows + begin);
  }

  /// Finds n keys and uses their rows: use(i, what found(i, row) has returned, which may fetch what that will
  /// read). Rows that are `known` (n,) are not searched for.
  template <class Found, class Use>
  void FindEach(const uint64_t* keys, size_t n, Found found, Use use, const uint32_t* known = nullptr) const {
    constexpr size_t kAhead = 32;
    std::invoke_result_t<Found, size_t, uint32_t> founds[kAhead];
    uint32_t searched[kChunk];
    for (size_t begin = 0; begin < n; begin += kChunk) {
      const size_t size = std::min(n - begin, kChunk);
      if (known == nullptr) FindChunk(keys + begin, size, searched);
      const uint32_t* const rows = known == nullptr ? searched : known + begin;
      for (size_t i = 0; i < std::min(size, kAhead); ++i) founds[i] = found(begin + i, rows[i]);
      for (size_t i = 0; i < size; ++i) {
        use(begin + i, founds[i % kAhead]);
        if (i + kAhead < size) founds[i % kAhead] = found(begin + i + kAhead, rows[i + kAhead]);
      }
    }
  }

  // See PrefetchRecord.
  [[gnu::always_inline]] void Prefetch(uint64_t key) const { __builtin_prefetch(Home(key)); }

  /// Reserves space for `n` keys in all. Throws std::bad_alloc and then has changed nothing.
  void Reserve(size_t n) {
    const size_t more = n - std::min(n, size_);
    if (n > capacity()) {
      const size_t size = newest().size();
      Buckets larger(std::max({SizeFor(n), size < kSmall ? 2 * size : size / 2 * 3, kSmallest}));
      Move(SIZE_MAX);
      next() = std::move(larger);
      Begin();
    }
    // At this pace all have moved before the first array has got a sixteenth more than fits.
    if (growing()) Move(n > MaxSize(first().size()) + first().size() / 4 ? SIZE_MAX : kPace * more);
  }

  /// Adds a key that is not in the index. Space must have been reserved.
  void Insert(uint64_t key, uint32_t row) noexcept {
    Place(Home(key), key, row);
    ++size_;
  }

  /// The same for n keys that are not equal; those whose row is kNoRow are left out.
  void Insert(const uint64_t* keys, const uint32_t* rows, size_t n) noexcept {
    constexpr size_t kAhead = 16, kRing = 4 * kAhead;  // keys
    Bucket* homes[kRing];
    if (cells() == 0) return;  // then there are none
    for (size_t i = 0; i < n + 2 * kAhead; ++i) {
      if (i < n) __builtin_prefetch(homes[i % kRing] = Home(keys[i]), 1);
      if (const size_t j = i - kAhead; j < n)
        __builtin_prefetch(homes[j % kRing] + homes[j % kRing]->full(), 1);
      if (const size_t j = i - 2 * kAhead; j < n && rows[j] != kNoRow) {
        Place(homes[j % kRing], keys[j], rows[j]);
        ++size_;
      }
    }
  }

  /// Where the row id of `key` stands, or nullptr.
  [[nodiscard]] uint32_t* Locate(uint64_t key) noexcept { return Search(Home(key), key); }

  /// Removes `key`; returns the row id it had, or kNoRow.
  uint32_t Erase(uint64_t key) noexcept {
    const uint32_t row = size_ == 0 ? kNoRow : Find(key);
    if (row == kNoRow) return kNoRow;
    Bucket* bucket = Home(key);
    uint32_t cell;
    for (; (cell = bucket->Find(key)) == Bucket::kCells; bucket = Next(bucket)) --bucket->passed;
    bucket->Remove(cell);
    --size_;
    Refill(bucket);
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
    for (const Buckets& array : arrays_) {
      const Bucket* const end = array.begin() + array.size() * (part + 1) / parts;
      for (const Bucket* bucket = array.begin() + array.size() * part / parts; bucket != end; ++bucket) {
        for (uint32_t c = 0; c < bucket->used; ++c) f(bucket->keys[c], bucket->rows[c]);
      }
    }
  }

  /// As ForEach, but f may change the row id.
  template <class F>
  void ForEachMutable(F f) noexcept {
    for (const Buckets& array : arrays_) {
      for (Bucket& bucket : array) {
        for (uint32_t c = 0; c < bucket.used; ++c) f(bucket.keys[c], bucket.rows[c]);
      }
    }
  }

  /// Gives back the memory that fewer than `n` keys do not need. Without memory to do so it stays as it is.
  void Shrink(size_t n) noexcept {
    const size_t buckets = std::max(SizeFor(std::max(n, size_)), kSmallest);
    if (buckets >= newest().size()) return;
    try {
      KeyIndex smaller;
      smaller.first() = Buckets(buckets);
      ForEach([&](uint64_t key, uint32_t row) { smaller.Insert(key, row); });
      *this = std::move(smaller);
    } catch (const std::bad_alloc&) {
    }
  }

  /// How many buckets keys lie behind their homes: 0 is the home itself.
  struct Probes {
    double mean = 0.0;   // sampled over the first buckets
    size_t longest = 0;  // of all keys that have come since the array was made
  };
  [[nodiscard]] Probes SampleProbes() const {
    Probes probes{.longest = std::max(first().longest, next().longest)};
    const Buckets& array = newest();
    size_t total = 0, keys = 0;
    for (size_t b = 0; b < std::min<size_t>(array.size(), 1024); ++b) {
      const Bucket& bucket = array.begin()[b];
      for (uint32_t c = 0; c < bucket.used; ++c) {
        const size_t home = array.HomeOf(Hash(bucket.keys[c]));
        const size_t distance = b - home + (b < home ? array.size() : 0);
        total += distance;
        ++keys;
      }
    }
    if (keys > 0) probes.mean = static_cast<double>(total) / static_cast<double>(keys);
    return probes;
  }

  /// Forgets every key and gives the memory back.
  void Clear() noexcept { *this = KeyIndex(); }

 private:
  // Of a search, in keys: what is done before rows are used, and what is on its way at a time.
  static constexpr size_t kChunk = 1024, kGroup = 32;
  static constexpr int kTurns = 8;  // that all who have passed a bucket take together
  static constexpr size_t kSmallest = 4;
  static constexpr size_t kSmall = 1024;  // below this it doubles
  static constexpr size_t kPace = 4;      // homes that move for each key that comes

  // 82 of 100 cells: 15.6 bytes a key at most, and 23 once it has grown. One key in seven is then not in its
  // home, which FindEach prepares for.
  static constexpr size_t MaxSize(size_t buckets) { return buckets * 41 / 10; }
  static constexpr size_t SizeFor(size_t keys) { return keys * 10 / 41 + 1; }

  [[nodiscard]] Buckets& first() { return arrays_[0]; }
  [[nodiscard]] Buckets& next() { return arrays_[1]; }
  [[nodiscard]] const Buckets& first() const { return arrays_[0]; }
  [[nodiscard]] const Buckets& next() const { return arrays_[1]; }
  [[nodiscard]] bool growing() const { return next().size() > 0; }
  [[nodiscard]] const Buckets& newest() const { return growing() ? next() : first(); }

  [[nodiscard]] uint64_t Hash(uint64_t key) const { return PlaceHash(key, secret_); }
  /// The bucket where the search for a key begins; nullptr if there is none.
  [[nodiscard, gnu::always_inline]] Bucket* Home(uint64_t key) const {
    const uint64_t hash = Hash(key);
    const size_t home = first().HomeOf(hash);
    if (moved_ == 0) return first().begin() + home;
    const size_t turn = home - start_ + (home < start_ ? first().size() : 0);
    const Buckets& array = arrays_[turn < moved_ ? 1 : 0];  // no branch, which nobody could foresee
    return array.begin() + array.HomeOf(hash);
  }
  /// The same for n keys, and fetches the buckets.
  void Homes(const uint64_t* keys, size_t n, Bucket** homes) const {
    if (moved_ > 0) {
      for (size_t i = 0; i < n; ++i) __builtin_prefetch(homes[i] = Home(keys[i]));
      return;
    }
    const uint64_t secret = secret_, size = first().size();
    Bucket* const begin = first().begin();
    for (size_t i = 0; i < n; ++i)
      __builtin_prefetch(homes[i] = begin + MulHigh(PlaceHash(keys[i], secret), size));
  }
  [[nodiscard]] Bucket* Next(Bucket* bucket) const {
    ++bucket;
    return bucket == first().end() ? first().begin() : bucket == next().end() ? next().begin() : bucket;
  }

  /// Looks into the homes of a group of keys while those of the next are on their way, and then, in turns,
  /// for all keys that have passed these.
  void FindChunk(const uint64_t* keys, size_t n, uint32_t* rows) const {
    static const search::InBuckets in_buckets = search::Best();
    if (newest().size() == 0) {
      std::fill_n(rows, n, kNoRow);
      return;
    }
    Bucket* buckets[kChunk];
    uint32_t which[kChunk];
    std::iota(which, which + n, 0);
    Homes(keys, std::min(n, kGroup), buckets);
    size_t passed = 0;
    for (size_t begin = 0, end; begin < n; begin = end) {
      end = std::min(n, begin + kGroup);
      Homes(keys + end, std::min(n - end, kGroup), buckets + end);
      passed += in_buckets(keys, buckets, which + begin, end - begin, rows, which + passed);
    }
    for (int turn = 0; turn < kTurns && passed > 0; ++turn) {
      for (size_t j = 0; j < passed; ++j) buckets[which[j]] = Next(buckets[which[j]]);
      passed = in_buckets(keys, buckets, which, passed, rows, which);
    }
    for (size_t j = 0; j < passed; ++j) rows[which[j]] = FindFrom(Next(buckets[which[j]]), keys[which[j]]);
  }
  [[nodiscard]] uint32_t FindFrom(Bucket* home, uint64_t key) const {
    const uint32_t* const row = Search(home, key);
    return row == nullptr ? kNoRow : *row;
  }
  [[nodiscard]] uint32_t* Search(Bucket* home, uint64_t key) const {
    if (home == nullptr) return nullptr;
    for (Bucket* bucket = home;;) {
      const uint32_t cell = bucket->Find(key);
      if (cell < Bucket::kCells) return &bucket->rows[cell];
      if (bucket->passed == 0) return nullptr;
      bucket = Next(bucket);
      if (bucket == home) return nullptr;  // in a small array all may have been passed
    }
  }

  void Place(Bucket* bucket, uint64_t key, uint32_t row) noexcept {
    size_t distance = 0;
    for (; bucket->full(); bucket = Next(bucket), ++distance) ++bucket->passed;
    bucket->Add(key, row);
    if (distance == 0) return;
    Buckets& array = Holds(next(), bucket) ? next() : first();
    array.longest = std::max(array.longest, distance);
  }

  /// Gives a cell that has become free to a key that has passed it, and so on: otherwise keys would drift
  /// from their homes as others come and go, and searches become ever longer.
  void Refill(Bucket* free) noexcept {
    const Buckets& array = Holds(next(), free) ? next() : first();
    const auto from = [&](size_t home, const Bucket* to) {
      const auto at = static_cast<size_t>(to - array.begin());
      return at - home + (at < home ? array.size() : 0);
    };
    while (free->passed > 0) {
      const auto hole = static_cast<size_t>(free - array.begin());
      for (Bucket* bucket = Next(free); bucket != free; bucket = Next(bucket)) {
        uint32_t cell = 0;
        while (cell < bucket->used &&
               from(array.HomeOf(Hash(bucket->keys[cell])), bucket) < from(hole, bucket))
          ++cell;
        if (cell == bucket->used) continue;
        free->Add(bucket->keys[cell], bucket->rows[cell]);
        bucket->Remove(cell);
        for (; free != bucket; free = Next(free)) --free->passed;
        break;
      }
    }
  }
  [[nodiscard]] static bool Holds(const Buckets& array, const Bucket* bucket) {
    return bucket >= array.begin() && bucket < array.end();
  }

  /// The next array begins to take over, from a home that no key has passed.
  void Begin() noexcept {
    start_ = moved_ = 0;
    if (first().size() == 0) return Finish();
    // If there is none, the first Move finds no home to stop at and moves all.
    start_ = first().size();
    while (start_ > 0 && first().begin()[start_ - 1].passed > 0) --start_;
    start_ %= first().size();
  }
  void Finish() noexcept {
    first() = std::move(next());
    start_ = moved_ = 0;
  }

  /// Moves the keys of so many homes more, and of those that have passed them.
  void Move(size_t homes) noexcept {
    if (!growing()) return;
    const size_t goal = homes < first().size() - moved_ ? moved_ + homes : first().size();
    for (bool passed = false; moved_ < goal || passed; ++moved_) {
      Bucket& bucket = first().begin()[(start_ + moved_) % first().size()];
      for (uint32_t c = 0; c < bucket.used; ++c) {
        Place(next().begin() + next().HomeOf(Hash(bucket.keys[c])), bucket.keys[c], bucket.rows[c]);
      }
      passed = bucket.passed > 0;
      bucket.used = 0;
      bucket.passed = 0;
    }
    if (moved_ >= first().size()) return Finish();
    const size_t before = start_ == 0 ? 0 : first().size() - start_;  // that moved before the front did
    if (moved_ > before) first().GiveBack(moved_ - before);
  }

  // While it grows, the keys of `moved_` homes from `start_` on are in the second.
  std::array<Buckets, 2> arrays_;
  size_t start_ = 0, moved_ = 0;
  size_t size_ = 0;
  uint64_t secret_ = Secret();
};

}  // namespace kvjax
