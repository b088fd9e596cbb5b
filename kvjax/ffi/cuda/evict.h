// What must go from a device table is chosen on the host, by the code that chooses for the CPU table: so the
// policies are the same, to the last tie. It reads the headers of all rows back, which takes its time.
#pragma once
#include "kvjax/ffi/core/contents.h"
#include "kvjax/ffi/core/room.h"
#include "kvjax/ffi/cuda/table.h"

namespace kvjax::device {

/// Whether n new keys may be more than the table takes.
template <class Q>
bool DeviceTable<Q>::IsFull(Q& q, size_t n) {
  if (spec_.max_capacity == 0 || spec_.on_full == OnFull::kGrow) return false;
  const auto full = [&] {
    const Bound bound = Upper();
    return bound.size + bound.pending + n > spec_.max_capacity;
  };
  if (!full()) return false;
  q.Wait();
  return full();
}

/// Lets rows leave so that the call's can come, or because the table's policy is due.
template <class Q>
void DeviceTable<Q>::LetLeave(const Entering& e) {
  Q& q = e.q;
  const KeySpan keys = e.keys;
  const bool trains = e.gradients != nullptr;
  if (!(trains && spec_.evict_every > 0) && !IsFull(q, keys.n)) return;
  const Control control = Fetch(q, control_.data());
  if (control.open == 0) return;
  const int64_t step = trains ? control.step : control.last_step;
  const bool due =
      trains && spec_.evict_every > 0 && step / spec_.evict_every > control.last_step / spec_.evict_every;
  if (!due && !IsFull(q, keys.n)) return;
  const auto fetch = [&]<class T>(const T* from, size_t n) {
    std::vector<T> out(from == nullptr ? 0 : n);
    if (from != nullptr) q.Copy(out.data(), from, n * sizeof(T));
    return out;
  };
  const auto all = fetch(keys.data, keys.n);
  const auto mask = fetch(reinterpret_cast<const uint8_t*>(e.meant.mask), keys.n);
  const auto counts = fetch(e.meant.counts, keys.n);
  const auto exist = fetch(reinterpret_cast<const uint8_t*>(e.exists), keys.n);
  // One key more than there are gradients is that of the shared row.
  const auto occurring = trains ? fetch(e.gradients->counts, e.gradients->n) : std::vector<int32_t>();
  q.Wait();
  const auto twin = Twin(q, control);
  std::vector<uint64_t> wanted;
  std::vector<bool> may_enter;
  std::vector<uint32_t> occurrences;
  for (size_t i = 0; i < keys.n; ++i) {
    if ((!mask.empty() && mask[i] == 0) || (!counts.empty() && counts[i] <= 0)) continue;
    wanted.push_back(all[i]);
    may_enter.push_back(exist.empty() || exist[i] == 0);
    occurrences.push_back(i >= occurring.size() || spec_.count_batches ? 1
                                                                       : static_cast<uint32_t>(occurring[i]));
  }
  Change change{.found = twin->Locate(Serial, {wanted.data(), wanted.size()}), .ids = {}};
  const size_t fresh = change.found.fresh.size();
  change.ids.assign(fresh, kNoRow);
  std::vector<uint8_t> admitted(fresh, 1);
  if (trains) {
    std::vector<uint32_t> of_fresh(fresh);
    for (size_t i = 0, m = 0; i < wanted.size(); ++i) {
      if (change.found.rows[i] == kNoRow) of_fresh[change.found.numbers[m++]] = occurrences[i];
    }
    kvjax::Admission& admission = twin->admission;
    admission = admission.With(admission_.Save(q, control));
    admitted = admission.Decide(change.found.fresh, of_fresh, control.last_step, step).admitted;
  }
  const bool pools = std::count(admitted.begin(), admitted.end(), 0) > 0;
  for (size_t i = 0, m = 0; i < wanted.size(); ++i) {
    if (change.found.rows[i] != kNoRow) continue;
    const uint32_t number = change.found.numbers[m++];
    const bool is_shared = trains && keys.n > e.gradients->n && i + 1 == wanted.size();
    if (may_enter[i] && admitted[number] != 0 && (pools || !is_shared)) change.ids[number] = 0;
  }
  const Totals totals{control.size, change.entering(), 0};
  Room(twin->source(spec_), e.op, change, totals, step, true).Make(Serial, due);
  Leave(q, e.call, e.op, *twin, change);
}

/// The rows on the host, with their values where something looks at them.
template <class Q>
std::unique_ptr<kvjax::Contents> DeviceTable<Q>::Twin(Q& q, const Control& control) const {
  const bool looked_at = sink_ != nullptr || score_ != nullptr;
  const Snapshot rows = Copy(q, control, true, looked_at);
  auto twin = std::make_unique<kvjax::Contents>(spec_, std::make_shared<HostSlabs>());
  SnapshotView view{.n = rows.keys.size(),
                    .keys = rows.keys.data(),
                    .values = rows.values.data(),
                    .frequencies = rows.frequencies.data(),
                    .versions = rows.versions.data(),
                    .has_slots = rows.has_slots.data(),
                    .pinned = rows.pinned.data(),
                    .slots = {},
                    .layout = rows.layout,
                    .last_step = control.last_step};
  for (const auto& slot : rows.slots) view.slots.push_back(slot.data());
  (void)FillStore(twin->store, view, row_bytes());
  twin->last_step = control.last_step;
  twin->sink = sink_;
  twin->score = score_;
  return twin;
}

/// Takes away the rows of the change that leave, once the sink, which may stop it, has seen them.
template <class Q>
void DeviceTable<Q>::Leave(Q& q, CallView call, std::string_view op, kvjax::Contents& twin, Change& change) {
  std::vector<uint64_t> keys;
  for (const auto& [reason, rows] : change.leaving) {
    evicted_.try_emplace(reason, 0);
    for (const KeyRow& row : rows) keys.push_back(row.key);
  }
  if (keys.empty()) return;
  Scratch<Q, uint64_t> there(q, keys.size());
  q.Copy(there.data(), keys.data(), keys.size() * sizeof(uint64_t));
  change.ids.clear();  // nothing comes to the twin
  twin.Prepare(Serial, spec_, op, change, {}, /*blank=*/true);
  for (const auto& [reason, rows] : change.leaving) evicted_.find(reason)->second += rows.size();
  EraseKeys(q, call, contents_.view(), there.data(), {}, keys.size());
  SettleNow(q, call);
}

}  // namespace kvjax::device
