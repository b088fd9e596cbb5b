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
           const bool* exists = nullptr, const GradientsView* gradients = nullptr, bool planned = false)
      : table(table),
        q(q),
        op(op),
        keys(keys),
        valid(valid),
        exists(exists),
        gradients(gradients),
        call(table.View(op, version, keys.narrow)),
        first(q, keys.n),
        rows(q, keys.n) {
    call.planned = planned;
    BeginWrite(q, call, gradients != nullptr ? gradients->step : nullptr);
    GroupKeys(q, keys.data, valid, keys.n, first.data());
    if (gradients != nullptr) CheckGradients(q, call, *gradients, first.data());
    table.MakeSpace(q, op, Most());
  }
  /// Keys that may get rows: of those that a shard is given, its own, as it has planned.
  [[nodiscard]] size_t Most() const {
    return table.spec_.sharded && gradients == nullptr ? table.coming_ : keys.n;
  }
  /// `plans`: then all that may refuse the call, and no more.
  void Enter(InitialRows initial, bool blank, const uint8_t* allowed, bool plans = false) const {
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
    table.EvictForSpace(*this, v, plans);
    if (plans) return;
    EnterNew(q, v, keys.n);
    if (gradients != nullptr || !table.admission_.counts_keys()) return;
    ForgetWaiting(q, call, table.admission_.view().waiting, keys.data, valid, first.data(), rows.data(),
                  keys.n);
  }
  template <class More = NoMore>
  void End(uint32_t* next, More more = {}) const {
    table.End(q, call, Most(), next, more);
  }

  DeviceTable& table;
  Q& q;
  Op op;
  KeySpan keys;
  Valid valid;
  const bool* exists;
  const GradientsView* gradients;
  CallView call;
  Scratch<Q, uint32_t> first, rows;
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
