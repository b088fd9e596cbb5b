// One word of a policy, and what it asks of a row: the same on the host and on the device.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/decay.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

KVJAX_HD inline double Norm(RowType type, int64_t dim, const std::byte* value) {
  double sum = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    const double x = LoadElement(type, value, d);
    sum += x * x;
  }
  return std::sqrt(sum);
}

struct Rule {
  enum class Kind : uint32_t {
    kAge,
    kFrequency,
    kNorm,
    kScore,
    kRecent,
    kFrequent,
    kLowest,
    kAnd,
    kOr,
    kNot
  };
  Kind kind;
  bool all_but = false;  // n is how many stay
  bool needed = false;   // as many as there must be space for
  bool whole = false;    // all of a policy: it takes at least as many as there must be space for
  int64_t n = 0;
  double bound = 0.0;
  double half_life = 0.0;

  /// Whether it takes the rows that come first.
  [[nodiscard]] KVJAX_HD bool ranks() const {
    return kind == Kind::kRecent || kind == Kind::kFrequent || kind == Kind::kLowest;
  }
  /// Whether it needs the scores that a function of the user gives.
  [[nodiscard]] KVJAX_HD bool scored() const { return kind == Kind::kScore || kind == Kind::kLowest; }
  /// Whether it is about the ages of rows, or about how often their keys have occurred.
  [[nodiscard]] KVJAX_HD bool by_age() const { return kind == Kind::kAge || kind == Kind::kRecent; }
  [[nodiscard]] KVJAX_HD bool by_frequency() const {
    return kind == Kind::kFrequency || kind == Kind::kFrequent;
  }
  /// How many truths it joins to one.
  [[nodiscard]] KVJAX_HD int operands() const {
    return kind == Kind::kAnd || kind == Kind::kOr ? 2 : kind == Kind::kNot ? 1 : 0;
  }

  /// How many rows a ranking takes in a table of `size` rows that must have space for `missing` more.
  [[nodiscard]] KVJAX_HD uint64_t Wanted(uint64_t missing, uint64_t size) const {
    const auto number = static_cast<uint64_t>(n);
    if (!all_but) return needed || (whole && number < missing) ? missing : number;
    return size - (number < size ? number : size);
  }

  /// Where a row stands in a ranking, lowest first, whatever the step is; `score` is its score, if the rule
  /// needs one.
  [[nodiscard]] KVJAX_HD uint64_t Order(const RowHeader& header, double score = 0.0) const {
    if (kind == Kind::kRecent) return static_cast<uint64_t>(header.version);  // from 0 on
    if (kind == Kind::kLowest) return OrderOf(score);
    return half_life > 0.0 ? DecayedOrder(header.frequency, header.version, half_life) : header.frequency;
  }

  /// Of a bound of ages or frequencies: it holds for the rows that stand before this, in the order by which
  /// rankings take them first.
  [[nodiscard]] KVJAX_HD uint64_t End(int64_t step) const {
    const int64_t end = kind == Kind::kAge ? step - n : n;
    return end < 0 ? 0 : static_cast<uint64_t>(end);
  }

  /// Whether a row is beyond the bound; `x` is its norm or score, if the rule is about one.
  [[nodiscard]] KVJAX_HD bool Holds(const RowHeader& header, int64_t step, double x) const {
    switch (kind) {
      case Kind::kAge:
        return step - header.version > n;
      case Kind::kFrequency:
        return static_cast<int64_t>(header.frequency) < n;
      case Kind::kNorm:
        return !(x >= bound);
      default:
        return x < bound;
    }
  }
};

/// The truth of a formula in reverse Polish notation, word by word.
class Truth {
 public:
  static constexpr size_t kDepth = 64;  // operands that may wait

  KVJAX_HD void Push(bool holds) { bits_ = bits_ << 1 | (holds ? 1 : 0); }
  KVJAX_HD void Join(Rule::Kind kind) {
    const uint64_t last = bits_ & 1;
    if (kind == Rule::Kind::kNot) bits_ ^= 1;
    if (kind == Rule::Kind::kAnd) bits_ = (bits_ >> 1) & (~uint64_t{1} | last);
    if (kind == Rule::Kind::kOr) bits_ = bits_ >> 1 | last;
  }
  [[nodiscard]] KVJAX_HD bool value() const { return (bits_ & 1) != 0; }

 private:
  uint64_t bits_ = 0;
};

}  // namespace kvjax
