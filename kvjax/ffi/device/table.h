// The table in device memory: the host's side of each operation.
//
// A call puts kernels on a queue and returns; nothing waits in the steady state. The host does not know the
// version of the handle, nor how many rows there are: the device compares versions itself, and the host keeps
// an upper bound of the rows, from what the device reports by the way, and makes space for that.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/checks.h"
#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/load.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/stats.h"
#include "kvjax/ffi/core/user_code.h"
#include "kvjax/ffi/device/admit.h"
#include "kvjax/ffi/device/contents.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/marks.h"
#include "kvjax/ffi/device/order.h"
#include "kvjax/ffi/device/program.h"
#include "kvjax/ffi/device/read_kernels.h"
#include "kvjax/ffi/device/receive_buffer.h"
#include "kvjax/ffi/device/report_pool.h"
#include "kvjax/ffi/device/shared_row.h"
#include "kvjax/ffi/device/training_kernels.h"
#include "kvjax/ffi/device/victims.h"
#include "kvjax/ffi/device/write_kernels.h"

namespace kvjax::device {

inline constexpr size_t kHostBatch = 65536;  // rows that are copied at once, so that copies stay small

/// What a shard needs to know of a write to plan it.
struct PlanOperands {
  Op op;
  const uint32_t* version;
  KeySpan keys = {};
  const bool* mask = nullptr;
};

template <class Q>
struct Begun;

template <class Q>
class DeviceTable {
 public:
  /// Of an unsharded table: the first GPU. Kernels on host threads reach every device.
  static constexpr int32_t kHome = Q::kEveryDevice ? -1 : 0;

  DeviceTable(TableSpec spec, uint32_t first_version, Budget budget = {});
  /// Waits for the calls on this table.
  ~DeviceTable();
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;
  static std::shared_ptr<DeviceTable> Make(const TableSpec& spec, const std::string& storage,
                                           uint32_t first_version, size_t capacity);

  [[nodiscard]] const TableSpec& spec() const { return spec_; }
  [[nodiscard]] size_t row_bytes() const { return spec_.row_bytes(); }

  // ---- reads: all pointers are to device memory -------------------------------------------------------

  void Lookup(Q& q, const LookupOperands& o);
  void FindMissing(Q& q, const FindMissingOperands& o);
  void Inspect(Q& q, const InspectOperands& o);
  void ReadSlot(Q& q, const ReadSlotOperands& o);
  /// Says of every key that it may have changed, unless nothing at all has been written.
  void Changed(Q& q, const ChangedOperands& o);

  // ---- writes --------------------------------------------------------------------------------------------

  void Insert(Q& q, const WriteKeysOperands& o);
  void Pin(Q& q, const WriteKeysOperands& o);
  void Unpin(Q& q, const WriteKeysOperands& o);
  void Remove(Q& q, const WriteKeysOperands& o);
  void Upsert(Q& q, const WriteRowsOperands& o);
  void Assign(Q& q, const WriteRowsOperands& o);
  void Add(Q& q, const WriteRowsOperands& o);
  void Accum(Q& q, const AccumOperands& o);
  void Evict(Q& q, const EvictOperands& o);
  void Clear(Q& q, const ClearOperands& o);
  void ClearSlots(Q& q, const ClearOperands& o);
  void Apply(Q& q, const ApplyOperands& o);
  void PlanApply(Q& q, const PlanApplyOperands& o);
  void ReadStep(Q& q, const ReadStepOperands& o);
  void WriteStep(Q& q, const WriteStepOperands& o);

  // ---- a shard of a sharded table: see sharded.h --------------------------------------------------------

  void Plan(Q& q, const PlanOperands& o);
  void Receive(Q& q, const ReceiveOperands& o);
  void PlanStep(Q& q, const PlanStepOperands& o);
  /// Does a step of a program. One of any other update it opens, and once its chunks have come back, does
  /// that.
  void CommitStep(Q& q, const CommitStepOperands& o);
  /// Chunks of the rows of the step that is open.
  void Gather(Q& q, const GatherOperands& o);
  void Scatter(Q& q, const ScatterOperands& o);
  void Count(const Traffic& traffic) const { traffic.AddTo(counters_); }

  /// For a call of no table, whose refusal is reported to this one.
  CallView View(Op op, const uint32_t* version, bool narrow = false) const {
    return {control_.data(), report_.get(), version, static_cast<uint32_t>(op), narrow};
  }
  /// How many calls the device has refused, as far as it has come.
  [[nodiscard]] uint32_t refusals() const { return LoadFromDevice(report_->refusals); }
  /// Raises what the device has refused, if it has come so far.
  void Raise() const;
  /// Kernels on the queue use the table, in no call of it: it stays until they are done.
  void Cover(Q& q) {
    const typename Order<Q>::Turn turn(order_, q);
    Rearm(q);
  }

  // ---- whole tables, from the host; these wait for the device -------------------------------------------

  struct Loaded {
    uint32_t version;
    Contents<Q> contents;
    Admission<Q> admission;
    Control control;  // of the contents alone
    kvjax::Admission counts;
    KeyNumbering distinct;      // the keys that have been added
    Array<Q, Control> filling;  // the control where the device counts meanwhile
  };

  /// The last that the device has reported.
  [[nodiscard]] uint32_t version() const;
  /// Waits for all that has been asked of the device.
  void Settle() const;
  void CheckOutside(std::string_view op) const { user_code_.CheckOutside(spec_.name, op); }
  /// The live version for a new handle, once all that has been asked is done.
  [[nodiscard]] uint32_t SettledVersion() const;
  [[nodiscard]] size_t Size(uint32_t version, std::string_view op = "size") const;
  void Reserve(uint32_t version, size_t n);
  // Those with `raises` may be asked by a following handle, and leave then what others have been refused for.
  [[nodiscard]] Snapshot Export(uint32_t version, bool with_slots, std::string_view op = "export",
                                bool raises = true) const;
  [[nodiscard]] AdmissionState ExportAdmission(uint32_t version, std::string_view op = "export",
                                               bool raises = true) const;
  /// As the CPU's table, but the rows are copied to the host at once.
  [[nodiscard]] std::pair<std::shared_ptr<WholeSnapshot>, AdmissionState> Freeze(uint32_t version,
                                                                                 bool with_slots,
                                                                                 std::string_view op = "save",
                                                                                 bool raises = true) const {
    return {std::make_shared<WholeSnapshot>(Export(version, with_slots, op, raises)),
            ExportAdmission(version, op, raises)};
  }
  [[nodiscard]] size_t NextOf(WholeSnapshot& frozen, const SnapshotSpace& to) const {
    return frozen.Next(to);
  }
  [[nodiscard]] Loaded BeginLoad(uint32_t version, const LoadHead& head);
  void AddLoaded(Loaded& loaded, const SnapshotView& rows);
  void EndLoad(Loaded& loaded);
  uint32_t CommitLoad(Loaded loaded);
  /// A cursor from which ExportSince goes on; tokens are known to the table that gave them, whatever becomes
  /// of its rows.
  CursorToken OpenCursor(uint32_t version);
  void CloseCursor(CursorToken token);
  [[nodiscard]] Delta ExportSince(uint32_t version, CursorToken token, bool with_slots) const;
  [[nodiscard]] Statistics Stats(bool raises = true) const;
  [[nodiscard]] std::pair<size_t, uint32_t> Rows() const;
  [[nodiscard]] SlotLayout Layout() const;
  void SetSink(Sink sink);
  void SetScore(ScoreFunction score);

 private:
  /// Holds the table for a call, puts it behind those before it, and raises what these have been refused for:
  /// not a part of a step of one shard, which would fail alone, nor of a load that has begun, nor a call that
  /// only shows the table, whose caller may not hand an error on, nor a read through a following handle: what
  /// others have been refused for is theirs to raise.
  class Entered {
   public:
    Entered(const DeviceTable& table, Q& q, Op op, bool raises = true)
        : Entered(table, q, Name(op), raises) {}
    Entered(const DeviceTable& table, Q& q, std::string_view op, bool raises = true)
        : Entered(table, op, raises) {
      turn_.emplace(table.order_, q);
      if (raises) table.Rearm(q);
    }
    /// Of a call that asks nothing of the device.
    Entered(const DeviceTable& table, std::string_view op, bool raises = true) {
      table.user_code_.Wait(table.spec_.name, op);
      lock_ = std::unique_lock(table.mutex_, std::defer_lock);
      table.user_code_.Take(lock_, table.spec_.name, op);
      if (raises) table.Raise();
    }
    /// For a read. One without a version is that of a following handle.
    Entered(const DeviceTable& table, Q& q, Op op, const uint32_t* version)
        : Entered(table, Name(op), version != nullptr) {
      turn_.emplace(table.order_, q);
      if (version != nullptr) table.Rearm(q);
    }

   private:
    std::unique_lock<std::timed_mutex> lock_;
    std::optional<typename Order<Q>::Turn> turn_;
  };

  /// The keys of a call that have no row, numbered by first occurrence; of a following handle's, all keys:
  /// another version may come between the calls that number them.
  struct Numbered {
    Numbered(const DeviceTable& table, Q& q, CallView call, KeySpan keys, const bool* mask)
        : rows(q, keys.n), first(q, keys.n), number(q, keys.n + 1), total(number.data() + keys.n) {
      if (call.version == nullptr) {
        q.Fill(rows.data(), 0xFF, keys.n * sizeof(uint32_t));
      } else {
        FindRows(q, call, table.contents_.index().view(), keys.data, {.mask = mask}, keys.n, rows.data());
      }
      NumberKeys(q, keys.data, {.mask = mask, .rows = rows.data()}, keys.n, first.data(), number.data());
    }
    Scratch<Q, uint32_t> rows, first, number;
    const uint32_t* total;
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
  Control ExpectNow(Q& q, Op op, const uint32_t* version) const {
    const Control control = Fetch(q, control_.data());
    Expect(Name(op), Fetch(q, version), control);
    return control;
  }

  /// What there is at most.
  struct Bound {
    uint64_t size = 0, cells_used = 0;
    uint64_t waiting = 0, waiting_cells = 0;
    uint64_t next_row = 0, free_rows = 0;
    uint64_t pending = 0;  // keys of writes that have not been reported
  };
  [[nodiscard]] Bound Upper();
  [[nodiscard]] size_t EndRow(const Bound& bound, size_t to_come) const;
  [[nodiscard]] bool Fits(const Bound& bound, size_t n) const;
  void MakeSpace(Q& q, Op op, size_t n);
  void Extend(Q& q, const Bound& now, size_t n);

  // What a write holds while it is being queued, see write_scopes.h.
  struct Finding;
  struct Entering;
  struct Deciding;
  struct NewSlots;

  /// Makes the next version; the write had n keys that may have got rows.
  template <class More = NoMore>
  void End(Q& q, CallView call, size_t n, uint32_t* next, More more = {}) {
    ++writes_;
    if (n > 0) pending_.emplace_back(writes_, n);
    EndWrite(q, call, writes_, spec_.max_capacity, next, more);
  }
  [[nodiscard]] bool BringsSlots(Q& q, const StepSpan& step, bool planned = false) const;
  void Begin(Q& q, const StepSpan& step, const GradientsView& gradients, float* sum, const Begun<Q>& begun,
             bool planned, uint32_t* next);
  [[nodiscard]] Steps StepsOf(const Program& program, const SlotLayout& layout) const;
  void Run(Q& q, const DeviceProgram<Q>& program, const StepSpan& step, const float* shared_gradient,
           const Begun<Q>& begun, const uint32_t* next);
  [[nodiscard]] std::vector<Parts> PartsOf(const SlotLayout& layout, const std::byte* values,
                                           const std::vector<const std::byte*>& slots) const;
  void Read(Q& q, const ReadStepOperands& o, const GradientsView& gradients);
  void WriteWhole(Q& q, const WriteStepOperands& o, const GradientsView& gradients,
                  int64_t* used_step = nullptr);
  uint32_t ExpectLive(Q& q, Op op, const uint32_t* version, bool narrow) const;
  void ForgetPlan(Q& q);
  void Open(Q& q, const StepSpan& step, const GradientsView& gradients, const CommitStepOperands& o);
  template <class Slot>
  [[nodiscard]] std::vector<ChunkPart> StagedParts(Slot* values, const std::vector<Slot*>& slots) const;
  void CopyStaged(Q& q, const ChunkSpan& chunk, const std::vector<ChunkPart>& parts, bool in);
  void Rearm(Q& q) const;

  // Which rows are evicted, see evict.h.
  struct Choosing;
  void EvictForSpace(const Entering& e, const EnterView& entering, bool plans);
  void Ask(Q& q, const Choosing& c, const DevicePolicy<Q>& policy, Choice::Asked asked);
  void Leave(Q& q, const Choosing& c, bool plans = false);
  void Score(Q& q, const Choosing& c);
  void Show(Q& q, const Choosing& c);
  [[nodiscard]] bool MayBeFull(size_t n);
  /// Whether there are never more rows than the capacity.
  [[nodiscard]] bool keeps_to_capacity() const {
    return spec_.max_capacity > 0 && spec_.on_full != OnFull::kGrow;
  }
  [[nodiscard]] uint32_t NumberOf(Q& q, const std::string& reason);

  void SettleReport(Q& q);
  [[nodiscard]] Snapshot Copy(Q& q, const Control& control, bool slots) const;
  [[nodiscard]] std::shared_ptr<const Marks> MarksNow(Q& q, const Control& control) const;
  [[nodiscard]] Snapshot CopyRows(Q& q, const std::vector<KeyRow>& rows, bool slots) const;

  /// At the end of a training step with n keys: swaps rows between the tiers, if it is time.
  void KeepHotRows(Q& q, CallView call, size_t n);

  TableSpec spec_;
  Budget budget_;
  size_t trained_ = 0;  // keys since rows have last been swapped
  typename ReportPool<Q>::Pointer report_;
  mutable std::atomic<uint32_t> raised_ = 0;  // of the refusals in the report
  mutable std::atomic<bool> rearms_ = false;  // the device is to be told of that
  Contents<Q> contents_;
  Admission<Q> admission_;
  Array<Q, Control> control_;
  Array<Q, float> pool_;
  mutable UserCode user_code_;
  mutable std::timed_mutex mutex_;  // of the host's side; calls hold it while they queue their kernels
  mutable Order<Q> order_;
  std::vector<std::pair<uint32_t, size_t>> pending_;  // writes with keys that have not been reported yet
  uint32_t writes_ = 0;
  std::optional<uint32_t> reindexed_,
      admission_reindexed_;       // the last write before that, until the next is reported
  bool short_of_memory_ = false;  // there was none to grow ahead of need
  size_t reserved_ = 0;
  ShardStep<Q> step_;
  size_t coming_ = 0;  // keys of the write that a shard has planned
  mutable Counters counters_;
  DevicePolicy<Q> policy_, last_;
  std::vector<std::string> reasons_;
  Array<Q, Evicted> evicted_;  // by reason
  Sink sink_;
  ScoreFunction score_;
  std::map<CursorToken, std::shared_ptr<const Marks>> cursors_;
};

}  // namespace kvjax::device
