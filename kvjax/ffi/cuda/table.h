// The table in device memory: the host's side of each operation.
//
// A call puts kernels on a queue and returns; nothing waits in the steady state. The host does not know the
// version of the handle, nor how many rows there are: the device compares versions itself, and the host keeps
// an upper bound of the rows, from what the device reports by the way, and waits only when that bound leaves
// no room.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/contents.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/stats.h"
#include "kvjax/ffi/core/version.h"
#include "kvjax/ffi/cuda/admit.h"
#include "kvjax/ffi/cuda/contents.h"
#include "kvjax/ffi/cuda/control.h"
#include "kvjax/ffi/cuda/reads.h"
#include "kvjax/ffi/cuda/shared.h"
#include "kvjax/ffi/cuda/training.h"
#include "kvjax/ffi/cuda/writes.h"

namespace kvjax::device {

template <class Q>
class DeviceTable {
 public:
  DeviceTable(TableSpec spec, uint32_t first_version);
  static std::shared_ptr<DeviceTable> Make(const TableSpec& spec, const std::string& storage,
                                           uint32_t first_version, size_t capacity);

  [[nodiscard]] const TableSpec& spec() const { return spec_; }
  [[nodiscard]] size_t row_bytes() const { return spec_.row_bytes(); }

  // ---- reads: all pointers are to device memory -------------------------------------------------------

  void Lookup(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, InitialRows initial,
              Missing missing, std::byte* out, bool* found) {
    const Entered call(*this, "lookup");
    const AdmissionSpec& admission = spec_.admission;
    const bool zeros = missing == Missing::kTable && admission.kind != AdmissionSpec::Kind::kEvery &&
                       admission.unadmitted == AdmissionSpec::Unadmitted::kZeros;
    LookupView v{.call = View("lookup", version, keys.narrow),
                 .in = contents_.view(),
                 .initial = Initial(initial),
                 .keys = keys.data,
                 .mask = mask,
                 .zeros = zeros,
                 .first = nullptr,
                 .number = nullptr,
                 .total = nullptr,
                 .rows = out,
                 .found = found,
                 .shares = missing == Missing::kTable && admission.shares(),
                 .shared_key = admission.shared_key,
                 .shared_place = keys.n};
    if (spec_.initializer.kind != Generator::Kind::kGiven || zeros) return LookupRows(q, v, keys.n);
    const WithShared<Q> all(q, admission, keys, {.mask = mask});
    const Numbered missing_keys(*this, q, v.call, all.keys(), all.meant().mask);
    v.first = missing_keys.first.data(), v.number = missing_keys.number.data();
    v.total = missing_keys.total.data();
    LookupRows(q, v, keys.n);
  }
  void FindMissing(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, uint64_t* missing,
                   int32_t* count) {
    const Entered call(*this, "lookup");
    const WithShared<Q> all(q, spec_.admission, keys, {.mask = mask});
    const bool* const meant = all.meant().mask;
    const Numbered m(*this, q, View("lookup", version, keys.narrow), all.keys(), meant);
    q.Fill(missing, 0, (keys.n + 1) * sizeof(uint64_t));
    WriteMissing(q, all.keys().data, {.mask = meant, .rows = m.rows.data()}, all.keys().n, m.first.data(),
                 m.number.data(), m.total.data(), missing, count);
  }
  void Inspect(Q& q, std::string_view op, const uint32_t* version, KeySpan keys, bool* found,
               int64_t* frequency, int64_t* row_version) {
    const Entered call(*this, op);
    InspectRows(q, View(op, version, keys.narrow), contents_.view(), keys.data, keys.n, found, frequency,
                row_version);
  }
  void ReadSlot(Q& q, const uint32_t* version, std::string_view name, size_t bytes, KeySpan keys,
                std::byte* out) {
    const Entered call(*this, "slot");
    const auto& slots = contents_.layout().slots();
    const auto slot = std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.name == name; });
    if (slot == slots.end() || slot->bytes != bytes) {
      throw MakeError(ErrorCode::kFailedPrecondition, spec_.name, "slot",
                      "a slot " + std::string(name) + " of " + std::to_string(bytes) + " bytes",
                      contents_.layout().ToString(),
                      "the optimizer has changed: call slot outside of what was compiled");
    }
    ReadSlotOf(q, View("slot", version, keys.narrow), contents_.view(), slot->offset, bytes, keys.data,
               keys.n, out);
  }
  /// Says of every key that it may have changed, unless nothing at all has been written.
  void Changed(Q& q, const uint32_t* version, const uint32_t* since, KeySpan keys, bool* changed) {
    const Entered call(*this, "prefetch");
    MarkChanged(q, View("prefetch", version, keys.narrow), since, keys.n, changed);
  }

  // ---- writes: `next` gets the next version ------------------------------------------------------------

  void Insert(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, InitialRows initial,
              uint32_t* next);
  void Pin(Q& q, std::string_view op, const uint32_t* version, KeySpan keys, const bool* mask,
           InitialRows initial, uint32_t* next);
  void Remove(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, uint32_t* next);
  void Upsert(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, const std::byte* values,
              uint32_t* next);
  void Assign(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, const std::byte* values,
              uint32_t* next);
  void Add(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, const float* deltas,
           InitialRows initial, uint32_t* next);
  void Accum(Q& q, const uint32_t* version, KeySpan keys, const bool* mask, const float* old_values,
             const float* new_values, const bool* exists, uint32_t* next);
  void Evict(Q& q, std::string_view op, const uint32_t* version, const Policy& policy, const uint32_t* step,
             uint32_t* next);
  void Clear(Q& q, const uint32_t* version, uint32_t* next);
  void ClearSlots(Q& q, const uint32_t* version, uint32_t* next);

  void BeginApply(Q& q, const uint32_t* version, KeySpan keys, GradientsView gradients,
                  const SlotLayout& layout, InitialRows initial, uint32_t* next, uint32_t* targets,
                  int32_t* active, uint32_t* used_step, float* pooled);
  void Gather(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows, const int32_t* start,
              const int32_t* active, size_t chunk, const GatherView& out,
              const std::vector<std::byte*>& slots);
  void Scatter(Q& q, const uint32_t* version, const uint32_t* targets, size_t num_rows, const int32_t* start,
               const int32_t* active, size_t chunk, const std::byte* values,
               const std::vector<const std::byte*>& slots);

  /// For a call of no table, which tells this one of its refusal.
  CallView View(std::string_view op, const uint32_t* version, bool narrow) const {
    return {control_.data(), report_.get(), version, OpNames::Get().Number(op), narrow};
  }
  /// Raises what the device has refused, if it has come so far.
  void Raise() const;

  // ---- whole tables, from the host; these wait for the device -------------------------------------------

  struct Loaded {
    uint32_t version;
    Contents<Q> contents;
    Admission<Q> admission;
    Control control;
  };

  [[nodiscard]] uint32_t version() const;
  [[nodiscard]] uint32_t SettledVersion();
  [[nodiscard]] size_t Size(uint32_t version) const;
  void Reserve(uint32_t version, size_t n);
  [[nodiscard]] Snapshot Export(uint32_t version, bool with_slots) const;
  [[nodiscard]] AdmissionState ExportAdmission(uint32_t version) const;
  [[nodiscard]] Loaded PrepareLoad(uint32_t version, const SnapshotView& rows,
                                   const AdmissionState& admission);
  uint32_t CommitLoad(Loaded loaded);
  [[nodiscard]] Statistics Stats() const;
  [[nodiscard]] std::pair<size_t, uint32_t> Rows() const;
  [[nodiscard]] SlotLayout Layout() const;
  void SetSink(Sink sink);
  void SetScore(ScoreFunction score);

 private:
  /// Holds the table for a call, and raises what earlier calls have been refused for: not one that goes on
  /// with a training step, which another's fault must not tear.
  class Entered {
   public:
    Entered(const DeviceTable& table, std::string_view op, bool begins = true) {
      table.user_code_.Wait(table.spec_.name, op);
      lock_ = std::unique_lock(table.mutex_);
      if (begins) table.Raise();
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  /// The keys of a call that have no row, numbered by first occurrence.
  struct Numbered {
    Numbered(const DeviceTable& table, Q& q, CallView call, KeySpan keys, const bool* mask)
        : rows(q, keys.n), first(q, keys.n), number(q, keys.n), total(q, 1) {
      FindRows(q, call, table.contents_.index().view(), keys.data, {.mask = mask}, keys.n, rows.data());
      NumberKeys(q, keys.data, {.mask = mask, .rows = rows.data()}, keys.n, first.data(), number.data(),
                 total.data());
    }
    Scratch<Q, uint32_t> rows, first, number, total;
  };

  [[nodiscard]] InitialView Initial(InitialRows given) const {
    const auto dim = static_cast<size_t>(spec_.dim);
    return {spec_.initializer, spec_.type,         spec_.dim,  row_bytes(),
            pool_.data(),      pool_.size() / dim, given.data, given.n};
  }
  template <class T>
  static T Fetch(Q& q, const T* from) {
    T value;
    q.Copy(&value, from, sizeof(T));
    q.Wait();
    return value;
  }
  /// Checks a version that the host knows.
  void Expect(std::string_view op, uint32_t version, const Control& control) const {
    if (version != control.version) throw VersionError(spec_.name, op, version, control.version);
  }
  /// Waits, and checks at once what the device would.
  Control ExpectNow(Q& q, std::string_view op, const uint32_t* version) const {
    const Control control = Fetch(q, control_.data());
    Expect(op, Fetch(q, version), control);
    return control;
  }

  /// What there is at most.
  struct Bound {
    uint64_t size = 0, slots_used = 0;
    uint64_t waiting = 0, waiting_slots = 0;
    uint64_t next_row = 0, free_rows = 0;
    uint64_t pending = 0;  // keys of writes that have not been reported
  };
  [[nodiscard]] Bound Upper();
  [[nodiscard]] bool HasRoom(size_t n);
  void MakeRoom(Q& q, std::string_view op, size_t n);

  /// A write of keys that are there. Kernels of the call follow its making.
  struct Finding {
    Finding(DeviceTable& table, Q& q, std::string_view op, const uint32_t* version, KeySpan keys, Meant meant)
        : table(table),
          q(q),
          call(table.View(op, version, keys.narrow)),
          first(q, keys.n),
          last(q, keys.n),
          rows(q, keys.n) {
      BeginWrite(q, call);
      GroupKeys(q, keys.data, meant, keys.n, first.data(), last.data());
      FindRows(q, call, table.contents_.index().view(), keys.data, meant, keys.n, rows.data());
    }
    void End(uint32_t* next) const { table.End(q, call, 0, next); }

    DeviceTable& table;
    Q& q;
    CallView call;
    Scratch<Q, uint32_t> first, last, rows;
  };

  /// A write of keys that are to have rows. What it is given is checked and room is made for it; what fails
  /// or refuses the call has changed nothing, also in Enter, which then lets what must go leave, and gives
  /// rows.
  struct Entering {
    Entering(DeviceTable& table, Q& q, std::string_view op, const uint32_t* version, KeySpan keys,
             Meant meant, const bool* exists = nullptr, const GradientsView* gradients = nullptr)
        : table(table),
          q(q),
          op(op),
          keys(keys),
          meant(meant),
          exists(exists),
          gradients(gradients),
          call(table.View(op, version, keys.narrow)),
          first(q, keys.n),
          last(q, keys.n),
          rows(q, keys.n) {
      BeginWrite(q, call);
      GroupKeys(q, keys.data, meant, keys.n, first.data(), last.data());
      if (gradients != nullptr) CheckGradients(q, call, *gradients, first.data());
      table.MakeRoom(q, op, keys.n);
    }
    void Enter(InitialRows initial, bool blank, const uint8_t* allowed) const {
      // Rows that come with the call are those of all new keys, also of those that get none.
      const bool given = !blank && table.spec_.initializer.kind == Generator::Kind::kGiven;
      const bool apart = given && allowed != nullptr;
      const NewKeys<Q> news(q, keys.n, apart);
      const EnterView v{.call = call,
                        .in = table.contents_.view(),
                        .initial = table.Initial(initial),
                        .blank = blank,
                        .given = given,
                        .keys = keys.data,
                        .meant = meant,
                        .first = first.data(),
                        .allowed = allowed,
                        .rows = rows.data(),
                        .flag = news.flags.data(),
                        .number = news.numbers.data(),
                        .is_new = apart ? news.news.data() : news.flags.data(),
                        .place = apart ? news.places.data() : news.numbers.data()};
      CountNew(q, v, keys.n);
      table.LetLeave(*this);
      EnterNew(q, v, keys.n);
      if (gradients != nullptr || !table.admission_.counts_keys()) return;
      ForgetWaiting(q, call, table.admission_.view().waiting, keys.data, meant, first.data(), rows.data(),
                    keys.n);
    }
    void End(uint32_t* next) const { table.End(q, call, keys.n, next); }

    DeviceTable& table;
    Q& q;
    std::string_view op;
    KeySpan keys;
    Meant meant;
    const bool* exists;
    const GradientsView* gradients;
    CallView call;
    Scratch<Q, uint32_t> first, last, rows;
  };

  /// Slots that go again unless the step that brings them is let in.
  struct NewSlots {
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

  /// Makes the next version; the write had n keys that may have got rows.
  void End(Q& q, CallView call, size_t n, uint32_t* next) {
    ++writes_;
    if (n > 0) pending_.emplace_back(writes_, n);
    EndWrite(q, call, writes_, spec_.max_capacity, next);
  }
  void CheckSlots(size_t n) const;
  [[nodiscard]] bool Refused() const { return LoadFromDevice(report_->refusal) != 0; }

  // What must go is chosen on the host, from a copy of what the choice needs: exact, and rare.
  void LetLeave(const Entering& e);
  void SettleReport(Q& q);
  [[nodiscard]] bool IsFull(Q& q, size_t n);
  [[nodiscard]] std::unique_ptr<kvjax::Contents> Twin(Q& q, const Control& control) const;
  void Leave(Q& q, CallView call, std::string_view op, kvjax::Contents& twin, Change& change);
  [[nodiscard]] Snapshot Copy(Q& q, const Control& control, bool values, bool slots) const;

  TableSpec spec_;
  struct FreeReport {
    void operator()(Report* report) const { Q::FreeShared(report); }
  };
  std::unique_ptr<Report, FreeReport> report_;  // before what waits for the device as it goes
  Contents<Q> contents_;
  Admission<Q> admission_;
  Array<Q, Control> control_;
  Array<Q, float> pool_;
  mutable UserCode user_code_;
  mutable std::mutex mutex_;  // of the host's side; calls hold it while they queue their kernels
  std::vector<std::pair<uint32_t, size_t>> pending_;  // writes with keys that have not been reported yet
  uint32_t writes_ = 0;
  size_t reserved_ = 0;
  std::map<std::string, uint64_t, std::less<>> evicted_;
  Sink sink_;
  ScoreFunction score_;
  std::atomic<bool> in_step_ = false;
  std::atomic<int64_t> touched_ = 0;  // milliseconds
};

}  // namespace kvjax::device
