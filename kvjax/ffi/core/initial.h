// Initial rows: what a key reads as before it has been trained.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvjax/ffi/core/distribution.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/random.h"

namespace kvjax {

inline Distribution::Kind ParseDistribution(const std::string& text) {
  if (text == "constant") return Distribution::Kind::kConstant;
  if (text == "uniform") return Distribution::Kind::kUniform;
  if (text == "normal") return Distribution::Kind::kNormal;
  if (text == "truncated_normal") return Distribution::Kind::kTruncatedNormal;
  throw InitializerError(text);
}

/// How the rows of a table begin: elements by a distribution for each segment of a row, rows of a pool
/// (float32, one after the other), of which the key chooses one, or rows that come with each call. No more
/// than a kernel's argument can hold.
struct Generator {
  enum class Kind { kElements, kPool, kGiven };
  static constexpr size_t kMostSegments = 8;  // MOST_SEGMENTS in _values/generators.py
  struct Segment {
    int64_t end = std::numeric_limits<int64_t>::max();  // the column behind it; of the last one at least the
                                                        // table's dim
    Distribution of = {};
  };
  Kind kind = Kind::kElements;
  bool random = false;  // whether an element depends on its random bits
  std::array<Segment, kMostSegments> segments = {};
  uint64_t seed = 0;

  void Set(size_t at, const Segment& segment) {
    segments[at] = segment;
    random |= segment.of.kind != Distribution::Kind::kConstant;
  }

  /// The random bits of columns 4 * quad to 4 * quad + 3 of a key's initial row.
  [[nodiscard]] KVJAX_HD std::array<uint32_t, 4> Words(uint64_t key, int64_t quad) const {
    if (!random) return {};
    return Philox(
        {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(quad), 0}, seed);
  }

  /// The element of a column below the table's dim, given its 32 random bits.
  [[nodiscard]] KVJAX_HD float Element(int64_t column, uint32_t word) const {
    size_t at = 0;
    while (column >= segments[at].end) ++at;
    return segments[at].of.Element(word);
  }

  /// Which of `rows` rows of a pool a key reads as: floor(Mix(key) / 2^64 * rows), as even as the hash.
  /// Source: Lemire, "Fast random integer generation in an interval", ACM TOMACS 29 (2019).
  KVJAX_HD static uint64_t PoolIndex(uint64_t key, uint64_t rows) { return MulHigh(Mix(key), rows); }
};

/// A generator with its pool.
struct Initializer : Generator {
  std::shared_ptr<const std::vector<float>> pool = nullptr;

  static Kind ParseKind(const std::string& text) {
    if (text == "elements") return Kind::kElements;
    if (text == "pool") return Kind::kPool;
    if (text == "given") return Kind::kGiven;
    throw InitializerError(text);
  }

  /// The row of the pool that a key reads as.
  [[nodiscard]] const float* PoolRow(uint64_t key, int64_t dim) const {
    const auto width = static_cast<size_t>(dim);
    return pool->data() + PoolIndex(key, pool->size() / width) * width;
  }

  /// Calls store(column, value) for columns 0..dim-1 of the key's initial row. This says what it is; tables
  /// have faster ways to the same bits.
  template <class Store>
  void Generate(uint64_t key, int64_t dim, Store store) const {
    if (kind == Kind::kPool) {
      const float* const row = PoolRow(key, dim);
      for (int64_t column = 0; column < dim; ++column) store(column, row[column]);
      return;
    }
    for (int64_t column = 0; column < dim; column += 4) {
      const auto words = Words(key, column / 4);
      for (int64_t i = 0; i < 4 && column + i < dim; ++i) store(column + i, Element(column + i, words[i]));
    }
  }
};

}  // namespace kvjax
