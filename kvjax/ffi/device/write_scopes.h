// Write scopes: the scratch that a write holds while its kernels are queued: the keys of the call, grouped
// and found, and what has to be undone if it fails.
#pragma once
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// A write of keys that are there. Kernels of the call follow its making.
template <class Q>
struct DeviceTable<Q>::Finding {
  Finding(DeviceTable& table, Q& q, Op op, const uint32_t* version, KeySpan keys, Valid valid)
      : table(table), q(q), call(table.View(op, version, keys.narrow)), first(q, keys.n), rows(q, keys.n) {
    BeginWrite(q, call);
    GroupKeys(q, keys.data, valid, keys.n, first.data());
    FindRows(q, call, table.contents_.index().view(), keys.data, valid, keys.n, rows.data());
  }
  void End(uint32_t* next) const { table.End(q, call, 0, next); }

  DeviceTable& table;
  Q& q;
  CallView call;
  Scratch<Q, uint32_t> first, rows;
};

/// A write of keys that are to have rows. What it is given is checked and space is reserved for it; what
/// fails or refuses the call has changed nothing, also in Enter, which then evicts the victims, and gives
/// rows.
template <class Q>
struct DeviceTable<Q>::Entering {
  Entering(DeviceTable& table, Q& q, Op op, const uint32_t* version, KeySpan keys, Valid valid,
           const GradientsView* gradients = nullptr, bool planned = false)
      : table(table),
        q(q),
        keys(keys),
        valid(valid),
        gradients(gradients),
        call(table.View(op, version, keys.narrow)),
        first(q, keys.n),
        rows(q, keys.n) {
    call.planned = planned;
    BeginWrite(q, call, gradients != nullptr ? gradients->step : nullptr);
    if (gradients != nullptr && gradients->merged && gradients->n == keys.n) {
      NumberPositions(q, first.data(), keys.n);
    } else {
      GroupKeys(q, keys.data, valid, keys.n, first.data());
    }
    if (gradients != nullptr) CheckGradients(q, call, *gradients, first.data());
    table.MakeSpace(q, op, Most());
  }
  /// Keys that may get rows: of those that a shard is given, its own, as it has planned.
  [[nodiscard]] size_t Most() const {
    return table.spec_.sharded && gradients == nullptr ? table.coming_ : keys.n;
  }
  void Enter(InitialRows initial, bool blank, const uint8_t* allowed) const {
    WithNew(initial, blank, allowed, [&](const EnterView& v) {
      table.EvictForSpace(*this, v, /*plans=*/false);
      EnterNew(q, v, keys.n);
    });
    if (gradients != nullptr || !table.spec_.admission.counts_keys()) return;
    ForgetWaiting(q, call, table.admission_.view().waiting, keys.data, rows.data(), keys.n);
  }
  /// All that may refuse the call, and no more.
  void Plan(InitialRows initial, const uint8_t* allowed) const {
    WithNew(initial, /*blank=*/false, allowed,
            [&](const EnterView& v) { table.EvictForSpace(*this, v, /*plans=*/true); });
  }
  /// Calls then(v), once it is known which keys are to get rows.
  template <class Then>
  void WithNew(InitialRows initial, bool blank, const uint8_t* allowed, Then then) const {
    // Rows that come with the call are those of all new keys, also of those that get none.
    const bool given = !blank && table.spec_.initializer.kind == Generator::Kind::kGiven;
    const bool apart = given && allowed != nullptr;
    const NewKeys<Q> news(q, keys.n, apart);
    const EnterView v{.call = call,
                      .in = table.contents_.view(),
                      .initial = table.Initial(initial),
                      .blank = blank,
                      .given = given,
                      .distinct = gradients != nullptr && gradients->n == keys.n,
                      .by_hand = gradients == nullptr,
                      .admission = table.admission_.view(),
                      .most = Most(),
                      .keys = keys.data,
                      .valid = valid,
                      .first = first.data(),
                      .allowed = allowed,
                      .rows = rows.data(),
                      .flag = news.flags.data(),
                      .number = news.numbers.data(),
                      .is_new = apart ? news.news.data() : news.flags.data(),
                      .before = apart ? news.befores.data() : news.numbers.data()};
    CountNew(q, v, keys.n);
    then(v);
  }
  template <class More = NoMore>
  void End(uint32_t* next, More more = {}) const {
    table.End(q, call, Most(), next, more);
  }

  DeviceTable& table;
  Q& q;
  KeySpan keys;
  Valid valid;
  const GradientsView* gradients;
  CallView call;
  Scratch<Q, uint32_t> first, rows;
};

/// A training write, of which it is known what becomes of its keys. Kernels of the call follow its making.
template <class Q>
struct DeviceTable<Q>::Deciding {
  /// sum: (dim,) for the gradient of the shared row, or nullptr if nobody wants that.
  Deciding(DeviceTable& table, Q& q, const StepSpan& step, const GradientsView& gradients, float* sum,
           bool planned = false)
      : admits(table.spec_.admission.decides()),
        shares(table.spec_.admission.shares()),
        gradients(gradients),
        all(q, table.spec_.admission, step.keys, {.counts = gradients.counts}),
        decision(q, admits ? all.keys().n : 0),
        scratch(q, shares, gradients.n, static_cast<size_t>(table.spec_.dim)),
        entering(table, q, Op::kApply, step.version, all.keys(), all.valid(), &this->gradients, planned) {
    const AdmissionSpec& admission = table.spec_.admission;
    const CallView& call = entering.call;
    const IndexView index = table.contents_.index().view();
    const AdmissionView by = table.admission_.view();
    if (admits) DecideWindow(q, call, by, index, gradients, decision.window.data());
    if (admits) DecideKeys(q, call, by, index, gradients, decision.view());
    if (shares) {
      FindUnadmitted(q, call, index, gradients, admission.shared_key, entering.first.data(),
                     decision.verdict.data(), scratch.in_sum.data(), scratch.unadmitted.data());
    }
    if (sum == nullptr) return;
    const auto dim = static_cast<size_t>(table.spec_.dim);
    if (shares) {
      SumUnadmitted(q, gradients, dim, scratch.hashes.data(), scratch.order.data(), scratch.in_sum.data(),
                    scratch.unadmitted.data(), scratch.blocks.data(), sum);
    } else {
      q.Fill(sum, 0, dim * sizeof(float));
    }
  }
  [[nodiscard]] const uint8_t* allowed() const { return admits ? decision.verdict.data() : nullptr; }
  [[nodiscard]] const Unadmitted* unadmitted() const { return shares ? scratch.unadmitted.data() : nullptr; }
  [[nodiscard]] StepRowsView rows() const {
    return {gradients, entering.rows.data(), admits ? decision.totals.data() : nullptr, unadmitted(),
            entering.table.spec_.admission.shared_key};
  }

  bool admits, shares;
  GradientsView gradients;
  WithShared<Q> all;
  Decision<Q> decision;
  UnadmittedScratch<Q> scratch;
  Entering entering;
};

/// Slots that are detached again unless the step that brings them is let in.
template <class Q>
struct DeviceTable<Q>::NewSlots {
  NewSlots(DeviceTable& table, Q& q) : table(table), q(q) {}
  ~NewSlots() {
    if (undo) table.contents_.Detach(q);
  }
  NewSlots(const NewSlots&) = delete;
  NewSlots& operator=(const NewSlots&) = delete;

  DeviceTable& table;
  Q& q;
  bool undo = false;
};

}  // namespace kvjax::device
