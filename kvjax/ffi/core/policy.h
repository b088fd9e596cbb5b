// Which rows go: eviction policies, and their evaluation over all rows of a table.
//
// Ties are broken by a hash of the key, so the choice depends on what the table holds and not on the order in
// which it came.
#pragma once
#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// A row that may go. The header is a copy: rows lie anywhere in memory, and are looked at several times.
struct Candidate {
  uint64_t key;
  uint32_t row;
  RowHeader header;
};

/// Scores rows by the user's function of that name: one number per row, finite.
using ScoreFunction =
    std::function<void(std::string_view name, const Snapshot& rows, std::vector<double>& out)>;

/// A union of alternatives, each with the reason that its rows are evicted for. An alternative is a formula
/// in reverse Polish notation.
class Policy {
 public:
  /// "reason\nformula\nreason\nformula...", as kvjax._evict writes it; a formula is made of words:
  /// max_age:N  min_frequency:N  min_norm:X  min_score:X:NAME   rows beyond the bound
  /// least_recent:N  least_frequent:N:H  lowest_score:N:NAME    the N rows that come first; "needed" is as
  /// many
  ///     as there must be room for, "-N" all that the table has but N; H is a half-life in steps, 0 for none
  /// and  or  not
  static Policy Parse(std::string_view text) {
    Policy policy;
    while (!text.empty()) {
      const std::string_view reason = Cut(text, '\n');
      std::string_view formula = Cut(text, '\n');
      Alternative alternative{std::string(reason), {}};
      while (!formula.empty()) {
        alternative.words.push_back(ParseWord(Cut(formula, ' ')));
        if (!alternative.words.back().ranks()) continue;
        policy.rankings_.emplace_back(policy.alternatives_.size(), alternative.words.size() - 1);
      }
      policy.alternatives_.push_back(std::move(alternative));
    }
    return policy;
  }

  [[nodiscard]] bool empty() const { return alternatives_.empty(); }
  [[nodiscard]] size_t size() const { return alternatives_.size(); }
  [[nodiscard]] const std::string& reason(size_t i) const { return alternatives_[i].reason; }

  /// What the rows are seen with.
  struct View {
    const RowStore& store;
    RowType type;
    int64_t dim;
    int64_t step;  // ages are counted from here
    const ScoreFunction& score;
    const ParallelFor& parallel;
  };

  /// How many words of the alternatives, one after the other, rank rows; they are numbered in this order.
  [[nodiscard]] size_t rankings() const { return rankings_.size(); }

  /// How many rows the k-th ranking takes in a table of `size` rows that must have room for `needed` more.
  [[nodiscard]] uint64_t Wanted(size_t k, uint64_t needed, uint64_t size) const {
    const Word& word = Ranking(k);
    const auto n = static_cast<uint64_t>(word.n);
    return word.needed ? needed : word.all_but ? size - std::min(n, size) : n;
  }

  /// The n of `rows` that come first in the k-th ranking, unordered; all of them if there are fewer.
  [[nodiscard]] std::vector<Place> First(const View& view, const std::vector<Candidate>& rows, size_t k,
                                         uint64_t n) const {
    const Word& word = Ranking(k);
    const bool scored = word.kind == Kind::kLowest;
    const std::vector<double> scores = scored ? Scores(view, rows, word.name) : std::vector<double>();
    return FirstOf(rows.size(), static_cast<size_t>(std::min<uint64_t>(n, rows.size())), [&](size_t i) {
      const RowHeader& header = rows[i].header;
      uint64_t order = static_cast<uint64_t>(header.version) ^ (uint64_t{1} << 63);
      if (word.kind == Kind::kFrequent) order = Frequency(header, view.step, word.half_life);
      if (word.kind == Kind::kLowest) order = Ascending(scores[i]);
      return Place{order, Mix(rows[i].key), i};
    });
  }

  /// 1 + the alternative that a row is evicted for, or 0, for each of `rows`; ranked: which of them each
  /// ranking takes.
  [[nodiscard]] std::vector<uint32_t> Choose(const View& view, const std::vector<Candidate>& rows,
                                             const std::vector<std::vector<uint8_t>>& ranked) const {
    std::vector<uint32_t> choice(rows.size());
    size_t k = 0;
    for (size_t a = 0; a < alternatives_.size(); ++a) {
      const std::vector<uint8_t> mask = Evaluate(view, rows, alternatives_[a].words, ranked, k);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (mask[i] != 0 && choice[i] == 0) choice[i] = static_cast<uint32_t>(a + 1);
      }
    }
    return choice;
  }

 private:
  enum class Kind { kAge, kFrequency, kNorm, kScore, kRecent, kFrequent, kLowest, kAnd, kOr, kNot };
  struct Word {
    Kind kind;
    double bound = 0.0;
    int64_t n = 0;
    bool all_but = false;  // n is how many stay
    bool needed = false;   // as many as there must be room for
    double half_life = 0.0;
    std::string name;

    [[nodiscard]] bool ranks() const {
      return kind == Kind::kRecent || kind == Kind::kFrequent || kind == Kind::kLowest;
    }
  };
  struct Alternative {
    std::string reason;
    std::vector<Word> words;
  };

  static std::string_view Cut(std::string_view& text, char separator) {
    const size_t end = std::min(text.find(separator), text.size());
    const std::string_view head = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return head;
  }

  template <class T>
  static T Number(std::string_view text) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) throw Unknown(text);
    return value;
  }

  static Error Unknown(std::string_view word) {
    return MakeError(ErrorCode::kInvalidArgument, "", "evict", "a policy made by kvjax.evict", word,
                     "this is a defect of kvjax: please report it");
  }

  static Word ParseWord(std::string_view text) {
    const std::string_view word = Cut(text, ':');
    if (word == "and") return {.kind = Kind::kAnd, .name = {}};
    if (word == "or") return {.kind = Kind::kOr, .name = {}};
    if (word == "not") return {.kind = Kind::kNot, .name = {}};
    const std::string_view first = Cut(text, ':');
    if (word == "max_age") return {.kind = Kind::kAge, .n = Number<int64_t>(first), .name = {}};
    if (word == "min_frequency") return {.kind = Kind::kFrequency, .n = Number<int64_t>(first), .name = {}};
    if (word == "min_norm") return {.kind = Kind::kNorm, .bound = Number<double>(first), .name = {}};
    if (word == "min_score") {
      return {.kind = Kind::kScore, .bound = Number<double>(first), .name = std::string(text)};
    }
    Word ranking{
        .kind = Kind::kRecent, .all_but = first.starts_with('-'), .needed = first == "needed", .name = {}};
    if (!ranking.needed) ranking.n = Number<int64_t>(first.substr(ranking.all_but));
    if (word == "least_recent") return ranking;
    if (word == "least_frequent") {
      ranking.kind = Kind::kFrequent;
      ranking.half_life = Number<double>(text);
      return ranking;
    }
    if (word != "lowest_score") throw Unknown(word);
    ranking.kind = Kind::kLowest;
    ranking.name = text;
    return ranking;
  }

  static std::vector<uint8_t> Evaluate(const View& view, const std::vector<Candidate>& rows,
                                       const std::vector<Word>& words,
                                       const std::vector<std::vector<uint8_t>>& ranked, size_t& k) {
    std::vector<std::vector<uint8_t>> stack;
    for (const Word& word : words) {
      const size_t operands = word.kind == Kind::kAnd || word.kind == Kind::kOr ? 2 : word.kind == Kind::kNot;
      if (stack.size() < operands) throw Unknown("a formula that lacks operands");
      if (operands == 0) {
        stack.push_back(word.ranks() ? ranked[k++] : Test(view, rows, word));
      } else if (operands == 1) {
        for (uint8_t& bit : stack.back()) bit ^= 1;
      } else {
        const std::vector<uint8_t> right = std::move(stack.back());
        stack.pop_back();
        std::vector<uint8_t>& left = stack.back();
        for (size_t i = 0; i < left.size(); ++i) {
          left[i] = word.kind == Kind::kAnd ? left[i] & right[i] : left[i] | right[i];
        }
      }
    }
    if (stack.size() != 1) throw Unknown("a formula of several parts");
    return std::move(stack.back());
  }

  /// Which rows are beyond the bound.
  static std::vector<uint8_t> Test(const View& view, const std::vector<Candidate>& rows, const Word& word) {
    std::vector<uint8_t> mask(rows.size());
    const bool scored = word.kind == Kind::kScore;
    const std::vector<double> scores = scored ? Scores(view, rows, word.name) : std::vector<double>();
    view.parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const RowHeader& header = rows[i].header;
        switch (word.kind) {
          case Kind::kAge:
            mask[i] = Age(header, view.step) > word.n;
            break;
          case Kind::kFrequency:
            mask[i] = static_cast<int64_t>(header.frequency) < word.n;
            break;
          case Kind::kNorm:
            mask[i] = !(Norm(view, rows[i].row) >= word.bound);
            break;
          default:
            mask[i] = scores[i] < word.bound;
        }
      }
    });
    return mask;
  }

  static double Norm(const View& view, uint32_t row) {
    const std::byte* value = view.store.Value(row);
    double sum = 0.0;
    for (int64_t d = 0; d < view.dim; ++d) {
      const double x = LoadElement(view.type, value, d);
      sum += x * x;
    }
    return std::sqrt(sum);
  }

  static std::vector<double> Scores(const View& view, const std::vector<Candidate>& rows,
                                    std::string_view name) {
    constexpr size_t kBatch = size_t{1} << 16;  // so that the copies stay small beside the table
    const size_t row_bytes = static_cast<size_t>(view.dim) * ItemSize(view.type);
    std::vector<double> scores;
    scores.reserve(rows.size());
    for (size_t begin = 0; begin < rows.size(); begin += kBatch) {
      std::vector<KeyRow> batch;
      for (size_t i = begin; i < std::min(begin + kBatch, rows.size()); ++i) {
        batch.push_back({rows[i].key, rows[i].row});
      }
      Snapshot copy = CopyRows(view.store, batch, row_bytes, true);
      copy.last_step = view.step;
      std::vector<double> part(batch.size());
      view.score(name, copy, part);
      scores.insert(scores.end(), part.begin(), part.end());
    }
    return scores;
  }

  /// The n first of place(0), ..., place(total - 1), n <= total.
  template <class F>
  static std::vector<Place> FirstOf(size_t total, size_t n, F place) {
    // The n first so far, unordered, and room for as many again: what cannot be among them is left out early.
    std::vector<Place> first;
    if (n == 0) return first;
    first.reserve(std::min(2 * n, total));
    Place last{UINT64_MAX, UINT64_MAX, 0};
    const auto cut = [&] {
      if (first.size() <= n) return;
      std::nth_element(first.begin(), first.begin() + static_cast<ptrdiff_t>(n - 1), first.end());
      first.resize(n);
      last = first.back();
    };
    for (size_t i = 0; i < total; ++i) {
      const Place next = place(i);
      if (first.size() >= n && last < next) continue;
      first.push_back(next);
      if (first.size() >= 2 * n) cut();
    }
    cut();
    return first;
  }

  /// Steps since the row was written; those of before step 0, which only loading makes, may be too many.
  static int64_t Age(const RowHeader& header, int64_t step) {
    int64_t age;
    return __builtin_sub_overflow(step, header.version, &age) ? INT64_MAX : age;
  }

  /// The frequency, halved for every half-life since the row was written; as a number that sorts alike.
  static uint64_t Frequency(const RowHeader& header, int64_t step, double half_life) {
    if (half_life <= 0.0) return header.frequency;
    const auto age = static_cast<double>(std::max<int64_t>(Age(header, step), 0));
    return std::bit_cast<uint64_t>(static_cast<double>(header.frequency) * std::exp2(-age / half_life));
  }

  /// An integer that sorts as the number does.
  static uint64_t Ascending(double x) {
    constexpr uint64_t kSign = uint64_t{1} << 63;
    const auto bits = std::bit_cast<uint64_t>(x == 0.0 ? 0.0 : x);
    return (bits & kSign) != 0 ? ~bits : bits | kSign;
  }

  static constexpr size_t kGrain = 4096, kAhead = 16;

  [[nodiscard]] const Word& Ranking(size_t k) const {
    return alternatives_[rankings_[k].first].words[rankings_[k].second];
  }

  std::vector<Alternative> alternatives_;
  std::vector<std::pair<size_t, size_t>> rankings_;  // alternative and word
};

}  // namespace kvjax
