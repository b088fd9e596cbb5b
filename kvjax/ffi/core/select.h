// Selection of the n rows that come first: of one shard, and of several, by counting: the shards add up
// tallies, no row travels.
//
// Source: radix selection, from the highest digit on (Knuth, The Art of Computer Programming 3, 5.2.5
// and 5.3.3).
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvjax {

/// Where a row stands in a ranking: the `i`-th of its shard's candidates. No two are equal, wherever they
/// are: the hash is a bijection of the key.
struct RowRank {
  uint64_t order;
  uint64_t hash;
  size_t i;
  bool operator<(const RowRank& other) const {
    return order != other.order ? order < other.order : hash < other.hash;
  }
};

/// The n first of rank(0), ..., rank(total - 1), n <= total.
template <class F>
std::vector<RowRank> FirstOf(size_t total, size_t n, F rank) {
  // The n first so far, unordered, and space for as many again: what cannot be among them is left out
  // early.
  std::vector<RowRank> first;
  if (n == 0) return first;
  first.reserve(std::min(2 * n, total));
  RowRank last{UINT64_MAX, UINT64_MAX, 0};
  const auto cut = [&] {
    if (first.size() <= n) return;
    std::nth_element(first.begin(), first.begin() + static_cast<ptrdiff_t>(n - 1), first.end());
    first.resize(n);
    last = first.back();
  };
  for (size_t i = 0; i < total; ++i) {
    const RowRank next = rank(i);
    if (first.size() >= n && last < next) continue;
    first.push_back(next);
    if (first.size() >= 2 * n) cut();
  }
  cut();
  return first;
}

/// What a shard counts, to be added to what the others do. As words that travel, the halves of a count stand
/// apart, so that their sums over up to 2^16 shards fit.
struct Tally {
  static constexpr size_t kBins = 256, kWords = 2 * kBins;
  std::array<uint64_t, kBins> counts{};

  void Write(uint32_t* words) const {
    for (size_t b = 0; b < kBins; ++b) {
      words[b] = static_cast<uint32_t>(counts[b] & 0xFFFF);
      words[kBins + b] = static_cast<uint32_t>(counts[b] >> 16);
    }
  }
  static Tally Read(const uint32_t* words) {
    Tally tally;
    for (size_t b = 0; b < kBins; ++b) tally.counts[b] = words[b] + (uint64_t{words[kBins + b]} << 16);
    return tally;
  }
};

/// One ranking. Every shard counts, gets the sum and counts again, until the choice is made; all shards are
/// done at the same time.
class Selection {
 public:
  Selection() = default;
  /// ranks: all those of this shard that can be among the first n of all shards; n > 0.
  Selection(std::vector<RowRank> ranks, uint64_t n) : open_(std::move(ranks)), wanted_(n) {}

  /// At first, which bits of `order` differ at all; then how many open ranks there are by their next digit,
  /// which is made of the next bits that do.
  [[nodiscard]] Tally Count() const {
    Tally tally;
    if (!begun_) {
      for (const RowRank& p : open_) {
        for (unsigned b = 0; b < 64; ++b) tally.counts[b] += p.order >> b & 1;
      }
      tally.counts[kTotal] = open_.size();
    } else {
      for (const RowRank& p : open_) ++tally.counts[Digit(p)];
    }
    return tally;
  }

  /// Continues with the sum of the tallies. Returns whether the choice is made.
  bool Continue(const Tally& sum) {
    if (!begun_) {
      begun_ = true;
      total_ = sum.counts[kTotal];
      for (unsigned b = 64; b-- > 0;) {
        if (sum.counts[b] > 0 && sum.counts[b] < total_) bits_.push_back(64 + b);
      }
      for (unsigned b = 64; b-- > 0;) bits_.push_back(b);  // of the hash
      return total_ <= wanted_ && Take();
    }
    size_t bin = 0;
    while (bin + 1 < Tally::kBins && sum.counts[bin] < wanted_) wanted_ -= sum.counts[bin++];
    std::vector<RowRank> open;
    for (const RowRank& p : open_) {
      const size_t digit = Digit(p);
      if (digit < bin) first_.push_back(p);
      if (digit == bin) open.push_back(p);
    }
    open_ = std::move(open);
    next_ += kDigit;
    return (sum.counts[bin] == wanted_ || next_ >= bits_.size()) && Take();
  }

  /// Those of this shard that are chosen.
  [[nodiscard]] const std::vector<RowRank>& first() const { return first_; }
  /// How many ranks there were on all shards.
  [[nodiscard]] uint64_t total() const { return total_; }

 private:
  static constexpr size_t kTotal = 64, kDigit = 8;

  [[nodiscard]] size_t Digit(const RowRank& p) const {
    size_t digit = 0;
    for (size_t k = next_; k < next_ + kDigit && k < bits_.size(); ++k) {
      const unsigned b = bits_[k];
      digit = digit << 1 | ((b < 64 ? p.hash >> b : p.order >> (b - 64)) & 1);
    }
    return digit;
  }
  bool Take() {
    first_.insert(first_.end(), open_.begin(), open_.end());
    open_.clear();
    return true;
  }

  std::vector<RowRank> open_, first_;
  uint64_t wanted_ = 0, total_ = 0;
  std::vector<unsigned> bits_;  // that differ, the highest first: 0..63 of the hash, 64..127 of the order
  size_t next_ = 0;
  bool begun_ = false;
};

}  // namespace kvjax
