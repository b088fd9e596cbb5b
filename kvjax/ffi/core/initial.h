// Initial rows: what a key reads as before it has been trained.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/random.h"

namespace kvjax {

/// How an element is distributed. `a` and `b` are: constant (value, unused), uniform [a, b], normal (mean a,
/// deviation b), truncated normal (mean a, b times a standard normal cut at +-2, as in jax.nn.initializers).
struct Distribution {
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal };
  Kind kind = Kind::kConstant;
  double a = 0.0;
  double b = 0.0;

  static Kind ParseKind(const std::string& text) {
    if (text == "constant") return Kind::kConstant;
    if (text == "uniform") return Kind::kUniform;
    if (text == "normal") return Kind::kNormal;
    if (text == "truncated_normal") return Kind::kTruncatedNormal;
    throw InitializerError(text);
  }

  /// An element, given its 32 random bits.
  [[nodiscard]] KVJAX_HD float Element(uint32_t word) const {
    switch (kind) {
      case Kind::kConstant:
        return static_cast<float>(a);
      case Kind::kUniform:
        return static_cast<float>(a + (b - a) * OpenUnit(word));
      case Kind::kNormal:
        return static_cast<float>(a + b * InverseNormal(OpenUnit(word)));
      case Kind::kTruncatedNormal: {
        constexpr double kLow = 0.022750131948179195, kWidth = 0.95449973610364159;  // P(z < -2), P(|z| < 2)
        return static_cast<float>(a + b * InverseNormal(kLow + kWidth * OpenUnit(word)));
      }
    }
    return 0.0f;
  }
};

/// How the rows of a table begin: elements by a distribution for each segment of a row, rows of a pool
/// (float32, one after the other), of which the key chooses one, or rows that come with each call. No more
/// than a kernel's argument can hold.
struct Generator {
  enum class Kind { kElements, kPool, kGiven };
  static constexpr size_t kMostSegments = 8;  // MOST_SEGMENTS in _values/generators.py
  struct Segment {
    int64_t end = std::numeric_limits<int64_t>::max();  // the column behind it; the last one has what is left
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
  KVJAX_HD static uint64_t PoolRow(uint64_t key, uint64_t rows) { return MulHigh(Mix(key), rows); }
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

  /// Calls store(column, value) for columns 0..dim-1 of the key's initial row.
  template <class Store>
  void Generate(uint64_t key, int64_t dim, Store store) const {
    if (kind == Kind::kPool) {
      const float* row = pool->data() + PoolRow(key, pool->size() / static_cast<size_t>(dim)) * dim;
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
