// Whole device tables, from the host: copied out, replaced, observed. All of it waits for the device.
#pragma once
#include <numeric>

#include "kvjax/ffi/core/checks.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/device/refusals.h"
#include "kvjax/ffi/device/sharded.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/tiers.h"

namespace kvjax::device {

/// Enters distinct keys under the row ids begin, begin + 1, ...
template <class Q>
void EnterLoaded(Q& q, IndexView index, Control* control, const uint64_t* keys, uint32_t begin, size_t n) {
  q.Each(n, [=] KVJAX_HD(size_t i) {
    bool took_empty = false;
    index.Insert(keys[i], begin + static_cast<uint32_t>(i), took_empty);
    control->cells_used.Add(i, took_empty ? 1 : 0);
    if (IsWide(keys[i])) Store(control->wide, 1u);
  });
}

template <class Q>
DeviceTable<Q>::DeviceTable(TableSpec spec, uint32_t first_version, Budget budget)
    : spec_(std::move(spec)), budget_(budget), order_(spec_.device) {
  Q q = Q::Alone(spec_.device);
  const typename Order<Q>::Turn turn(order_, q);
  report_ = ReportPool<Q>::Take();
  report_->version = first_version;
  contents_ = Contents<Q>(q, spec_.row_bytes(), 0, budget_);
  admission_ = Admission<Q>(q, spec_.admission);
  control_ = Array<Q, Control>(q, 1);
  Control control = {};
  control.version = first_version;
  q.Copy(control_.data(), &control, sizeof(control));
  const auto number = [&](const std::string& reason) { return NumberOf(q, reason); };
  policy_ = DevicePolicy<Q>(q, spec_.policy, number);
  last_ = DevicePolicy<Q>(q, Policy::Last(), number);
  if (const auto& pool = spec_.initializer.pool; pool != nullptr) {
    pool_ = Array<Q, float>(q, pool->size());
    q.Copy(pool_.data(), pool->data(), pool_.bytes());
  }
  q.Wait();
}

template <class Q>
DeviceTable<Q>::~DeviceTable() {
  try {
    order_.Wait();
  } catch (...) {  // a device that has failed does nothing any more
  }
}

template <class Q>
std::shared_ptr<DeviceTable<Q>> DeviceTable<Q>::Make(const TableSpec& spec, const std::string& storage,
                                                     uint32_t first_version, size_t capacity) {
  auto table = std::make_shared<DeviceTable>(spec, first_version, Budget::Parse(storage, spec.name));
  table->Reserve(first_version, capacity);
  return table;
}

template <class Q>
Snapshot DeviceTable<Q>::Copy(Q& q, const Control& control, bool slots) const {
  const auto n = static_cast<size_t>(control.size);
  std::vector<KeyRow> rows(n);
  {
    Scratch<Q, KeyRow> there(q, n);
    Scratch<Q, uint32_t> count(q, 1);
    q.Fill(count.data(), 0, sizeof(uint32_t));
    ListKeys(q, contents_.index().view(), there.data(), count.data());
    q.Copy(rows.data(), there.data(), n * sizeof(KeyRow));
    q.Wait();
  }
  std::vector<int64_t> offsets = SortByBucket(rows);
  Snapshot out = CopyRows(q, rows, slots);
  out.offsets = std::move(offsets);
  out.last_step = control.last_step;
  return out;
}

/// Copies rows out in their order; see CopyRows of core/snapshot.h.
template <class Q>
Snapshot DeviceTable<Q>::CopyRows(Q& q, const std::vector<KeyRow>& rows, bool slots) const {
  const size_t n = rows.size();
  Snapshot out;
  if (slots) out.layout = contents_.layout();
  out.Resize(n, row_bytes());
  const RowsView in = contents_.view();
  for (size_t begin = 0; begin < n; begin += kHostBatch) {
    const size_t m = std::min(kHostBatch, n - begin);
    std::vector<uint32_t> ids(m);
    for (size_t i = 0; i < m; ++i) ids[i] = rows[begin + i].row;
    Scratch<Q, uint32_t> there(q, m);
    q.Copy(there.data(), ids.data(), m * sizeof(uint32_t));
    const auto fetch = [&](PlaneView plane, size_t offset, size_t bytes, void* to) {
      Scratch<Q, std::byte> records(q, m * bytes);
      CopyOut(q, plane, offset, bytes, there.data(), records.data(), m);
      q.Copy(to, records.data(), m * bytes);
      q.Wait();
    };
    std::vector<RowHeader> headers(m);
    fetch(in.headers, 0, sizeof(RowHeader), headers.data());
    fetch(in.values, 0, row_bytes(), out.values.data() + begin * row_bytes());
    for (size_t i = 0; i < m; ++i) out.Set(begin + i, rows[begin + i].key, headers[i]);
    for (size_t s = 0; s < out.slots.size(); ++s) {
      const Slot& slot = out.layout.slots()[s];
      std::byte* const to = out.slots[s].data() + begin * slot.bytes;
      fetch(in.slots, slot.offset, slot.bytes, to);
      for (size_t i = 0; i < m; ++i) {  // what an earlier key left there stays behind
        if (headers[i].has_slots == 0) std::fill_n(to + i * slot.bytes, slot.bytes, std::byte{0});
      }
    }
  }
  return out;
}

template <class Q>
uint32_t DeviceTable<Q>::version() const {
  return LoadFromDevice(report_->version);
}
template <class Q>
void DeviceTable<Q>::Settle() const {
  order_.Wait();
}

/// It takes no lock: a sink may ask for tables while the call that has called it holds one.
template <class Q>
uint32_t DeviceTable<Q>::SettledVersion() const {
  Settle();
  return version();
}

template <class Q>
size_t DeviceTable<Q>::Size(uint32_t version, std::string_view op) const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, op);
  const Control control = Fetch(q, control_.data());
  Raise();
  Expect(op, version, control);
  return static_cast<size_t>(control.size);
}

template <class Q>
void DeviceTable<Q>::Reserve(uint32_t version, size_t n) {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "reserve");
  const Control control = Fetch(q, control_.data());
  Expect("reserve", version, control);
  const size_t rows =
      control.next_row + (n > control.size + control.free_rows ? n - control.size - control.free_rows : 0);
  contents_.ReserveRows(q, control_.data(), rows);
  if (n > contents_.index().capacity()) {
    contents_.Reindex(q, control_.data(), n);
    reindexed_ = writes_;
  }
  reserved_ = std::max(reserved_, n);
  short_of_memory_ = false;
  q.Wait();
}

template <class Q>
Snapshot DeviceTable<Q>::Export(uint32_t version, bool with_slots, std::string_view op, bool raises) const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, op, raises);
  const Control control = Fetch(q, control_.data());
  Expect(op, version, control);
  return Copy(q, control, with_slots);
}

template <class Q>
AdmissionState DeviceTable<Q>::ExportAdmission(uint32_t version, std::string_view op, bool raises) const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, op, raises);
  const Control control = Fetch(q, control_.data());
  Expect(op, version, control);
  return admission_.Save(q, control);
}

template <class Q>
typename DeviceTable<Q>::Loaded DeviceTable<Q>::BeginLoad(uint32_t version, const LoadHead& head) {
  CheckLoad(spec_, head);
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "load");
  Expect("load", version, Fetch(q, control_.data()));
  const size_t space = std::max(head.rows, reserved_);
  Loaded loaded{version,
                Contents<Q>(q, row_bytes(), space, budget_),
                {},
                {},
                kvjax::Admission(spec_.admission).With(head.admission),
                KeyNumbering(head.rows),
                Array<Q, Control>(q, 1)};
  loaded.control.last_step = head.last_step;
  q.Copy(loaded.filling.data(), &loaded.control, sizeof(Control));
  if (!head.layout.empty()) loaded.contents.Attach(q, head.layout);
  loaded.contents.ReserveRows(q, loaded.filling.data(), space);
  q.Wait();
  return loaded;
}

template <class Q>
void DeviceTable<Q>::AddLoaded(Loaded& loaded, const SnapshotView& rows) {
  CheckRows(spec_, loaded.contents.layout(), loaded.control.last_step, rows);
  const size_t first = loaded.distinct.keys().size();
  for (size_t i = 0; i < rows.n; ++i) {
    const auto key = static_cast<uint64_t>(rows.keys[i]);
    if (loaded.distinct.Add(key) < first + i) throw TwiceError(spec_.name, rows.keys[i]);
    loaded.counts.Forget(key);
  }
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "load", /*raises=*/false);
  const RowsView to = loaded.contents.view();
  for (size_t begin = 0; begin < rows.n; begin += kHostBatch) {
    const size_t m = std::min(kHostBatch, rows.n - begin);
    const auto row = static_cast<uint32_t>(first + begin);
    std::vector<uint32_t> ids(m);
    std::vector<RowHeader> headers(m);
    std::iota(ids.begin(), ids.end(), row);
    for (size_t i = 0; i < m; ++i) headers[i] = rows.Header(begin + i);
    Scratch<Q, uint32_t> there(q, m);
    q.Copy(there.data(), ids.data(), m * sizeof(uint32_t));
    const auto put = [&](PlaneView plane, size_t offset, size_t bytes, const void* from) {
      Scratch<Q, std::byte> records(q, m * bytes);
      q.Copy(records.data(), from, m * bytes);
      CopyIn(q, plane, offset, bytes, there.data(), records.data(), m);
      q.Wait();
    };
    put(to.headers, 0, sizeof(RowHeader), headers.data());
    put(to.values, 0, row_bytes(), rows.values + begin * row_bytes());
    for (size_t s = 0; s < rows.slots.size(); ++s) {
      const Slot& slot = rows.layout.slots()[s];
      put(to.slots, slot.offset, slot.bytes, rows.slots[s] + begin * slot.bytes);
    }
    Scratch<Q, uint64_t> keys(q, m);
    q.Copy(keys.data(), rows.keys + begin, m * sizeof(uint64_t));
    EnterLoaded(q, to.index, loaded.filling.data(), keys.data(), row, m);
    q.Wait();
  }
}

template <class Q>
void DeviceTable<Q>::EndLoad(Loaded& loaded) {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "load", /*raises=*/false);
  const size_t rows = loaded.distinct.keys().size();
  Control* const filling = loaded.filling.data();
  // Any handle of a table that nobody has yet is live.
  const CallView alone{filling, report_.get(), &filling->version, 0, false};
  for (size_t i = 0; i < std::min(rows, loaded.contents.device_rows()); i += kMostSwaps)
    KeepHot(q, alone, loaded.contents);
  loaded.admission = Admission<Q>::Of(q, spec_.admission, loaded.counts.Save(), filling);
  loaded.control = Fetch(q, filling);
  loaded.control.size = rows;
  loaded.control.next_row = static_cast<uint32_t>(rows);
  loaded.distinct = KeyNumbering(0);
}

template <class Q>
uint32_t DeviceTable<Q>::CommitLoad(Loaded loaded) {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "load");
  Control control = Fetch(q, control_.data());
  Expect("load", loaded.version, control);
  ForgetPlan(q);
  std::swap(contents_, loaded.contents);
  std::swap(admission_, loaded.admission);
  control.Replace(loaded.control);
  ++control.version;
  q.Copy(control_.data(), &control, sizeof(control));
  SettleReport(q);
  return control.version;
}

/// How far keys are from where they are first looked for, of a sample of cells all over the index.
struct Probes {
  uint64_t total, keys, longest;
};
template <class Q>
void SampleProbes(Q& q, IndexView index, Probes* out) {
  constexpr uint64_t kSample = 4096;
  const uint64_t lanes = std::min(index.cells(), kSample);
  const uint64_t apart = std::max<uint64_t>(index.cells() / kSample, 1);
  q.Each(lanes, [=] KVJAX_HD(size_t lane) {
    const uint64_t cell = lane * apart;
    if (index.At(cell) == nullptr) return;
    const uint64_t distance = index.Distance(cell) * IndexView::kCells;
    Add(out->total, distance);
    Add(out->keys, uint64_t{1});
    Raise(out->longest, distance);
  });
}

template <class Q>
Statistics DeviceTable<Q>::Stats(bool raises) const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "stats", raises);
  const Control control = Fetch(q, control_.data());
  Scratch<Q, Probes> there(q, 1);
  q.Fill(there.data(), 0, sizeof(Probes));
  SampleProbes(q, contents_.index().view(), there.data());
  const Probes probes = Fetch(q, there.data());
  const PinnedShare pinned = PinnedOf(q, contents_);
  Statistics stats{.size = control.size,
                   .capacity = contents_.index().capacity(),
                   .cells = contents_.index().cells(),
                   .index_bytes = contents_.index().bytes(),
                   .value_bytes = contents_.value_bytes(),
                   .header_bytes = contents_.header_bytes(),
                   .slot_bytes = contents_.slot_bytes(),
                   .admission_bytes = admission_.bytes(),
                   .pinned_bytes = contents_.pinned_bytes(),
                   .pinned_rows = pinned.rows.Sum(),
                   .pinned_occurrences = pinned.occurrences.Sum(),
                   .row_occurrences = pinned.all_occurrences.Sum(),
                   .tracked = control.waiting.Sum(),
                   .last_step = static_cast<uint64_t>(control.last_step),
                   .hits = control.hits.Sum(),
                   .misses = control.misses.Sum(),
                   .inserted = control.inserted,
                   .removed = control.removed,
                   .admitted = control.admitted,
                   .refused = control.refused.Sum(),
                   .occurrences = control.occurrences.Sum(),
                   .distinct = control.distinct,
                   .over_capacity = control.over_capacity,
                   .probe_longest = probes.longest};
  stats.probe_mean =
      probes.keys == 0 ? 0.0 : static_cast<double>(probes.total) / static_cast<double>(probes.keys);
  std::vector<Evicted> counts(reasons_.size());
  q.Copy(counts.data(), evicted_.data(), counts.size() * sizeof(Evicted));
  q.Wait();
  for (size_t r = 0; r < counts.size(); ++r) {
    if (counts[r].asked == 0) continue;
    stats.evicted[reasons_[r]] = counts[r].rows.Sum();
    stats.removed -= counts[r].rows.Sum();  // which counts rows removed by hand
  }
  stats.SetTraffic(counters_);
  return stats;
}

template <class Q>
std::pair<size_t, uint32_t> DeviceTable<Q>::Rows() const {
  Q q = Q::Alone(spec_.device);
  const Entered entered(*this, q, "repr", /*raises=*/false);
  const Control control = Fetch(q, control_.data());
  return {control.size, control.version};
}

template <class Q>
SlotLayout DeviceTable<Q>::Layout() const {
  const Entered entered(*this, "slot", /*raises=*/false);
  return contents_.layout();
}

template <class Q>
void DeviceTable<Q>::SetSink(Sink sink) {
  Sink guarded;
  if (sink) {
    guarded = [this, sink = std::move(sink)](Snapshot rows, std::string_view reason) {
      const UserCode::Call calling(user_code_);
      sink(std::move(rows), reason);
    };
  }
  const Entered entered(*this, "on_evict");
  sink_.swap(guarded);
}

template <class Q>
void DeviceTable<Q>::SetScore(ScoreFunction score) {
  const Entered entered(*this, "get_table");
  score_ = [this, score = std::move(score)](std::string_view name, const Snapshot& rows,
                                            std::vector<double>& out) {
    const UserCode::Call calling(user_code_);
    score(name, rows, out);
  };
}

/// Reports what there is to the host, after a change that it has made itself.
template <class Q>
void DeviceTable<Q>::SettleReport(Q& q) {
  ReportToHost(q, control_.data(), report_.get(), ++writes_);
  q.Wait();
}

}  // namespace kvjax::device
