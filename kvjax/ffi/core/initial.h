// Initial rows: what a key reads as before it has been trained.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/random.h"

namespace kvjax {

/// One of five generators, or rows that come with each call. `a` and `b` are: constant (value, unused),
/// uniform [a, b], normal (mean a, deviation b), truncated normal (mean a, b times a standard normal cut at
/// +-2, as in jax.nn.initializers). A pool holds rows of float32, one after the other, of which the key
/// chooses one. No more than a kernel's argument can hold.
struct Generator {
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal, kPool, kGiven };
  Kind kind = Kind::kConstant;
  double a = 0.0;
  double b = 0.0;
  uint64_t seed = 0;

  /// The random bits of columns 4 * quad to 4 * quad + 3 of a key's initial row.
  [[nodiscard]] KVJAX_HD std::array<uint32_t, 4> Words(uint64_t key, int64_t quad) const {
    return Philox(
        {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(quad), 0}, seed);
  }

  /// Element of one column, given its 32 random bits.
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
      case Kind::kPool:
      case Kind::kGiven:
        break;  // their elements are not random
    }
    return 0.0f;
  }

  /// Which of `rows` rows of a pool a key reads as: floor(Mix(key) / 2^64 * rows), as even as the hash.
  /// Source: Lemire, "Fast random integer generation in an interval", ACM TOMACS 29 (2019).
  KVJAX_HD static uint64_t PoolRow(uint64_t key, uint64_t rows) { return MulHigh(Mix(key), rows); }
};

/// A generator with its pool.
struct Initializer : Generator {
  std::shared_ptr<const std::vector<float>> pool = nullptr;

  static Kind ParseKind(const std::string& text) {
    if (text == "constant") return Kind::kConstant;
    if (text == "uniform") return Kind::kUniform;
    if (text == "normal") return Kind::kNormal;
    if (text == "truncated_normal") return Kind::kTruncatedNormal;
    if (text == "pool") return Kind::kPool;
    if (text == "given") return Kind::kGiven;
    throw InitializerError(text);
  }

  /// Calls store(column, value) for columns 0..dim-1 of the key's initial row.
  template <class Store>
  void Generate(uint64_t key, int64_t dim, Store store) const {
    if (kind == Kind::kConstant) {
      for (int64_t column = 0; column < dim; ++column) store(column, static_cast<float>(a));
      return;
    }
    if (kind == Kind::kPool) {
      const float* row = pool->data() + PoolRow(key, pool->size() / static_cast<size_t>(dim)) * dim;
      for (int64_t column = 0; column < dim; ++column) store(column, row[column]);
      return;
    }
    for (int64_t column = 0; column < dim; column += 4) {
      const auto words = Words(key, column / 4);
      for (int64_t i = 0; i < 4 && column + i < dim; ++i) store(column + i, Element(words[i]));
    }
  }
};

}  // namespace kvjax
