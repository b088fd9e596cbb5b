// Rows that are alike: a program computes with single elements once for all rows that keep the same ones.
//
// Adam's count and its two powers, or all that a row has missed since its last step: a batch has few of them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/cpu/program/kernels.h"

namespace kvjax::program {

/// What rows of one call have made of the elements that they keep. A register has a cell for each row.
class Alike {
 public:
  /// `keep`: registers of four bytes by which rows are told apart; `make`: those that follow from them.
  Alike(std::vector<Cell*> keep, std::vector<Cell*> make, size_t rows)
      : keep_(std::move(keep)),
        make_(std::move(make)),
        found_(rows),
        kept_(kMost * keep_.size()),
        made_(kMost * make_.size()) {}

  /// Forgets what rows have made.
  void Clear() { places_.fill(0), known_ = asked_ = 0, useless_ = false; }

  /// Brings a row of each kind that is not known yet to the front. How many there are: for them the registers
  /// are to be made.
  int32_t Find(int32_t rows) {
    const auto n = static_cast<size_t>(rows);
    if (useless_) return rows;
    if (known_ + n > kMost && !Forget()) return rows;
    asked_ += n, first_ = known_;
    for (size_t r = 0; r < n; ++r) found_[r] = KindOf(r);
    return static_cast<int32_t>(known_ - first_);
  }

  /// Gives each row what its kind has made.
  void Give(int32_t rows) {
    if (useless_) return;
    const size_t many = make_.size();
    for (size_t i = first_; i < known_; ++i) {
      for (size_t j = 0; j < many; ++j) made_[i * many + j] = make_[j][i - first_];
    }
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      const Cell* const from = made_.data() + found_[r] * many;
      for (size_t j = 0; j < many; ++j) make_[j][r] = from[j];
    }
  }

 private:
  static constexpr size_t kMost = 512, kPlaces = 2 * kMost;

  [[nodiscard]] static uint32_t WordOf(const Cell& cell) { return static_cast<uint32_t>(cell.word); }

  size_t KindOf(size_t row) {
    const size_t many = keep_.size();
    uint32_t hash = 0, factor = 0x9E3779B1u;
    for (const Cell* of : keep_) hash += WordOf(of[row]) * factor, factor *= 0x85EBCA6Bu;
    size_t place = (hash ^ (hash >> 15)) % kPlaces;
    for (; places_[place] != 0; place = (place + 1) % kPlaces) {
      const size_t kind = places_[place] - 1u;
      const uint32_t* const kept = kept_.data() + kind * many;
      bool same = true;
      for (size_t j = 0; j < many; ++j) same &= kept[j] == WordOf(keep_[j][row]);
      if (same) return kind;
    }
    const size_t kind = known_++;
    places_[place] = static_cast<uint16_t>(known_);
    for (size_t j = 0; j < many; ++j) {
      kept_[kind * many + j] = WordOf(keep_[j][row]);
      keep_[j][kind - first_] = keep_[j][row];  // a row before it, which has been found
    }
    return kind;
  }

  /// Makes room; false where most rows have been of a kind of their own.
  bool Forget() {
    useless_ = 2 * known_ > asked_;
    places_.fill(0), known_ = asked_ = 0;
    return !useless_;
  }

  std::vector<Cell*> keep_, make_;
  std::vector<size_t> found_;               // the kind of each row
  std::array<uint16_t, kPlaces> places_{};  // 1 + the kind whose hash belongs there
  std::vector<uint32_t> kept_;
  std::vector<Cell> made_;
  size_t known_ = 0, first_ = 0, asked_ = 0;
  bool useless_ = false;
};

}  // namespace kvjax::program
