// The choice of victims on the device: the rules of cpu/space.h and core/policy.h, decided on the device.
// Whether rows have to be evicted is known only there, so the kernels are queued whenever it is possible, and
// find out themselves whether there is anything to do.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/clock.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/rule.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/memory.h"
#include "kvjax/ffi/device/ranking.h"

namespace kvjax::device {

/// The state of a choice, in device memory.
struct Choice {
  enum Asked : uint32_t { kNobody, kPolicy, kLast };  // the one that is asked if the policy is not enough
  Asked asked;
  bool was_asked[2];
  int64_t step;     // ages are counted from here
  uint64_t size;    // rows
  uint64_t after;   // rows with those to come, if none were evicted
  uint64_t excess;  // of these, beyond the capacity
  uint64_t needed;  // rows that the one who is asked shall make space for
  Counts chosen;    // rows
};

/// How many rows have been evicted for a reason, and whether a policy has ever looked for such.
struct Evicted {
  Counts rows;
  uint32_t asked;
};

struct PolicyWord {
  Rule rule;
  uint32_t ranking;  // its number among the words that rank
  uint32_t column;   // the same among those that need scores
  bool ends;         // an alternative
};

/// A policy as kernels see it.
struct PolicyView {
  const PolicyWord* words;
  size_t size;
  const uint32_t* reasons;  // by alternative
  size_t alternatives;
  Ranking* rankings;
  const double* scores;  // (columns, cells)
};

/// A policy in device memory. Reasons have the numbers that numbers(reason) gives.
template <class Q>
class DevicePolicy {
 public:
  DevicePolicy() = default;
  template <class Numbers>
  DevicePolicy(Q& q, const Policy& policy, Numbers numbers) {
    for (const auto& [reason, all] : policy.alternatives()) {
      reasons_.push_back(numbers(reason));
      for (const Policy::Word& word : all) {
        words_.push_back({word.rule, rankings_, static_cast<uint32_t>(names_.size()), &word == &all.back()});
        if (word.rule.ranks()) ++rankings_;
        if (word.rule.scored()) names_.push_back(word.name);
      }
    }
    there_words_ = Array<Q, PolicyWord>(q, words_.size());
    there_reasons_ = Array<Q, uint32_t>(q, reasons_.size());
    WriteFromHost(q, there_words_.data(), words_.data(), words_.size());
    WriteFromHost(q, there_reasons_.data(), reasons_.data(), reasons_.size());
  }

  [[nodiscard]] bool empty() const { return reasons_.empty(); }
  [[nodiscard]] const std::vector<PolicyWord>& words() const { return words_; }
  [[nodiscard]] const std::vector<uint32_t>& reasons() const { return reasons_; }
  [[nodiscard]] size_t rankings() const { return rankings_; }
  /// The score functions, by column.
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  [[nodiscard]] PolicyView view(Ranking* rankings, const double* scores) const {
    return {there_words_.data(), words_.size(), there_reasons_.data(), reasons_.size(), rankings, scores};
  }
  void Retire(Q& q) noexcept {
    there_words_.Retire(q);
    there_reasons_.Retire(q);
  }

 private:
  std::vector<PolicyWord> words_;
  std::vector<uint32_t> reasons_;
  std::vector<std::string> names_;
  uint32_t rankings_ = 0;
  Array<Q, PolicyWord> there_words_;
  Array<Q, uint32_t> there_reasons_;
};

/// What the kernels of a choice see.
struct ChoiceView {
  /// What is known of the row of a cell: two bits each. Victims are those of the policy, or of kLast.
  enum Mark : uint32_t { kEvictable, kStays, kVictim, kVictimOfLast };
  static constexpr uint32_t kMarks = 16;  // in a word

  CallView call;
  RowsView in;
  RowType type;
  int64_t dim;
  bool shares;  // the row of that key stays
  uint64_t shared_key;
  Choice* choice;
  uint32_t* marks;
  uint64_t* list;  // for rankings
  Evicted* evicted;
  PolicyView policies[2];  // the one that is asked first, and the last

  [[nodiscard]] KVJAX_HD uint64_t cells() const { return in.index.cells(); }
  [[nodiscard]] KVJAX_HD Mark MarkOf(uint64_t cell) const {
    return static_cast<Mark>(Load(marks[cell / kMarks]) >> (2 * (cell % kMarks)) & 3u);
  }
  /// Marks a row; many lanes may do so for distinct cells at once.
  KVJAX_HD void SetMark(uint64_t cell, uint32_t mark) const {
    SetBits(marks[cell / kMarks], mark << (2 * (cell % kMarks)));
  }
  /// The entry of a row that may be evicted, or nullptr: neither pinned nor shared nor of the call, nor a
  /// victim already.
  [[nodiscard]] KVJAX_HD const IndexView::Entry* Evictable(uint64_t cell) const {
    const IndexView::Entry* const entry = in.index.At(cell);
    if (entry == nullptr || MarkOf(cell) != kEvictable || (shares && entry->key == shared_key))
      return nullptr;
    return in.Header(entry->row).pinned == 0 ? entry : nullptr;
  }
  [[nodiscard]] KVJAX_HD double Score(const PolicyView& policy, const PolicyWord& word, uint64_t cell) const {
    return word.rule.scored() ? policy.scores[word.column * cells() + cell] : 0.0;
  }
  /// 1 + the alternative that a row is evicted for, or 0.
  [[nodiscard]] KVJAX_HD uint32_t Alternative(const PolicyView& policy, uint64_t cell,
                                              const IndexView::Entry& entry) const {
    const RowHeader header = in.Header(entry.row);
    Truth truth;
    uint32_t alternative = 0;
    for (size_t w = 0; w < policy.size; ++w) {
      const PolicyWord& word = policy.words[w];
      if (word.rule.operands() > 0) {
        truth.Join(word.rule.kind);
      } else if (word.rule.ranks()) {
        const uint64_t order = word.rule.Order(header, Score(policy, word, cell));
        truth.Push(policy.rankings[word.ranking].Takes(order, Mix(entry.key)));
      } else {
        const bool normed = word.rule.kind == Rule::Kind::kNorm;
        const double x = normed ? Norm(type, dim, in.Value(entry.row)) : Score(policy, word, cell);
        truth.Push(word.rule.Holds(header, choice->step, x));
      }
      if (!word.ends) continue;
      ++alternative;
      if (truth.value()) return alternative;
      truth = {};
    }
    return 0;
  }
};

/// Where a row stands in a ranking of a policy, if it may be evicted.
struct RankedRows {
  ChoiceView v;
  PolicyView policy;
  PolicyWord word;

  KVJAX_HD bool operator()(uint64_t cell, uint64_t& order, uint64_t& hash) const {
    const IndexView::Entry* const entry = v.Evictable(cell);
    if (entry == nullptr) return false;
    order = word.rule.Order(v.in.Header(entry->row), v.Score(policy, word, cell));
    hash = Mix(entry->key);
    return true;
  }
};

/// Lanes that share what is done for every cell, so that kernels with nothing to do are small.
inline constexpr uint64_t kChoiceLanes = uint64_t{1} << 18;
inline uint64_t LanesFor(uint64_t n) { return std::min(n, kChoiceLanes); }

/// When rows must be evicted so that others fit.
struct SpaceRules {
  uint64_t max_capacity;
  OnFull on_full;
  int64_t evict_every;  // steps, 0 if this is no step
  bool trains;
  bool has_policy;
};

/// Begins a choice for a write whose i-th key makes a row if flag[i] is set, of n, after number[i] others.
template <class Q>
void DecideSpace(Q& q, ChoiceView v, SpaceRules rules, const uint32_t* number, const uint32_t* flag,
                 size_t n) {
  q.Once([=] KVJAX_HD() {
    const Control& control = *v.call.control;
    Choice& choice = *v.choice;
    choice = {};
    if (!v.call.open()) return;
    choice.step = rules.trains ? control.step : control.last_step;
    choice.size = control.size;
    choice.after = control.size + (n > 0 ? number[n - 1] + flag[n - 1] : 0);
    const uint64_t most = rules.max_capacity;
    choice.excess = most > 0 && choice.after > most ? choice.after - most : 0;
    const bool due = IsDue(rules.evict_every, control.last_step, choice.step);
    const bool evicts = choice.excess > 0 && rules.on_full == OnFull::kEvict;
    choice.needed = evicts ? choice.excess : 0;
    if (rules.has_policy && (due || evicts)) choice.asked = Choice::kPolicy, choice.was_asked[0] = true;
  });
}

/// Begins a choice by hand; step: two words, below 0 for the table's last.
template <class Q>
void DecideEvict(Q& q, ChoiceView v, const uint32_t* step) {
  q.Once([=] KVJAX_HD() {
    const Control& control = *v.call.control;
    Choice& choice = *v.choice;
    choice = {};
    if (!v.call.open()) return;
    const auto given = static_cast<int64_t>(GetWords(step));
    choice.step = given < 0 ? control.last_step : given;
    choice.size = choice.after = control.size;
    choice.asked = Choice::kPolicy, choice.was_asked[0] = true;
  });
}

/// The rows of a call stay: rows (n,) as CountNew gives them.
template <class Q>
void KeepRows(Q& q, ChoiceView v, const uint64_t* keys, const uint32_t* rows, size_t n) {
  const uint64_t words = (v.cells() + ChoiceView::kMarks - 1) / ChoiceView::kMarks, lanes = LanesFor(words);
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    if (v.choice->asked == Choice::kNobody && v.choice->excess == 0) return;
    for (uint64_t word = lane; word < words; word += lanes) v.marks[word] = 0;
  });
  q.Each(n, [=] KVJAX_HD(size_t i) {
    if (v.choice->asked == Choice::kNobody && v.choice->excess == 0) return;
    if (rows[i] != kNoRow) v.SetMark(v.in.index.CellOf(keys[i]), ChoiceView::kStays);
  });
}

/// Decides a ranking of the policy that is `asked`.
template <class Q>
void DecideRanking(Q& q, ChoiceView v, Choice::Asked asked, PolicyWord word) {
  const PolicyView policy = v.policies[asked - 1];
  Ranking* const ranking = policy.rankings + word.ranking;
  q.Once([=] KVJAX_HD() {
    const Choice& choice = *v.choice;
    ranking->Begin(choice.asked == asked ? word.rule.Wanted(choice.needed, choice.size) : 0);
  });
  const RankedRows rows{v, policy, word};
  const uint64_t lanes = LanesFor(v.cells());
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    if (ranking->takes_none != 0) return;
    uint64_t least = ~uint64_t{0}, most = 0, order, hash;
    for (uint64_t cell = lane; cell < v.cells(); cell += lanes) {
      if (!rows(cell, order, hash)) continue;
      if (order < least) least = order;
      if (order > most) most = order;
    }
    Lower(ranking->least, least);
    Raise(ranking->most, most);
  });
  q.CountBins(v.cells(), RankDigits<RankedRows>{ranking, v.list, v.cells(), rows});
}

/// Marks what the policy that is `asked` chooses.
template <class Q>
void MarkChosen(Q& q, ChoiceView v, Choice::Asked asked) {
  const PolicyView policy = v.policies[asked - 1];
  const uint64_t lanes = LanesFor(v.cells());
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    if (v.choice->asked != asked) return;
    uint64_t chosen = 0;
    for (uint64_t cell = lane; cell < v.cells(); cell += lanes) {
      const IndexView::Entry* const entry = v.Evictable(cell);
      if (entry == nullptr || v.Alternative(policy, cell, *entry) == 0) continue;
      v.SetMark(cell, asked == Choice::kPolicy ? ChoiceView::kVictim : ChoiceView::kVictimOfLast);
      ++chosen;
    }
    v.choice->chosen.Add(lane, chosen);
  });
}

/// The policy has chosen: what if that is too little?
template <class Q>
void AskLast(Q& q, ChoiceView v, OnFull on_full) {
  q.Once([=] KVJAX_HD() {
    Choice& choice = *v.choice;
    const uint64_t chosen = choice.chosen.Sum();
    choice.asked = Choice::kNobody;
    if (chosen >= choice.excess) return;
    if (on_full == OnFull::kError) v.call.Close(Refusal::kFull, static_cast<uint32_t>(choice.after), kNoRow);
    if (on_full != OnFull::kEvict) return;
    choice.asked = Choice::kLast, choice.was_asked[1] = true;
    choice.needed = choice.excess - chosen;
  });
}

/// All have chosen. Refuses the write if that is too little; `counts`: otherwise who has chosen is noted.
template <class Q>
void EndChoice(Q& q, ChoiceView v, bool counts = true) {
  q.Once([=] KVJAX_HD() {
    const Choice& choice = *v.choice;
    if (choice.was_asked[1]) {
      const uint64_t chosen = choice.chosen.Sum();
      if (chosen < choice.excess) {
        v.call.Close(Refusal::kFull, static_cast<uint32_t>(choice.after), static_cast<uint32_t>(chosen));
      }
    }
    if (!counts || !v.call.open()) return;
    for (int who = 0; who < 2; ++who) {
      if (!choice.was_asked[who]) continue;
      const PolicyView& policy = v.policies[who];
      for (size_t a = 0; a < policy.alternatives; ++a) v.evicted[policy.reasons[a]].asked = 1;
    }
  });
}

/// f(lane, cell, entry, reason) for every victim.
template <class Q, class F>
void EachVictim(Q& q, ChoiceView v, F f) {
  const uint64_t words = (v.cells() + ChoiceView::kMarks - 1) / ChoiceView::kMarks, lanes = LanesFor(words);
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    const Choice& choice = *v.choice;
    if (!v.call.open() || !(choice.was_asked[0] || choice.was_asked[1])) return;
    for (uint64_t word = lane; word < words; word += lanes) {
      if ((v.marks[word] & 0xAAAAAAAAu) == 0) continue;  // none of them is a victim
      for (uint64_t cell = word * ChoiceView::kMarks; cell < (word + 1) * ChoiceView::kMarks; ++cell) {
        const auto mark = v.MarkOf(cell);
        if (mark < ChoiceView::kVictim) continue;
        const IndexView::Entry& entry = v.in.index.Used(cell);
        const PolicyView& policy = v.policies[mark - ChoiceView::kVictim];
        f(lane, cell, entry, policy.reasons[v.Alternative(policy, cell, entry) - 1]);
      }
    }
  });
}

/// Erases the victims.
struct EraseVictim {
  ChoiceView v;

  KVJAX_HD void operator()(size_t lane, uint64_t cell, const IndexView::Entry& entry, uint32_t reason) const {
    Control& control = *v.call.control;
    bool gave_empty = false;
    v.in.index.Free(cell, gave_empty);
    v.in.free[control.free_rows + Add(control.leaving, 1u)] = entry.row;
    if (gave_empty) control.cells_used.Add(lane, ~uint64_t{0});
    v.evicted[reason].rows.Add(lane, 1);
  }
};

}  // namespace kvjax::device
