// SortedRows: the rows of a table by (bucket, key).
//
// They are dealt out to parts by the high bits of their buckets, then part by part, which fits into a cache,
// by the low ones; the few of a bucket are sorted by key. No branch depends on how keys compare: a processor
// cannot foresee it.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/avx2.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// A key and its row where there are lists of all of them: without the 4 bytes that align a KeyRow.
struct [[gnu::packed, gnu::aligned(4)]] ListedRow {
  uint64_t key;
  uint32_t row;

  operator KeyRow() const { return {key, row}; }
};
static_assert(sizeof(ListedRow) == 12);

/// What the order of snapshots is by.
inline std::pair<uint32_t, int64_t> PlaceByBucket(uint64_t key) {
  return {BucketOf(key), static_cast<int64_t>(key)};
}

/// Whether one comes before the other in a bucket.
inline bool Precedes(const ListedRow& x, const ListedRow& y) {
  return static_cast<int64_t>(x.key) < static_cast<int64_t>(y.key);
}

/// Rows that are sorted at once.
inline constexpr size_t kFewRows = 32;

/// Sorts a few rows, of distinct keys, by key into another array. A row's place is the number of those that
/// come before it.
inline void SortFewBaseline(const ListedRow* from, size_t n, ListedRow* to) {
  uint32_t place[kFewRows];
  for (size_t i = 0; i < n; ++i) {
    place[i] = 0;
    for (size_t j = 0; j < i; ++j) {
      const uint32_t after = Precedes(from[i], from[j]) ? 1 : 0;
      place[j] += after;
      place[i] += 1 - after;
    }
  }
  for (size_t i = 0; i < n; ++i) to[place[i]] = from[i];
}

#if defined(__x86_64__)
KVJAX_AVX2 inline void SortFewAvx2(const ListedRow* from, size_t n, ListedRow* to) {
  constexpr size_t kLanes = 4;
  alignas(32) int64_t keys[kFewRows], place[kFewRows];
  for (size_t i = 0; i < n; ++i) keys[i] = static_cast<int64_t>(from[i].key);
  for (size_t i = n; i % kLanes != 0; ++i) keys[i] = 0;  // of no row: its place is left
  for (size_t i = 0; i < n; i += kLanes) {
    const __m256i some = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys + i));
    __m256i before = _mm256_setzero_si256();
    for (size_t j = 0; j < n; ++j)
      before = _mm256_sub_epi64(before, _mm256_cmpgt_epi64(some, _mm256_set1_epi64x(keys[j])));
    _mm256_store_si256(reinterpret_cast<__m256i*>(place + i), before);
  }
  for (size_t i = 0; i < n; ++i) to[place[i]] = from[i];
}
#endif

inline void SortFew(const ListedRow* from, size_t n, ListedRow* to) {
#if defined(__x86_64__)
  if (HasAvx2()) return SortFewAvx2(from, n, to);
#endif
  SortFewBaseline(from, n, to);
}

/// Sorts n rows by key from `from`, which loses them, into `to`: runs of a few, then merged by twos.
inline void SortByKey(ListedRow* from, size_t n, ListedRow* to) {
  constexpr size_t kRun = kFewRows;
  for (size_t i = 0; i < n; i += kRun) SortFew(from + i, std::min(kRun, n - i), to + i);
  ListedRow *in = to, *out = from;
  for (size_t run = kRun; run < n; run *= 2, std::swap(in, out)) {
    for (size_t i = 0; i < n; i += 2 * run) {
      const ListedRow *x = in + i, *y = in + std::min(i + run, n);
      const ListedRow *const end_x = y, *const end_y = in + std::min(i + 2 * run, n);
      ListedRow* next = out + i;
      while (x != end_x && y != end_y) {
        const bool second = Precedes(*y, *x);
        *next++ = *(second ? y : x);
        x += second ? 0 : 1;
        y += second ? 1 : 0;
      }
      std::copy(y, end_y, std::copy(x, end_x, next));
    }
  }
  if (in != to) std::copy(in, in + n, to);
}

/// Rows by (bucket, key), and where those of each bucket begin: (kNumBuckets + 1,).
struct SortedRows {
  UnfilledResult<ListedRow> rows;
  std::vector<int64_t> offsets;

  /// Buckets are sorted in so many parts, each of a width that fits into a cache. (Here, as GCC 12 behind
  /// nvcc fails on constants of a template's own.)
  static constexpr uint32_t kParts = 256, kWidth = kNumBuckets / kParts;
  using Places = std::array<size_t, kWidth>;

  /// How many parts of n rows are work enough for a thread: all, if there are few rows.
  static size_t PartGrain(size_t n) { return n < kFew ? kParts : 1; }
  static constexpr size_t kFew = 2048;

  static uint32_t PartOf(uint64_t key) { return BucketOf(key) / kWidth; }

  /// The first row of a part, or the end.
  [[nodiscard]] size_t Begin(size_t part) const { return static_cast<size_t>(offsets[part * kWidth]); }

  /// Sorts a part that holds its rows in any order. Throws std::bad_alloc.
  void SortPart(size_t part) {
    const size_t begin = Begin(part), first_bucket = part * kWidth;
    ListedRow* const to = rows.data() + begin;
    Unfilled<ListedRow> dealt(Begin(part + 1) - begin);
    Places place;
    for (size_t b = 0; b < kWidth; ++b) place[b] = static_cast<size_t>(offsets[first_bucket + b]) - begin;
    for (size_t i = 0; i < dealt.size(); ++i) dealt[place[BucketOf(to[i].key) % kWidth]++] = to[i];
    for (size_t b = 0, first = 0; b < kWidth; first = place[b++]) {
      SortByKey(dealt.data() + first, place[b] - first, to + first);
    }
  }

  /// Counts the rows of each bucket of a part, the first of which is row `begin`.
  void CountPart(size_t part, size_t begin, size_t end) {
    Places count{};
    for (size_t i = begin; i < end; ++i) ++count[BucketOf(rows[i].key) % kWidth];
    for (size_t b = 0; b < kWidth; begin += count[b++]) {
      offsets[part * kWidth + b] = static_cast<int64_t>(begin);
    }
  }
};

/// Deals n rows out to the parts, which are still to be sorted: each(c, f) calls f for those in chunk c of
/// `chunks`, every time the same.
template <class Each>
SortedRows DealByBucket(const ParallelFor& parallel, size_t n, size_t chunks, Each each) {
  constexpr uint32_t kParts = SortedRows::kParts;
  using Counts = std::array<size_t, kParts>;
  std::vector<Counts> next(chunks);  // how many rows of a part a chunk has, then where they go
  parallel(chunks, 1, [&](size_t begin, size_t end) {
    for (size_t c = begin; c < end; ++c) {
      Counts count{};
      each(c, [&](const KeyRow& r) { ++count[SortedRows::PartOf(r.key)]; });
      next[c] = count;
    }
  });
  std::array<size_t, kParts + 1> first{};
  for (size_t p = 0; p < kParts; ++p) {
    first[p + 1] = first[p];
    for (Counts& of_chunk : next) first[p + 1] += std::exchange(of_chunk[p], first[p + 1]);
  }
  SortedRows out{UnfilledResult<ListedRow>(n), std::vector<int64_t>(kNumBuckets + 1)};
  parallel(chunks, 1, [&](size_t begin, size_t end) {
    for (size_t c = begin; c < end; ++c) {
      Counts to = next[c];
      each(c, [&](const KeyRow& r) { out.rows[to[SortedRows::PartOf(r.key)]++] = {r.key, r.row}; });
    }
  });
  parallel(kParts, SortedRows::PartGrain(n), [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) out.CountPart(p, first[p], first[p + 1]);
  });
  out.offsets[kNumBuckets] = static_cast<int64_t>(n);
  return out;
}

/// Sorts n rows, which `each` gives as for DealByBucket.
template <class Each>
SortedRows SortByBucket(const ParallelFor& parallel, size_t n, size_t chunks, Each each) {
  constexpr uint32_t kParts = SortedRows::kParts;
  SortedRows out = DealByBucket(parallel, n, chunks, each);
  parallel(kParts, SortedRows::PartGrain(n), [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) out.SortPart(p);
  });
  return out;
}

/// Sorts rows by (bucket, key). Returns the first position of each bucket.
[[nodiscard]] inline std::vector<int64_t> SortByBucket(std::vector<KeyRow>& rows) {
  SortedRows sorted = SortByBucket(Serial, rows.size(), 1, [&](size_t, auto f) {
    for (const KeyRow& r : rows) f(r);
  });
  std::copy(sorted.rows.begin(), sorted.rows.end(), rows.begin());
  return std::move(sorted.offsets);
}

/// The same where nobody needs the positions, which take longer than a few rows.
inline void SortRows(std::vector<KeyRow>& rows) {
  if (rows.size() >= SortedRows::kFew) return static_cast<void>(SortByBucket(rows));
  std::sort(rows.begin(), rows.end(),
            [](const KeyRow& x, const KeyRow& y) { return PlaceByBucket(x.key) < PlaceByBucket(y.key); });
}

/// All rows of a store, dealt out to the parts.
inline SortedRows DealByBucket(const ParallelFor& parallel, const RowStore& store) {
  const size_t chunks = store.size() < SortedRows::kFew ? 1 : 16;
  return DealByBucket(parallel, store.size(), chunks, [&](size_t chunk, auto f) {
    store.index().ForEach(chunk, chunks, [&](uint64_t key, uint32_t row) { f(KeyRow{key, row}); });
  });
}

}  // namespace kvjax
