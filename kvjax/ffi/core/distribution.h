// Distributions of the elements of initial rows.
#pragma once
#include <cstdint>

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

  /// Of a normal element, cut or not: how much of the distribution is below it, given its random bits.
  [[nodiscard]] KVJAX_HD double Quantile(uint32_t word) const {
    constexpr double kLow = 0.022750131948179195, kWidth = 0.95449973610364159;  // P(z < -2), P(|z| < 2)
    const bool cut = kind == Kind::kTruncatedNormal;
    return (cut ? kLow : 0.0) + (cut ? kWidth : 1.0) * OpenUnit(word);
  }

  /// An element, given its 32 random bits.
  [[nodiscard]] KVJAX_HD float Element(uint32_t word) const {
    if (kind == Kind::kConstant) return static_cast<float>(a);
    if (kind == Kind::kUniform) return static_cast<float>(a + (b - a) * OpenUnit(word));
    return static_cast<float>(a + b * InverseNormal(Quantile(word)));
  }
};

}  // namespace kvjax
