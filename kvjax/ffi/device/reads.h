// The reads of the device table: their kernels, put on a queue.
#pragma once
#include <algorithm>
#include <string>

#include "kvjax/ffi/device/table.h"

namespace kvjax::device {

template <class Q>
void DeviceTable<Q>::Lookup(Q& q, const LookupOperands& o) {
  const Entered entered(*this, q, Op::kLookup, o.version);
  const AdmissionSpec& admission = spec_.admission;
  const bool decides = o.missing == Missing::kTable && admission.decides() &&
                       admission.unadmitted != AdmissionSpec::Unadmitted::kInitial;
  LookupView v{.call = View(Op::kLookup, o.version, o.keys.narrow),
               .in = contents_.view(),
               .initial = Initial(o.initial),
               .keys = o.keys.data,
               .mask = o.mask,
               .admission = admission_.view(),
               .decides = decides,
               .zeros = admission.unadmitted == AdmissionSpec::Unadmitted::kZeros,
               .first = nullptr,
               .number = nullptr,
               .total = nullptr,
               .rows = o.rows,
               .found = o.found,
               .own_rows = o.own_rows,
               .shared_key = admission.shared_key,
               .shared_place = o.keys.n};
  if (spec_.initializer.kind != Generator::Kind::kGiven) return LookupRows(q, v, o.keys.n);
  const WithShared<Q> all(q, admission, o.keys, {.mask = o.mask});
  const Numbered missing_keys(*this, q, v.call, all.keys(), all.valid().mask);
  v.first = missing_keys.first.data(), v.number = missing_keys.number.data();
  v.total = missing_keys.total;
  LookupRows(q, v, o.keys.n);
}

template <class Q>
void DeviceTable<Q>::FindMissing(Q& q, const FindMissingOperands& o) {
  const Entered entered(*this, q, Op::kLookup, o.version);
  const WithShared<Q> all(q, spec_.admission, o.keys, {.mask = o.mask});
  const bool* const valid = all.valid().mask;
  const Numbered m(*this, q, View(Op::kLookup, o.version, o.keys.narrow), all.keys(), valid);
  q.Fill(o.missing, 0, (o.keys.n + 1) * sizeof(uint64_t));
  WriteMissing(q, all.keys().data, {.mask = valid, .rows = m.rows.data()}, all.keys().n, m.first.data(),
               m.number.data(), m.total, o.missing, o.count);
}

template <class Q>
void DeviceTable<Q>::Inspect(Q& q, const InspectOperands& o) {
  const Entered entered(*this, q, o.op, o.version);
  InspectRows(q, View(o.op, o.version, o.keys.narrow), contents_.view(), admission_.view(), o.keys.data,
              o.keys.n, o.found, o.frequency, o.row_version, o.pinned);
}

template <class Q>
void DeviceTable<Q>::ReadSlot(Q& q, const ReadSlotOperands& o) {
  const Entered entered(*this, q, Op::kSlot, o.version);
  const size_t offset = SlotOffset(spec_.name, contents_.layout(), o.slot, o.bytes);
  ReadSlotOf(q, View(Op::kSlot, o.version, o.keys.narrow), contents_.view(), !o.slot.empty(), offset, o.bytes,
             o.keys.data, o.keys.n, o.out);
}

template <class Q>
void DeviceTable<Q>::Changed(Q& q, const ChangedOperands& o) {
  const Entered entered(*this, q, Op::kPrefetch);
  MarkChanged(q, View(Op::kPrefetch, o.version, o.keys.narrow), o.since, o.keys.n, o.changed);
}

}  // namespace kvjax::device
