// A device table beside the CPU's: both are given the same calls, and must be the same afterwards.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/threads/threads.h"
//
#include "kvjax/ffi/device/apply.h"
#include "kvjax/ffi/device/delta.h"
#include "kvjax/ffi/device/evict.h"
#include "kvjax/ffi/device/reads.h"
#include "kvjax/ffi/device/table.h"
#include "kvjax/ffi/device/whole.h"
#include "kvjax/ffi/device/writes.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace device {

using data::Floats;
using data::Keys;
using kvjax::InitialRows;
using kvjax::RowType;
using kvjax::Snapshot;

using Mask = std::unique_ptr<bool[]>;
using Bytes = std::vector<std::byte>;
using Sunk = std::vector<std::pair<std::string, Snapshot>>;

inline kvjax::SlotLayout Momentum(int64_t dim) {
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[" + std::to_string(dim) + "]", 4 * static_cast<size_t>(dim));
  return layout;
}

/// One row of a toy optimizer: it only has to use all that it is given.
inline void Descend(RowType type, size_t dim, std::byte* value, const float* gradient, bool fresh,
                    float* slot) {
  for (size_t d = 0; d < dim; ++d) {
    slot[d] = fresh ? gradient[d] : 0.5f * slot[d] + gradient[d];
    StoreElement(type, value, static_cast<int64_t>(d),
                 LoadElement(type, value, static_cast<int64_t>(d)) - slot[d]);
  }
}

/// Initial rows that come with a call: a function of the key, for the keys that `missing` lists.
inline Bytes RowsFor(const Keys& missing, size_t row_bytes) {
  Bytes rows(missing.size() * row_bytes);
  for (size_t i = 0; i < missing.size(); ++i) {
    data::Stream stream(missing[i]);
    for (size_t b = 0; b < row_bytes; ++b) rows[i * row_bytes + b] = static_cast<std::byte>(stream.Below(60));
  }
  return rows;
}

/// What a training write is given.
struct Gradients {
  Keys keys;
  std::vector<int32_t> counts;  // then padding
  Floats rows = {};
  int64_t step = -1;
  std::vector<uint32_t> canaries = {kvjax::kCanary, kvjax::kCanary};
};

inline kvjax::WriteKeysOperands Of(kvjax::Op op, const uint32_t* version, const Keys& keys, const bool* mask,
                                   InitialRows initial, uint32_t* next) {
  return {
      .op = op, .version = version, .keys = data::Span(keys), .mask = mask, .initial = initial, .next = next};
}
inline kvjax::WriteRowsOperands Of(kvjax::Op op, const uint32_t* version, const Keys& keys, const bool* mask,
                                   const std::byte* rows, InitialRows initial, uint32_t* next) {
  return {.op = op,
          .version = version,
          .keys = data::Span(keys),
          .mask = mask,
          .rows = rows,
          .initial = initial,
          .next = next};
}
inline kvjax::StepSpan Of(const Gradients& g, const uint32_t* version, const kvjax::SlotLayout& layout,
                          InitialRows initial = {}) {
  return {.version = version,
          .keys = data::Span(g.keys),
          .gradients = {g.counts.data(), g.rows.data(), g.canaries.data(), g.canaries.size()},
          .step = &g.step,
          .layout = layout,
          .initial = initial};
}

template <class Q>
class Device : public kvjax::device::DeviceTable<Q> {
 public:
  using Base = kvjax::device::DeviceTable<Q>;

  /// on: what the queue is made of.
  template <class On = Q>
  Device(const kvjax::TableSpec& spec, On on, kvjax::device::Budget budget = {})
      : Base(spec, 1, budget), q(on), handle(1) {}

  /// Calls f(handle, next) and takes the next handle. Throws what the device has refused.
  template <class F>
  void Write(F f) {
    auto next = std::make_unique<uint32_t>(0xABABABAB);
    f(&handle, next.get());
    q.Wait();
    const uint32_t before = handle;
    handle = *next;
    this->Raise();
    CHECK_EQ(handle, before + 1);
  }

  Keys Missing(const Keys& keys, const bool* mask) {
    Keys out(keys.size() + 1, 77);
    int32_t count = -1;
    this->FindMissing(q, {&handle, data::Span(keys), mask, out.data(), &count});
    q.Wait();
    CHECK(count >= 0 && static_cast<size_t>(count) <= keys.size() + 1);  // one may be the shared row's
    for (size_t i = static_cast<size_t>(count); i <= keys.size(); ++i) CHECK_EQ(out[i], 0u);
    out.resize(static_cast<size_t>(count));
    return out;
  }
  /// Initial rows for the keys of a call, if the table wants such.
  Bytes Given(const Keys& keys, const bool* mask) {
    if (this->spec().initializer.kind != kvjax::Generator::Kind::kGiven) return {};
    return RowsFor(Missing(keys, mask), this->row_bytes());
  }
  static InitialRows Rows(const Bytes& given, size_t row_bytes) {
    return {given.data(), given.size() / row_bytes};
  }

  void Ensure(const Keys& keys, const bool* mask = nullptr) {
    const Bytes given = Given(keys, mask);
    Write([&](auto* version, auto* next) {
      this->Insert(q,
                   Of(kvjax::Op::kLookupOrInsert, version, keys, mask, Rows(given, this->row_bytes()), next));
    });
  }
  void Pinned(kvjax::Op op, const Keys& keys, const bool* mask = nullptr) {
    const Bytes given = op == kvjax::Op::kPin ? Given(keys, mask) : Bytes();
    Write([&](auto* version, auto* next) {
      const auto o = Of(op, version, keys, mask, Rows(given, this->row_bytes()), next);
      op == kvjax::Op::kPin ? this->Pin(q, o) : this->Unpin(q, o);
    });
  }
  void Put(const Keys& keys, const Bytes& values, const bool* mask = nullptr) {
    Write([&](auto* version, auto* next) {
      this->Upsert(q, Of(kvjax::Op::kUpsert, version, keys, mask, values.data(), {}, next));
    });
  }
  void Set(const Keys& keys, const Bytes& values, const bool* mask = nullptr) {
    Write([&](auto* version, auto* next) {
      this->Assign(q, Of(kvjax::Op::kAssign, version, keys, mask, values.data(), {}, next));
    });
  }
  void Plus(const Keys& keys, const Floats& deltas, const bool* mask = nullptr) {
    const Bytes given = Given(keys, mask);
    Write([&](auto* version, auto* next) {
      this->Add(q, Of(kvjax::Op::kAdd, version, keys, mask, data::Bytes(deltas),
                      Rows(given, this->row_bytes()), next));
    });
  }
  void Accumulate(const Keys& keys, const Floats& old_rows, const Floats& new_rows, const bool* exists,
                  const bool* mask = nullptr) {
    Write([&](auto* version, auto* next) {
      this->Accum(q, {.version = version,
                      .keys = data::Span(keys),
                      .mask = mask,
                      .old_rows = old_rows.data(),
                      .new_rows = new_rows.data(),
                      .exists = exists,
                      .next = next});
    });
  }
  void Drop(const Keys& keys, const bool* mask = nullptr) {
    Write([&](auto* version, auto* next) {
      this->Remove(q, Of(kvjax::Op::kRemove, version, keys, mask, {}, next));
    });
  }
  void Prune(const std::string& policy, int64_t step = -1) {
    Write([&](auto* version, auto* next) {
      this->Evict(q,
                  {.version = version, .policy = kvjax::Policy::Parse(policy), .step = &step, .next = next});
    });
  }
  std::vector<uint32_t> Victims(const std::string& policy, int64_t step = -1) {
    kvjax::EvictOperands o{.policy = kvjax::Policy::Parse(policy), .step = &step, .dry_run = true};
    std::vector<uint32_t> counts(o.policy.size());
    uint32_t next = 0;
    o.version = &handle, o.next = &next, o.counts = counts.data(), o.parts = counts.size();
    this->Evict(q, o);
    q.Wait();
    if (next != handle) throw std::logic_error("a dry run has made a version");
    return counts;
  }
  void Empty() {
    Write([&](auto* version, auto* next) { this->Clear(q, {.version = version, .next = next}); });
  }
  void ForgetSlots() {
    Write([&](auto* version, auto* next) {
      this->ClearSlots(q, {.op = kvjax::Op::kClearSlots, .version = version, .next = next});
    });
  }
  void Restore(const kvjax::SnapshotView& rows, const kvjax::AdmissionState& admission = {}) {
    handle = this->CommitLoad(data::Ready(*this, handle, rows, admission));
  }

  /// A whole step, with results for so many rows more than it has at most.
  void Train(const Gradients& g, const kvjax::SlotLayout& layout, size_t more = 0) {
    const size_t n = g.keys.size(), m = n + more, dim = static_cast<size_t>(this->spec().dim);
    const size_t bytes = this->row_bytes();
    Mask counted(new bool[n]);
    for (size_t i = 0; i < n; ++i) counted[i] = g.counts[i] > 0;
    const Bytes given = Given(g.keys, counted.get());
    const kvjax::StepSpan span = Of(g, &handle, layout, Rows(given, bytes));
    Bytes values(m * bytes, std::byte{7}), slot(layout.empty() ? 0 : m * dim * 4, std::byte{7});
    Floats grads(m * dim, 7.0f);
    const Mask fresh(new bool[m]);
    Keys row_keys(m, 7);
    std::vector<std::byte*> slots;
    if (!layout.empty()) slots.push_back(slot.data());
    int64_t used = -1;
    this->ReadStep(q, {.step = span,
                       .size = m,
                       .used_step = &used,
                       .values = values.data(),
                       .grads = grads.data(),
                       .fresh = fresh.get(),
                       .row_keys = row_keys.data(),
                       .slots = slots});
    q.Wait();
    this->Raise();
    step = used;
    for (size_t i = 0; i < m; ++i) {
      if (i >= n || g.counts[i] == 0) {
        CHECK(fresh[i] && row_keys[i] == 0 && grads[i * dim] == 0.0f && values[i * bytes] == std::byte{0});
      } else {
        CHECK(row_keys[i] == g.keys[i] || row_keys[i] == 0 || this->spec().admission.shares());
      }
      Floats scratch(dim);
      auto* const record = layout.empty() ? scratch.data() : reinterpret_cast<float*>(slot.data()) + i * dim;
      Descend(this->spec().type, dim, values.data() + i * bytes, grads.data() + i * dim,
              layout.empty() || fresh[i], record);
    }
    Write([&](auto* /*version*/, auto* next) {
      this->WriteStep(
          q, {.step = span, .values = values.data(), .slots = {slots.begin(), slots.end()}, .next = next});
    });
  }

  [[nodiscard]] Snapshot Copy() const { return this->Export(handle, true); }

  Q q;
  uint32_t handle;
  int64_t step = 0;
};

/// The same step on the CPU.
inline void Train(data::Live& table, const Gradients& g, const kvjax::SlotLayout& layout,
                  const Bytes& given) {
  const auto dim = static_cast<size_t>(table.spec().dim);
  const auto targets =
      table.Open(g.keys, g.counts, layout, g.step, g.rows, {given.data(), given.size() / table.row_bytes()});
  const size_t n = targets.size();
  Bytes values(n * table.row_bytes()), slot(layout.empty() ? 0 : n * dim * 4);
  const Mask fresh(new bool[n + 1]);
  std::vector<std::byte*> slots;
  if (!layout.empty()) slots.push_back(slot.data());
  table.Gather(kvjax::Serial, table.token, targets.data(), n, values.data(), fresh.get(), slots);
  for (size_t i = 0; i < n; ++i) {
    Floats scratch(dim);
    auto* const record = layout.empty() ? scratch.data() : reinterpret_cast<float*>(slot.data()) + i * dim;
    const float* const gradient = targets[i].gradient == kvjax::ApplyTarget::kSharedGradient
                                      ? table.shared_gradient.data()
                                      : g.rows.data() + targets[i].gradient * dim;
    Descend(table.spec().type, dim, values.data() + i * table.row_bytes(), gradient,
            layout.empty() || fresh[i], record);
  }
  table.Scatter(kvjax::Serial, table.token, targets.data(), n, values.data(), {slots.begin(), slots.end()},
                true);
}

/// What both count in the same way.
template <class T>
std::map<std::string, uint64_t> Counted(const T& table) {
  std::map<std::string, uint64_t> out;
  const kvjax::Statistics stats = table.Stats();
  for (const auto& [name, number] : kvjax::kStatistics) {
    for (const char* same : {"size", "last_step", "hits", "misses", "inserted", "removed", "admitted",
                             "refused", "occurrences", "distinct", "over_capacity"}) {
      if (std::string(name) == same) out[name] = stats.*number;
    }
  }
  for (const auto& [reason, rows] : stats.evicted) {
    if (rows > 0) out["evicted " + reason] = rows;
  }
  return out;
}

/// The keys (and what belongs to them) that the mask means, as the CPU's table is given them.
template <class T>
std::vector<T> Chosen(const std::vector<T>& all, const bool* mask, size_t n, size_t width = 1) {
  std::vector<T> out;
  for (size_t i = 0; i < n; ++i) {
    if (mask == nullptr || mask[i])
      out.insert(out.end(), all.begin() + static_cast<long>(i * width),
                 all.begin() + static_cast<long>((i + 1) * width));
  }
  return out;
}

}  // namespace device
