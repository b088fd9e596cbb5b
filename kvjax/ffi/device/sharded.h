// What a shard of a spread table does. All shards must be able to do a write before any does, so the calls
// that plan one wait for the device and throw what it would refuse; the write itself then fails no more, but
// for want of scratch memory.
#pragma once
#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

/// How many of n flags are true.
template <class Q>
void CountFlags(Q& q, const bool* flags, size_t n, uint32_t* total) {
  q.Fill(total, 0, sizeof(uint32_t));
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const int here = tile.Count(i < n && flags[i]);
    if (tile.rank() == 0 && here > 0) Add(*total, static_cast<uint32_t>(here));
  });
}

/// Checks what a device would, and makes room for the keys that may get rows.
template <class Q>
void DeviceTable<Q>::Plan(Q& q, std::string_view op, const uint32_t* version, KeySpan keys, const bool* mask,
                          bool makes_rows) {
  const Entered entered(*this, op);
  ExpectLive(q, op, version, keys.narrow);
  coming_ = makes_rows ? keys.n : 0;
  if (makes_rows && mask != nullptr) {
    Scratch<Q, uint32_t> meant(q, 1);
    CountFlags(q, mask, keys.n, meant.data());
    coming_ = Fetch(q, meant.data());
  }
  if (makes_rows) MakeRoom(q, op, coming_);
}

template <class Q>
void DeviceTable<Q>::ExpectLive(Q& q, std::string_view op, const uint32_t* version, bool narrow) const {
  if (ExpectNow(q, op, version).wide != 0 && narrow) throw WidthError(spec_.name, op);
}

template <class Q>
void DeviceTable<Q>::Receive(Q& q, const uint32_t* version, KeySpan keys, const int32_t* counts,
                             const float* rows, size_t senders, const int32_t* round, const int32_t* rounds,
                             InitialRows initial) {
  const Entered entered(*this, "apply");
  ExpectLive(q, "apply", version, keys.narrow);
  const auto turn = static_cast<size_t>(Fetch(q, round)), turns = static_cast<size_t>(Fetch(q, rounds));
  const auto dim = static_cast<size_t>(spec_.dim);
  const bool given = spec_.initializer.kind == Generator::Kind::kGiven;
  Inbox<Q>& inbox = step_.inbox;
  if (turn == 0) {
    Abandoned(q);
    step_.narrow = keys.narrow;
    inbox.Open(q, {senders, turns, senders == 0 ? 0 : keys.n / senders}, dim, given ? row_bytes() : 0);
  }
  if (inbox.places().rounds != turns || turn >= turns) return;  // the first round has failed, and has said so
  if (given) {
    Scratch<Q, uint32_t> found(q, keys.n), first(q, keys.n), number(q, keys.n + 1);
    const CallView call = View("apply", version, keys.narrow);
    FindRows(q, call, contents_.index().view(), keys.data, {.counts = counts}, keys.n, found.data());
    const Meant missing{.counts = counts, .rows = found.data()};
    NumberKeys(q, keys.data, missing, keys.n, first.data(), number.data());
    PlaceGiven(q, inbox.places(), turn, missing, first.data(), number.data(), initial.data, initial.n,
               row_bytes(), inbox.given());
  }
  inbox.Add(q, turn, keys.data, counts, rows, dim, given);
}

template <class Q>
void DeviceTable<Q>::PlanStep(Q& q, const uint32_t* version, const uint32_t* step, const SlotLayout& layout) {
  const Entered entered(*this, "apply");
  ExpectLive(q, "apply", version, step_.narrow);
  if (!step_.inbox.complete()) throw NotPlannedError(spec_.name);
  step_.layout = layout;
  if (Attaches(layout)) {
    contents_.Attach(q, layout);
    step_.attached = true;
  }
  const size_t most = step_.inbox.places().size();
  Scratch<Q, uint32_t> total(q, 1);
  CountMerged(q, step_.inbox.merged().counts, most, total.data());
  step_.n = Fetch(q, total.data());
  MakeRoom(q, "apply", step_.n);
  Grow(q, step_.targets, 2 * step_.n);
  Grow(q, step_.pooled, static_cast<size_t>(spec_.dim));
  Grow(q, step_.step, 2);
  q.Copy(step_.step.data(), step, 2 * sizeof(uint32_t));
  step_.ready = true;
}

template <class Q>
void DeviceTable<Q>::CommitStep(Q& q, const uint32_t* version, uint32_t* next, int32_t* active,
                                uint32_t* used_step) {
  const Entered entered(*this, "apply");
  if (!std::exchange(step_.ready, false)) throw NotPlannedError(spec_.name);
  step_.attached = false;
  step_.left = step_.n;
  const LettersView in = step_.inbox.merged();
  const size_t n = step_.n, bytes = row_bytes();
  const bool generates = spec_.initializer.kind != Generator::Kind::kGiven;
  Scratch<Q, std::byte> given(q, generates ? 0 : n * bytes);
  if (!generates) {
    Scratch<Q, uint32_t> found(q, n), first(q, n), number(q, n + 1);
    const CallView call = View("apply", version, step_.narrow);
    FindRows(q, call, contents_.index().view(), in.keys, {}, n, found.data());
    const Meant missing{.rows = found.data()};
    NumberKeys(q, in.keys, missing, n, first.data(), number.data());
    TakeGiven(q, missing, number.data(), step_.inbox.origins(), step_.inbox.given(), bytes, n, given.data());
  }
  const GradientsView gradients{in.keys,           in.counts,          in.rows, n, nullptr, 0, 0,
                                step_.step.data(), spec_.count_batches};
  Begin(q, version, {in.keys, n, step_.narrow}, gradients, step_.layout, {given.data(), generates ? 0 : n},
        next, step_.targets.data(), active, used_step, step_.pooled.data());
}

/// Forgets what has been planned: another shard cannot do its part.
template <class Q>
void DeviceTable<Q>::Abandon() {
  const std::lock_guard lock(mutex_);
  Q q = Q::Alone(spec_.device);
  Abandoned(q);
}

template <class Q>
void DeviceTable<Q>::Abandoned(Q& q) {
  if (std::exchange(step_.attached, false) && contents_.layout() == step_.layout) contents_.Detach(q);
  step_.ready = false;
  coming_ = 0;
}

}  // namespace kvjax::device
