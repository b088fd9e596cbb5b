// Eviction from a device table, the host's side: it queues the choice, and waits only for functions of
// the user, which run on the host: scores before the choice, and sinks after it.
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/victims.h"
#include "kvjax/ffi/device/write_scopes.h"

namespace kvjax::device {

/// A row that a function of the user is to see.
struct ListedRow {
  uint64_t key, cell;
  uint32_t row, reason;
};

/// Lists the victims.
struct ListVictims {
  ListedRow* out;
  uint32_t* n;

  KVJAX_HD void operator()(size_t, uint64_t cell, const IndexView::Entry& entry, uint32_t reason) const {
    out[Add(*n, 1u)] = {entry.key, cell, entry.row, reason};
  }
};
/// Counts the victims by reason.
struct CountVictim {
  uint32_t* counts;

  KVJAX_HD void operator()(size_t, uint64_t, const IndexView::Entry&, uint32_t reason) const {
    Add(counts[reason], 1u);
  }
};
/// Lists the rows that may be evicted.
template <class Q>
void ListEvictable(Q& q, ChoiceView v, ListedRow* out, uint32_t* n) {
  const uint64_t lanes = LanesFor(v.cells());
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    for (uint64_t cell = lane; cell < v.cells(); cell += lanes) {
      const IndexView::Entry* const entry = v.Evictable(cell);
      if (entry != nullptr) out[Add(*n, 1u)] = {entry->key, cell, entry->row, 0};
    }
  });
}
/// Writes the scores of n rows to their cells.
template <class Q>
void PutScores(Q& q, const ListedRow* rows, const double* scores, size_t n, double* out) {
  q.Each(n, [=] KVJAX_HD(size_t i) { out[rows[i].cell] = scores[i]; });
}

/// The memory of a choice.
template <class Q>
struct DeviceTable<Q>::Choosing {
  Choosing(DeviceTable& table, Q& q, CallView call, const DevicePolicy<Q>& policy)
      : policy(policy),
        choice(q, 1),
        rankings(q, policy.rankings() + table.last_.rankings()),
        marks(q, table.contents_.index().cells() / ChoiceView::kMarks),
        list(q, std::min<uint64_t>(table.contents_.index().cells(), kListed)),
        scores(q, policy.names().size() * table.contents_.index().cells()),
        view{.call = call,
             .in = table.contents_.view(),
             .type = table.spec_.type,
             .dim = table.spec_.dim,
             .shares = table.spec_.admission.shares(),
             .shared_key = table.spec_.admission.shared_key,
             .choice = choice.data(),
             .marks = marks.data(),
             .list = list.data(),
             .evicted = table.evicted_.data(),
             .policies = {policy.view(rankings.data(), scores.data()),
                          table.last_.view(rankings.data() + policy.rankings(), nullptr)}} {}

  static constexpr uint64_t kListed = RankDigits<RankedRows>::kList;

  const DevicePolicy<Q>& policy;
  Scratch<Q, Choice> choice;
  Scratch<Q, Ranking> rankings;
  Scratch<Q, uint32_t> marks;
  Scratch<Q, uint64_t> list;
  Scratch<Q, double> scores;
  ChoiceView view;
};

/// Whether n new keys may be more than the table takes.
template <class Q>
bool DeviceTable<Q>::MayBeFull(size_t n) {
  if (!keeps_to_capacity()) return false;
  const Bound bound = Upper();
  return bound.size + bound.pending + n > spec_.max_capacity;
}

/// Evicts rows so that the call's fit, or because the table's policy is due; or plans that.
template <class Q>
void DeviceTable<Q>::EvictForSpace(const Entering& e, const EnterView& entering, bool plans) {
  const bool trains = e.gradients != nullptr, full = MayBeFull(e.keys.n);
  const int64_t every = trains ? spec_.evict_every : 0;
  if (!full && every == 0) return;
  const Choosing choosing(*this, e.q, e.call, policy_);
  const SpaceRules rules{spec_.max_capacity, spec_.on_full, every, trains, !policy_.empty()};
  DecideSpace(e.q, choosing.view, rules, entering.number, entering.flag, e.keys.n);
  KeepRows(e.q, choosing.view, e.keys.data, e.rows.data(), e.keys.n);
  Ask(e.q, choosing, policy_, Choice::kPolicy);
  if (full) {
    AskLast(e.q, choosing.view, spec_.on_full);
    if (spec_.on_full == OnFull::kEvict) Ask(e.q, choosing, last_, Choice::kLast);
  }
  Leave(e.q, choosing, plans);
}

template <class Q>
void DeviceTable<Q>::Evict(Q& q, const EvictOperands& o) {
  const Entered entered(*this, q, o.op);
  if (o.dry_run) (void)ExpectNow(q, o.op, o.version);  // its counts are read at once
  const CallView call = View(o.op, o.version);
  if (o.dry_run) CheckParts(spec_.name, o.policy.size(), o.parts);
  uint32_t part = 0;  // of a dry run, which leaves no reason behind
  DevicePolicy<Q> asked(q, o.policy,
                        [&](const std::string& reason) { return o.dry_run ? part++ : NumberOf(q, reason); });
  BeginWrite(q, call);
  {
    const Choosing choosing(*this, q, call, asked);
    DecideEvict(q, choosing.view, reinterpret_cast<const uint32_t*>(o.step));
    KeepRows(q, choosing.view, nullptr, nullptr, 0);
    Ask(q, choosing, asked, Choice::kPolicy);
    if (o.dry_run) {
      FillWords(q, o.counts, o.parts, 0);
      EachVictim(q, choosing.view, CountVictim{o.counts});
    } else {
      Leave(q, choosing);
    }
  }
  asked.Retire(q);
  if (o.dry_run) return q.Copy(o.next, o.version, sizeof(uint32_t));
  End(q, call, 0, o.next);
}

/// A policy chooses, if it is the one that is asked.
template <class Q>
void DeviceTable<Q>::Ask(Q& q, const Choosing& c, const DevicePolicy<Q>& policy, Choice::Asked asked) {
  if (policy.empty()) return;
  if (!policy.names().empty()) Score(q, c);
  for (const PolicyWord& word : policy.words()) {
    if (word.rule.ranks()) DecideRanking(q, c.view, asked, word);
  }
  MarkChosen(q, c.view, asked);
}

/// Evicts what has been chosen, once the sink, which may stop it, has seen it: where the call is planned, as
/// that is.
template <class Q>
void DeviceTable<Q>::Leave(Q& q, const Choosing& c, bool plans) {
  EndChoice(q, c.view, !plans);
  if (sink_ && !c.view.call.planned) Show(q, c);
  if (plans) return;
  EachVictim(q, c.view, EraseVictim{c.view});
  SettleNow(q, c.view.call);
}

/// The scores of the rows that may be evicted.
template <class Q>
void DeviceTable<Q>::Score(Q& q, const Choosing& c) {
  const Choice choice = Fetch(q, c.choice.data());
  if (choice.asked != Choice::kPolicy) return;
  Scratch<Q, ListedRow> there(q, choice.size);
  Scratch<Q, uint32_t> n(q, 1);
  q.Fill(n.data(), 0, sizeof(uint32_t));
  ListEvictable(q, c.view, there.data(), n.data());
  std::vector<ListedRow> rows(Fetch(q, n.data()));
  q.Copy(rows.data(), there.data(), rows.size() * sizeof(ListedRow));
  q.Wait();
  for (size_t begin = 0; begin < rows.size(); begin += kHostBatch) {
    const size_t m = std::min(kHostBatch, rows.size() - begin);
    std::vector<KeyRow> batch;
    for (size_t i = begin; i < begin + m; ++i) batch.push_back({rows[i].key, rows[i].row});
    Snapshot copy = CopyRows(q, batch, true);
    copy.last_step = choice.step;
    for (const PolicyWord& word : c.policy.words()) {
      if (!word.rule.scored()) continue;
      if (word.rule.ranks() && word.rule.Wanted(choice.needed, choice.size) == 0) continue;
      std::vector<double> scores(m);
      score_(c.policy.names()[word.column], copy, scores);
      Scratch<Q, double> these(q, m);
      q.Copy(these.data(), scores.data(), m * sizeof(double));
      PutScores(q, there.data() + begin, these.data(), m,
                c.scores.data() + word.column * contents_.index().cells());
    }
  }
}

/// Shows the sink the victims, by reason, each sorted.
template <class Q>
void DeviceTable<Q>::Show(Q& q, const Choosing& c) {
  const Choice choice = Fetch(q, c.choice.data());
  const uint64_t chosen = choice.chosen.Sum();
  if (chosen == 0) return;
  Scratch<Q, ListedRow> there(q, chosen);
  Scratch<Q, uint32_t> n(q, 1);
  q.Fill(n.data(), 0, sizeof(uint32_t));
  EachVictim(q, c.view, ListVictims{there.data(), n.data()});
  std::vector<ListedRow> rows(Fetch(q, n.data()));  // none if the call has been refused
  q.Copy(rows.data(), there.data(), rows.size() * sizeof(ListedRow));
  q.Wait();
  std::map<uint32_t, std::vector<KeyRow>> going;
  for (const ListedRow& r : rows) going[r.reason].push_back({r.key, r.row});
  for (const DevicePolicy<Q>* policy : {&c.policy, static_cast<const DevicePolicy<Q>*>(&last_)}) {
    for (const uint32_t reason : policy->reasons()) {
      const auto found = going.find(reason);
      if (found == going.end()) continue;
      std::vector<KeyRow> leave = std::move(found->second);
      going.erase(found);
      SortRows(leave);
      for (size_t begin = 0; begin < leave.size(); begin += kHostBatch) {
        const auto first = leave.begin() + static_cast<ptrdiff_t>(begin);
        const auto m = static_cast<ptrdiff_t>(std::min(kHostBatch, leave.size() - begin));
        sink_(CopyRows(q, std::vector<KeyRow>(first, first + m), true), reasons_[reason]);
      }
    }
  }
}

/// The number of a reason among the counts of evicted rows.
template <class Q>
uint32_t DeviceTable<Q>::NumberOf(Q& q, const std::string& reason) {
  const auto found = std::find(reasons_.begin(), reasons_.end(), reason);
  if (found != reasons_.end()) return static_cast<uint32_t>(found - reasons_.begin());
  reasons_.reserve(reasons_.size() + 1);
  if (reasons_.size() == evicted_.size()) {
    Array<Q, Evicted> more(q, 2 * evicted_.size() + 4);
    q.Fill(more.data(), 0, more.bytes());
    q.Copy(more.data(), evicted_.data(), evicted_.bytes());
    std::swap(evicted_, more);
    more.Retire(q);
  }
  reasons_.push_back(reason);
  return static_cast<uint32_t>(reasons_.size() - 1);
}

}  // namespace kvjax::device
