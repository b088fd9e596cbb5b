// Eviction policies: their text form, and their evaluation over all rows of a table.
//
// Ties are broken by a hash of the key, so the choice depends on what the table holds and not on the order in
// which it came.
#pragma once
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/rule.h"
#include "kvjax/ffi/core/select.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/store.h"

namespace kvjax {

/// A row that may be evicted. The header is a copy: rows lie anywhere in memory, and are looked at several
/// times.
struct Candidate {
  uint64_t key;
  uint32_t row;
  RowHeader header;
};

/// A union of alternatives, each with the reason that its rows are evicted for. An alternative is a formula
/// in reverse Polish notation.
class Policy {
 public:
  struct Word {
    Rule rule;
    std::string name = {};  // of the score function
    size_t number = 0;      // among the words that rank, or among those that test scores
  };
  struct Alternative {
    std::string reason;
    std::vector<Word> words;
  };

  /// "reason\nformula\nreason\nformula...", as kvjax.evict writes it; a formula is made of words:
  /// max_age:N  min_frequency:N  min_norm:X  min_score:X:NAME   rows beyond the bound
  /// least_recent:N  least_frequent:N:H  lowest_score:N:NAME    the N rows that come first, and more if there
  ///     must be space for more and the ranking is all of the policy; "needed" is as many as there must be
  ///     space for, "-N" all that the table has but N; H is a half-life in steps, 0 for none
  /// and  or  not
  static Policy Parse(std::string_view text) {
    Policy policy;
    while (!text.empty()) {
      const std::string_view reason = Cut(text, '\n');
      std::string_view formula = Cut(text, '\n');
      Alternative& alternative = policy.alternatives_.emplace_back(Alternative{std::string(reason), {}});
      size_t depth = 0;
      while (!formula.empty()) {
        Word word = ParseWord(Cut(formula, ' '));
        const auto operands = static_cast<size_t>(word.rule.operands());
        if (depth < operands) throw PolicyError("a formula that lacks operands");
        depth += 1 - operands;
        if (depth > Truth::kDepth) {
          throw PolicyDepthError(Truth::kDepth);
        }
        const WordAddress address{policy.size() - 1, alternative.words.size()};
        if (word.rule.ranks()) {
          word.number = policy.rankings_.size();
          policy.rankings_.push_back(address);
        } else if (word.rule.scored()) {
          word.number = policy.scored_tests_.size();
          policy.scored_tests_.push_back(address);
        }
        alternative.words.push_back(std::move(word));
      }
      if (depth != 1) throw PolicyError("a formula of several parts");
    }
    if (policy.only() != nullptr) policy.alternatives_[0].words[0].rule.whole = true;
    return policy;
  }

  /// The victims where the table's policy has not made space enough.
  static const Policy& Last() {
    static const auto* const last = new Policy(Parse("capacity\nleast_recent:needed"));
    return *last;  // never destroyed: threads may run when the process ends
  }

  [[nodiscard]] bool empty() const { return alternatives_.empty(); }
  [[nodiscard]] size_t size() const { return alternatives_.size(); }
  [[nodiscard]] const std::string& reason(size_t i) const { return alternatives_[i].reason; }
  [[nodiscard]] const std::vector<Alternative>& alternatives() const { return alternatives_; }
  /// The rule of a policy that is one word.
  [[nodiscard]] const Rule* only() const {
    return size() == 1 && alternatives_[0].words.size() == 1 ? &alternatives_[0].words[0].rule : nullptr;
  }

  /// Whether it chooses among rows that come first by age or by frequency, whatever the other rows are.
  [[nodiscard]] bool among_first() const {
    return std::all_of(alternatives_.begin(), alternatives_.end(), [](const Alternative& a) {
      std::vector<bool> among;
      for (const Word& word : a.words) {
        const Rule& rule = word.rule;
        if (rule.scored()) return false;  // the user's function may compare rows
        if (rule.kind == Rule::Kind::kNot) {
          among.back() = false;
        } else if (rule.operands() == 2) {
          const bool last = among.back();
          among.pop_back();
          among.back() = rule.kind == Rule::Kind::kAnd ? among.back() || last : among.back() && last;
        } else {
          among.push_back(rule.by_age() || rule.by_frequency());
        }
      }
      return static_cast<bool>(among.back());
    });
  }

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

  /// Whether it asks score functions, which are to get rows in one order, wherever these stand in memory.
  [[nodiscard]] bool scored() const {
    return std::any_of(alternatives_.begin(), alternatives_.end(), [](const Alternative& a) {
      return std::any_of(a.words.begin(), a.words.end(), [](const Word& word) { return word.rule.scored(); });
    });
  }

  /// How many rows the k-th ranking takes in a table of `size` rows that must have space for `needed` more.
  [[nodiscard]] uint64_t Wanted(size_t k, uint64_t needed, uint64_t size) const {
    return WordAt(rankings_[k]).rule.Wanted(needed, size);
  }

  /// The n of `rows` that come first in the k-th ranking, unordered; all of them if there are fewer.
  [[nodiscard]] std::vector<RowRank> First(const View& view, const std::vector<Candidate>& rows, size_t k,
                                           uint64_t n) const {
    const Word& word = WordAt(rankings_[k]);
    const std::vector<double> scores =
        word.rule.scored() ? Scores(view, rows, word.name) : std::vector<double>();
    return FirstOf(rows.size(), static_cast<size_t>(std::min<uint64_t>(n, rows.size())), [&](size_t i) {
      const double score = scores.empty() ? 0.0 : scores[i];
      return RowRank{word.rule.Order(rows[i].header, score), Mix(rows[i].key), i};
    });
  }

  /// 1 + the alternative that a row is evicted for, or 0, for each of `rows`; ranked: which of them each
  /// ranking takes.
  [[nodiscard]] std::vector<uint32_t> Choose(const View& view, const std::vector<Candidate>& rows,
                                             const std::vector<std::vector<uint8_t>>& ranked) const {
    std::vector<std::vector<double>> scores;
    for (const WordAddress& address : scored_tests_)
      scores.push_back(Scores(view, rows, WordAt(address).name));
    const std::vector<double> norms = NormsAway(view, rows);
    std::vector<uint32_t> choice(rows.size());
    view.parallel(rows.size(), kGrain, [&](size_t begin, size_t end) {
      std::vector<Truth> truths;
      for (size_t a = 0; a < alternatives_.size(); ++a) {
        truths.assign(end - begin, {});
        for (const auto& [rule, name, number] : alternatives_[a].words) {
          const bool normed = rule.kind == Rule::Kind::kNorm, reads = normed && norms.empty();
          if (reads) {
            view.store.ReadAheadOf(end - begin, RowStore::kValue,
                                   [&](size_t i) { return rows[begin + i].row; });
          }
          for (size_t i = begin; i < end; ++i) {
            if (reads && i + kAhead < end) view.store.PrefetchValue(rows[i + kAhead].row);
            if (rule.operands() > 0) {
              truths[i - begin].Join(rule.kind);
            } else if (rule.ranks()) {
              truths[i - begin].Push(ranked[number][i] != 0);
            } else {
              const double x = !normed          ? (rule.scored() ? scores[number][i] : 0.0)
                               : !norms.empty() ? norms[i]
                                                : Norm(view.type, view.dim, view.store.Value(rows[i].row));
              truths[i - begin].Push(rule.Holds(rows[i].header, view.step, x));
            }
          }
        }
        for (size_t i = begin; i < end; ++i) {
          if (choice[i] == 0 && truths[i - begin].value()) choice[i] = static_cast<uint32_t>(a + 1);
        }
      }
    });
    return choice;
  }

 private:
  struct WordAddress {
    size_t alternative, word;
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
    if (error != std::errc() || end != text.data() + text.size()) throw PolicyError(text);
    return value;
  }

  static Word ParseWord(std::string_view text) {
    const std::string_view word = Cut(text, ':');
    using Kind = Rule::Kind;
    if (word == "and") return {{.kind = Kind::kAnd}};
    if (word == "or") return {{.kind = Kind::kOr}};
    if (word == "not") return {{.kind = Kind::kNot}};
    const std::string_view first = Cut(text, ':');
    if (word == "max_age") return {{.kind = Kind::kAge, .n = Number<int64_t>(first)}};
    if (word == "min_frequency") return {{.kind = Kind::kFrequency, .n = Number<int64_t>(first)}};
    if (word == "min_norm") return {{.kind = Kind::kNorm, .bound = Number<double>(first)}};
    if (word == "min_score") {
      return {{.kind = Kind::kScore, .bound = Number<double>(first)}, std::string(text)};
    }
    Rule ranking{.kind = Kind::kRecent, .all_but = first.starts_with('-'), .needed = first == "needed"};
    if (!ranking.needed) ranking.n = Number<int64_t>(first.substr(ranking.all_but));
    if (word == "least_recent") return {ranking};
    if (word == "least_frequent") {
      ranking.kind = Kind::kFrequent;
      ranking.half_life = Number<double>(text);
      return {ranking};
    }
    if (word != "lowest_score") throw PolicyError(word);
    ranking.kind = Kind::kLowest;
    return {ranking, std::string(text)};
  }

  /// The norm of each row, where a rule wants it and some rows are not in memory.
  [[nodiscard]] std::vector<double> NormsAway(const View& view, const std::vector<Candidate>& rows) const {
    const auto normed = [](const Word& word) { return word.rule.kind == Rule::Kind::kNorm; };
    const bool wanted = std::any_of(alternatives_.begin(), alternatives_.end(), [&](const Alternative& a) {
      return std::any_of(a.words.begin(), a.words.end(), normed);
    });
    const RowsAway* const away = view.store.away();
    if (!wanted || away == nullptr) return {};
    std::vector<double> norms;
    std::vector<KeyRow> all;
    for (const Candidate& r : rows) {
      norms.push_back(
          away->here(r.row, RowsAway::kValues) ? Norm(view.type, view.dim, view.store.Value(r.row)) : 0);
      all.push_back({r.key, r.row});
    }
    away->ReadAll(view.store, RowsAway::kValues, all,
                  [&](size_t i, const std::byte* value) { norms[i] = Norm(view.type, view.dim, value); });
    return norms;
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

  static constexpr size_t kGrain = 4096, kAhead = 16;  // rows

  [[nodiscard]] const Word& WordAt(WordAddress address) const {
    return alternatives_[address.alternative].words[address.word];
  }

  std::vector<Alternative> alternatives_;
  std::vector<WordAddress> rankings_, scored_tests_;
};

}  // namespace kvjax
