// The key index in device memory: any 64-bit key -> row id.
//
// Open addressing over buckets of 16 cells. A bucket's 16 one-byte digests are one load; only cells whose
// digest fits are looked at, so most searches read one digest line and one entry. Occupancy is in the
// digests: no key is reserved. A search ends at the first bucket that has an empty cell; an erased cell of a
// bucket without one stays marked until the index is made anew.
//
// The idea of one-byte digests beside the keys is that of Swiss tables (Kulukundis, CppCon 2017) and of
// bucketed GPU tables (WarpCore, Juenger et al. 2020; HierarchicalKV, NVIDIA 2022).
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/secret.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/device/atomic.h"
#include "kvjax/ffi/device/memory.h"

namespace kvjax::device {

/// What an index looks like to a kernel.
class IndexView {
 public:
  static constexpr uint32_t kCells = 16;  // of a bucket

  struct alignas(16) Entry {
    uint64_t key;
    uint32_t row;
    uint32_t unused;
  };
  struct alignas(16) Digests {
    uint32_t words[4];
  };

  IndexView() = default;
  KVJAX_HD IndexView(Digests* digests, Entry* entries, uint64_t buckets, uint64_t secret)
      : digests_(digests), entries_(entries), mask_(buckets - 1), secret_(secret) {}

  /// The row of a key, or kNoRow. Nothing may change the index meanwhile.
  [[nodiscard]] KVJAX_HD uint32_t Find(uint64_t key) const {
    const Entry* const entry = Locate(key);
    return entry == nullptr ? kNoRow : entry->row;
  }

  /// The entry of a key, or nullptr. Nothing may change the index meanwhile.
  [[nodiscard]] KVJAX_HD Entry* Locate(uint64_t key) const {
    const uint64_t hash = PlaceHash(key, secret_);
    const uint32_t wanted = Repeat(Digest(hash));
    for (uint64_t bucket = Home(hash), tried = 0; tried <= mask_; ++tried, bucket = (bucket + 1) & mask_) {
      const Digests digests = digests_[bucket];
      uint32_t empty = 0;
      for (uint32_t w = 0; w < 4; ++w) {
        for (uint32_t fits = Zeros(digests.words[w] ^ wanted); fits != 0; fits &= fits - 1) {
          Entry& entry = entries_[bucket * kCells + 4 * w + Byte(fits)];
          if (entry.key == key) return &entry;
        }
        empty |= Zeros(digests.words[w]);
      }
      if (empty != 0) return nullptr;
    }
    return nullptr;
  }

  /// Gives a key that is not there a row; many lanes may do so for distinct keys at once. Sets `took_empty`
  /// to whether a cell is used that was not in use before. There must be a free cell.
  KVJAX_HD void Insert(uint64_t key, uint32_t row, bool& took_empty) const {
    const uint64_t hash = PlaceHash(key, secret_);
    for (uint64_t bucket = Home(hash);; bucket = (bucket + 1) & mask_) {
      for (uint32_t w = 0; w < 4; ++w) {
        uint32_t& word = digests_[bucket].words[w];
        for (uint32_t seen = Load(word), free; (free = ~seen & kHighBits) != 0;) {
          const uint32_t byte = Byte(free);
          const uint32_t claimed = (seen & ~(0xFFu << (8 * byte))) | Digest(hash) << (8 * byte);
          const bool was_empty = ((seen >> (8 * byte)) & 0xFFu) == kEmpty;
          if (!Exchange(word, seen, claimed)) continue;
          entries_[bucket * kCells + 4 * w + byte] = {key, row, 0};
          took_empty = was_empty;
          return;
        }
      }
    }
  }

  /// Takes a key away; returns its row, or kNoRow if it has none. Many lanes may do so at once, for equal
  /// keys too: one of them gets the row. Sets `gave_empty` to whether the cell is as if it had never been
  /// used.
  KVJAX_HD uint32_t Erase(uint64_t key, bool& gave_empty) const {
    const uint64_t hash = PlaceHash(key, secret_);
    const uint32_t wanted = Repeat(Digest(hash));
    for (uint64_t bucket = Home(hash), tried = 0; tried <= mask_; ++tried, bucket = (bucket + 1) & mask_) {
      const bool ends = HasEmpty(bucket);
      for (uint32_t w = 0; w < 4; ++w) {
        uint32_t& word = digests_[bucket].words[w];
        for (uint32_t fits = Zeros(Load(word) ^ wanted); fits != 0; fits &= fits - 1) {
          const uint32_t byte = Byte(fits);
          const Entry entry = entries_[bucket * kCells + 4 * w + byte];
          if (entry.key != key) continue;
          uint32_t seen = Load(word);
          while (((seen >> (8 * byte)) & 0xFFu) == Digest(hash)) {
            if (!Exchange(word, seen, Erased(seen, byte, ends))) continue;
            gave_empty = ends;
            return entry.row;
          }
          return kNoRow;  // another lane was first
        }
      }
      if (ends) return kNoRow;
    }
    return kNoRow;
  }

  /// The entry of a cell by number, or nullptr if it is free.
  [[nodiscard]] KVJAX_HD Entry* At(uint64_t cell) const {
    const uint32_t word = digests_[cell / kCells].words[cell % kCells / 4];
    return ((word >> (8 * (cell % 4))) & 0x80u) != 0 ? &entries_[cell] : nullptr;
  }
  /// The cell of a key that is there.
  [[nodiscard]] KVJAX_HD uint64_t CellOf(uint64_t key) const {
    return static_cast<uint64_t>(Locate(key) - entries_);
  }
  /// The entry of a cell that is known to be in use, whatever is erased meanwhile.
  [[nodiscard]] KVJAX_HD const Entry& Used(uint64_t cell) const { return entries_[cell]; }
  /// Frees a cell that is known to be in use; many lanes may do so for distinct cells at once. Sets
  /// `gave_empty` as Erase does.
  KVJAX_HD void Free(uint64_t cell, bool& gave_empty) const {
    const uint32_t byte = cell % 4;
    uint32_t& word = digests_[cell / kCells].words[cell % kCells / 4];
    gave_empty = HasEmpty(cell / kCells);
    for (uint32_t seen = Load(word); !Exchange(word, seen, Erased(seen, byte, gave_empty));) {
    }
  }
  /// In how many buckets after its first a key that is there was looked for.
  [[nodiscard]] KVJAX_HD uint64_t Distance(uint64_t cell) const {
    return (cell / kCells - Home(PlaceHash(entries_[cell].key, secret_))) & mask_;
  }

  [[nodiscard]] KVJAX_HD uint64_t cells() const { return (mask_ + 1) * kCells; }

 private:
  static constexpr uint32_t kEmpty = 0, kErased = 1, kHighBits = 0x80808080u;

  [[nodiscard]] KVJAX_HD uint64_t Home(uint64_t hash) const { return (hash >> 16) & mask_; }
  KVJAX_HD static uint32_t Digest(uint64_t hash) { return 0x80u | static_cast<uint32_t>(hash >> 57); }
  KVJAX_HD static uint32_t Repeat(uint32_t byte) { return byte * 0x01010101u; }
  /// The high bit of each byte that is zero.
  KVJAX_HD static uint32_t Zeros(uint32_t word) {
    return ~(((word & ~kHighBits) + ~kHighBits) | word | ~kHighBits);
  }
  /// Whether searches end at a bucket. One that has an empty cell has had one ever since the index was made,
  /// so no search has passed it, and what is erased there becomes empty.
  [[nodiscard]] KVJAX_HD bool HasEmpty(uint64_t bucket) const {
    uint32_t empty = 0;
    for (uint32_t& word : digests_[bucket].words) empty |= Zeros(Load(word));
    return empty != 0;
  }
  KVJAX_HD static uint32_t Erased(uint32_t word, uint32_t byte, bool becomes_empty) {
    return (word & ~(0xFFu << (8 * byte))) | (becomes_empty ? kEmpty : kErased) << (8 * byte);
  }
  /// The number of the first byte whose high bit is set.
  KVJAX_HD static uint32_t Byte(uint32_t high_bits) { return CountTrailingZeros(high_bits) / 8; }

  Digests* digests_;
  Entry* entries_;
  uint64_t mask_;
  uint64_t secret_;
};

/// The memory of an index.
template <class Q>
class Index {
 public:
  Index() = default;
  /// For `keys` keys. Throws std::bad_alloc.
  Index(Q& q, size_t keys)
      : buckets_(BucketsFor(keys)), digests_(q, buckets_), entries_(q, buckets_ * IndexView::kCells) {
    q.Fill(digests_.data(), 0, digests_.bytes());
  }

  [[nodiscard]] IndexView view() const { return {digests_.data(), entries_.data(), buckets_, secret_}; }
  /// Cells that may be in use, so that searches stay short.
  [[nodiscard]] size_t capacity() const { return CapacityOf(buckets_); }
  [[nodiscard]] size_t cells() const { return buckets_ * IndexView::kCells; }
  [[nodiscard]] size_t bytes() const { return digests_.bytes() + entries_.bytes(); }
  void Retire(Q& q) noexcept {
    digests_.Retire(q);
    entries_.Retire(q);
  }

 private:
  static size_t CapacityOf(size_t buckets) { return buckets * IndexView::kCells / 8 * 7; }
  static size_t BucketsFor(size_t keys) {
    size_t buckets = 4;
    while (CapacityOf(buckets) < keys) buckets *= 2;
    return buckets;
  }

  size_t buckets_ = 0;
  uint64_t secret_ = Secret();
  Array<Q, IndexView::Digests> digests_;
  Array<Q, IndexView::Entry> entries_;
};

/// Enters all keys of one index into another, which has none.
template <class Q>
void MoveKeys(Q& q, IndexView from, IndexView to) {
  q.Each(from.cells(), [=] KVJAX_HD(size_t cell) {
    const IndexView::Entry* const entry = from.At(cell);
    bool took_empty;
    if (entry != nullptr) to.Insert(entry->key, entry->row, took_empty);
  });
}

/// All keys with their rows, in no order; n: zero before.
template <class Q>
void ListKeys(Q& q, IndexView index, KeyRow* out, uint32_t* n) {
  q.Each(index.cells(), [=] KVJAX_HD(size_t cell) {
    const IndexView::Entry* const entry = index.At(cell);
    if (entry != nullptr) out[Add(*n, 1u)] = {entry->key, entry->row};
  });
}

}  // namespace kvjax::device
