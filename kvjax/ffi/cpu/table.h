// The table on the CPU: each operation, and the locks and plans behind it.
//
// version.h says which calls are let in, contents.h how rows are made and erased. Writes give the strong
// guarantee: all that can fail (checks, memory, the user's sink) comes before the first change.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/away.h"
#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/checks.h"
#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/core/delta.h"
#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/operands.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/cpu/contents.h"
#include "kvjax/ffi/cpu/frozen.h"
#include "kvjax/ffi/cpu/last_batch.h"
#include "kvjax/ffi/cpu/plan.h"
#include "kvjax/ffi/cpu/version.h"

namespace kvjax {

class Table {
 public:
  static constexpr int32_t kHome = -1;  // of an unsharded table: every device

  /// storage: see storage.h; capacity: rows to reserve space for.
  static std::shared_ptr<Table> Make(const TableSpec& spec, const std::string& storage,
                                     uint32_t first_version, size_t capacity);
  Table(TableSpec spec, std::shared_ptr<SlabAllocator> allocator, uint32_t first_version)
      : spec_(std::move(spec)), in_(spec_, std::move(allocator)), gate_(first_version) {}

  [[nodiscard]] const TableSpec& spec() const { return spec_; }
  [[nodiscard]] uint32_t version() const { return gate_.version(); }
  void Settle() const {}  // calls are done when they return
  void CheckOutside(std::string_view op) const { gate_.CheckOutside(spec_.name, op); }
  /// The live version for a new handle.
  [[nodiscard]] uint32_t SettledVersion() const { return version(); }  // steps are whole when they have one
  [[nodiscard]] size_t row_bytes() const { return spec_.row_bytes(); }

  // ---- reads: without a version, of what the last write has finished --------------------------------------

  using ReadVersion = std::optional<uint32_t>;

  /// out: (n, dim) of the row type; found: (n,). Where mask (n,) is false, the row is zeros and not found;
  /// no mask (nullptr) is one that is true. With own_rows, initial rows count as found.
  void Lookup(const ParallelFor& parallel, ReadVersion version, KeySpan keys, const bool* mask,
              InitialRows initial, Missing missing, std::byte* out, bool* found, bool own_rows = false) const;

  /// The distinct keys without a row, in order of first occurrence, where mask (n,) is true; with a shared
  /// row, its key last if it has none. Without a version all distinct keys: the lookup that comes after may
  /// meet another version, and numbers them likewise. out: space for n + 1 keys. Returns their number.
  size_t FindMissing(const ParallelFor& parallel, ReadVersion version, KeySpan keys, const bool* mask,
                     uint64_t* out) const;

  /// What is known of each key beside its row: found (n,), frequency (n,), of a key without a row as far as
  /// it is counted, version (n,) or -1, pinned (n,).
  void Inspect(const ParallelFor& parallel, std::string_view op, ReadVersion version, KeySpan keys,
               bool* found, int64_t* frequency, int64_t* row_version, bool* pinned) const;

  /// The optimizer's slot of that name: out (n, bytes of the slot), zeros where none has been written;
  /// without a name ones or zeros, for whether one has.
  void ReadSlot(const ParallelFor& parallel, ReadVersion version, std::string_view name, size_t bytes,
                KeySpan keys, std::byte* out) const;

  /// Whether what was read of each key at version `since` may not be what is read now: changed (n,). True of
  /// every key unless one training write is all that lies between.
  void Changed(uint32_t version, uint32_t since, KeySpan keys, bool* changed) const;

  // ---- writes: each returns the next version, or 0 if it has only been planned ---------------------------

  /// Gives every key without a row its initial row.
  uint32_t Insert(const ParallelFor& parallel, Call call, KeySpan keys, InitialRows initial);

  /// Pinned rows are never evicted. Keys without a row get one to be pinned.
  uint32_t Pin(const ParallelFor& parallel, Call call, KeySpan keys, InitialRows initial);
  uint32_t Unpin(Call call, KeySpan keys);

  /// Overwrites or inserts; values: (n, dim) of the row type; of equal keys the last one wins.
  uint32_t Upsert(const ParallelFor& parallel, Call call, KeySpan keys, const std::byte* values);

  /// Overwrites rows; keys without one are passed over.
  uint32_t Assign(const ParallelFor& parallel, Call call, KeySpan keys, const std::byte* values);

  /// Adds deltas (n, dim) float32 to rows; those of equal keys are summed first. A key without a row starts
  /// from its initial one.
  uint32_t Add(const ParallelFor& parallel, Call call, KeySpan keys, const float* deltas,
               InitialRows initial);

  /// TFRA's rule, one key after the other: where `exists` is false and the key has no row, the new value is
  /// inserted; where it is true and the key has one, new - old is added; else nothing happens.
  /// old_values, new_values: (n, dim) float32; exists: (n,).
  uint32_t Accum(const ParallelFor& parallel, Call call, KeySpan keys, const float* old_values,
                 const float* new_values, const bool* exists);

  /// Removes rows with all that belongs to them, and the counts of keys that wait for one.
  uint32_t Remove(Call call, KeySpan keys);

  /// Removes what the policy chooses; a negative `step` stands for the table's last.
  uint32_t Evict(const ParallelFor& parallel, std::string_view op, Call call, const Policy& policy,
                 int64_t step);
  /// What Evict would do, which is not done: how many rows each part of the policy chooses. The next version
  /// is the one that there is.
  uint32_t CountVictims(const ParallelFor& parallel, Call call, const Policy& policy, int64_t step,
                        std::span<uint32_t> counts);

  /// Removes every row and what is known of keys without one, and gives the memory back.
  uint32_t Clear(Call call);

  /// Forgets the optimizer's slots of every row, so that another optimizer can take over.
  uint32_t ClearSlots(Call call);

  // ---- the training write -------------------------------------------------------------------------------

  /// The whole of it, for a row program. Gradients of equal keys are summed. A step that holds is only
  /// planned, with its memory: it gives the word by which EndApply knows it, and any other write ends it.
  uint32_t Apply(const ParallelFor& parallel, const ApplyOperands& o);
  uint32_t EndApply(const ParallelFor& parallel, const EndApplyOperands& o);

  // ---- the same in chunks, for any other update: BeginApply, then Gather and Scatter for each -----
  //
  // BeginApply plans the step and takes all memory for it, and the last Scatter commits it. Until then it is
  // nothing to others, and any other write ends it.

  using Target = ApplyTarget;
  static constexpr uint32_t kSharedGradient = ApplyTarget::kSharedGradient;

  /// The results of BeginApply: targets has space for n, of which the first `active` are valid;
  /// shared_gradient: (dim,); facts: (n,), or nullptr if nobody wants them.
  struct Begun {
    Target* targets;
    int32_t* active;
    int64_t* step;
    float* shared_gradient;
    RowFacts* facts = nullptr;
  };

  /// keys are distinct; counts: (n,) occurrences; zeros, all at the end, are padding. rows: (n, dim)
  /// gradients. A negative `step` stands for the one after the last. Returns the word by which the other
  /// calls know the step.
  uint32_t BeginApply(const ParallelFor& parallel, uint32_t version, KeySpan keys, const int32_t* counts,
                      const float* rows, int64_t step, const SlotLayout& layout, InitialRows initial,
                      Begun out);

  void Gather(const ParallelFor& parallel, const GatherOperands& o) const;
  uint32_t Scatter(const ParallelFor& parallel, const ScatterOperands& o);

  /// What these do. Copies n rows out: values (n, dim), fresh (n,) true where no optimizer has written slots
  /// yet, and one array per slot.
  void Gather(const ParallelFor& parallel, uint32_t token, const Target* targets, size_t n, std::byte* values,
              bool* fresh, const std::vector<std::byte*>& slots) const;
  /// Takes back what Gather copied out; with `last` the step is done, unless it holds for EndApply. Returns
  /// its word, or at last the next version.
  uint32_t Scatter(const ParallelFor& parallel, uint32_t token, const Target* targets, size_t n,
                   const std::byte* values, const std::vector<const std::byte*>& slots, bool last,
                   bool holds = false);

  // ---- the same on one shard (sharded.h): Receive, PlanStep, Prepare, Continue, CommitStep ---

  /// Gradients that have arrived: keys and counts (senders, n), rows (senders, n, dim), in the given one of
  /// `rounds` rounds; initial rows of the keys that have none here.
  void Receive(const ParallelFor& parallel, uint32_t version, KeySpan keys, const int32_t* counts,
               const float* rows, size_t senders, int32_t round, int32_t rounds, InitialRows initial);
  void PlanStep(const ParallelFor& parallel, const PlanStepOperands& o, ShardSummary& summary);
  /// The summary of another write that has been proposed.
  void Summarize(uint32_t version, ShardSummary& summary);
  /// summaries: of all shards, in their order; `shard` is the number of this one. Returns what the shards
  /// have to add up before the write is prepared, or nothing if it is.
  std::optional<Tally> Prepare(const ParallelFor& parallel, std::string_view op, uint32_t version,
                               const std::vector<ShardSummary>& summaries, size_t shard);
  /// The same with the sum of what the shards have counted.
  std::optional<Tally> Continue(const ParallelFor& parallel, std::string_view op, uint32_t version,
                                const Tally& sum);
  /// The same as Apply does; or first as BeginApply, with how many rows are to be updated in chunks, and
  /// again once these are staged. Sets which step it is.
  uint32_t CommitStep(const ParallelFor& parallel, uint32_t version, int32_t* active, int64_t* step);
  [[nodiscard]] const Step& shard_step() const { return step_; }
  /// The batch of a write, as the commit of a plan wants it: that must not need memory.
  void KeepBatch(const Call& call, OwnBatch batch);
  [[nodiscard]] OwnBatch TakeBatch(const Call& call);
  void Count(const Traffic& traffic) const { traffic.AddTo(in_.counters); }

  // ---- whole tables, from the host ---------------------------------------------------------------------

  // op: of the call that wants it, for errors.

  [[nodiscard]] size_t Size(uint32_t version, std::string_view op = "size") const {
    const auto lock = Read(version, op, {});
    return in_.store.size();
  }

  /// All rows; `with_slots` false leaves the optimizer's slots behind.
  // `raises` is for a device, whose errors come late.
  [[nodiscard]] Snapshot Export(uint32_t version, bool with_slots, std::string_view op = "export",
                                bool raises = true) const;
  [[nodiscard]] AdmissionState ExportAdmission(uint32_t version, std::string_view op = "export",
                                               bool raises = true) const;

  /// The same, but the rows stay where they are, to be copied out part by part by NextOf, and writes may go
  /// on.
  [[nodiscard]] std::pair<std::shared_ptr<Frozen>, AdmissionState> Freeze(uint32_t version, bool with_slots,
                                                                          std::string_view op = "save",
                                                                          bool raises = true);
  /// Copies the next rows of what Freeze has given to where there is space for some; returns how many, in the
  /// end 0.
  [[nodiscard]] size_t NextOf(Frozen& frozen, const SnapshotSpace& to) const;

  /// Contents that are to replace those of the table, which is unchanged until CommitLoad: begun, then all
  /// rows added, some at a time, then ended.
  using Loaded = LoadedContents;
  [[nodiscard]] Loaded BeginLoad(uint32_t version, const LoadHead& head) const;
  void AddLoaded(Loaded& loaded, const SnapshotView& rows) const;
  void EndLoad(Loaded& /*loaded*/) const {}
  uint32_t CommitLoad(Loaded loaded);

  /// A cursor from which ExportSince goes on; tokens are known to the table that gave them.
  CursorToken OpenCursor(uint32_t version);
  void CloseCursor(CursorToken token);
  [[nodiscard]] Delta ExportSince(uint32_t version, CursorToken token, bool with_slots) const;

  /// Reserves space for `n` rows in all.
  void Reserve(uint32_t version, size_t n);

  /// Of a new table, whose rows are to live there.
  void SetEngine(Engine engine);
  void SetSink(Sink sink);
  void SetScore(ScoreFunction score);

  [[nodiscard]] Statistics Stats(bool raises = true) const;
  /// The number of rows and the version that they belong to.
  [[nodiscard]] std::pair<size_t, uint32_t> Rows() const;
  [[nodiscard]] SlotLayout Layout() const;
  /// Calls f(contents) with nobody writing.
  template <class F>
  auto Observe(F f) const {
    const auto lock = gate_.ReadAny(spec_.name, "stats");
    return f(in_);
  }

 private:
  static constexpr size_t kGrain = 2048;  // keys: below this, waking a second thread costs more than it saves
  static constexpr size_t kRowGrain = 256;  // rows: the same for copying them with their slots
  static constexpr size_t kAhead = 16;      // rows: how far ahead their cache lines are fetched

  using Column = RowsAway::Column;

  /// A call from its door to its end, between which rows that live in an engine are in memory; where none do,
  /// it is nothing.
  class Visit {
   public:
    Visit(const Table& table, std::string_view op, bool writes) : table_(table), writes_(writes) {
      if (table.in_.store.away() == nullptr) return;
      turn_ = std::unique_lock(table.away_turn_, std::defer_lock);
      table.gate_.Take(turn_, table.spec_.name, op);
      table.in_.store.away()->Enter();
    }
    Visit(Visit&&) = default;
    ~Visit() {
      if (!turn_) return;
      // The store may have been replaced since this began.
      table_.in_.store.away()->End(table_.in_.store, table_.version(), table_.planning(), writes_);
    }

   private:
    const Table& table_;
    bool writes_;
    std::unique_lock<std::timed_mutex> turn_;  // also those that read take turns, as they bring rows
  };
  /// A call that has been let in.
  template <class Lock>
  struct Entered {
    Lock lock;
    Visit visit;
  };

  [[nodiscard]] Entered<VersionGate::ReadLock> Read(ReadVersion version, std::string_view op, KeySpan keys,
                                                    Column columns = Column::kNone) const {
    Entered<VersionGate::ReadLock> entered{gate_.Read(spec_.name, op, version), {*this, op, false}};
    CheckWidth(op, keys);
    Bring(keys, columns, 0);
    return entered;
  }
  [[nodiscard]] Entered<VersionGate::WriteLock> Write(uint32_t version, std::string_view op, KeySpan keys,
                                                      Column columns = Column::kNone) {
    Entered<VersionGate::WriteLock> entered{gate_.Write(spec_.name, op, version), {*this, op, true}};
    CheckWidth(op, keys);
    if (RowsAway* const away = in_.store.away()) away->Begin(in_.store);
    Bring(keys, columns, RowStore::kHeader);
    return entered;
  }
  /// Before a call: has columns of the rows of keys in memory, or on their way there. also: other parts of
  /// rows that the call uses.
  void Bring(KeySpan keys, Column columns, unsigned also) const {
    RowsAway* const away = in_.store.away();
    if (columns == Column::kNone) return;
    if (away == nullptr) {
      return in_.store.ReadAheadOf(keys.n, columns | also,
                                   [&](size_t i) { return in_.store.index().Find(keys.data[i]); });
    }
    away->Bring(in_.store, {keys.data, keys.n}, columns);
    if (in_.admission.shares()) away->Bring(in_.store, {&spec_.admission.shared_key, 1}, columns);
  }
  /// Whether rows that have been planned wait for the call that makes them.
  [[nodiscard]] bool planning() const { return step_.plan || planned_; }
  void CheckWidth(std::string_view op, KeySpan keys) const {
    if (!keys.narrow || !in_.store.wide()) return;
    throw WidthError(spec_.name, op);
  }

  /// What an occurrence count adds to a frequency.
  [[nodiscard]] uint32_t Occurrences(int32_t count) const {
    return spec_.count_batches ? 1 : static_cast<uint32_t>(count);
  }

  /// What `make` plans, or what has been planned; nothing if this call ends here.
  template <class Make>
  std::optional<Planned> Plan(Call call, Make make) {
    if (call.phase != Phase::kCommit) ForgetPlan();
    if (call.phase == Phase::kWhole) return make();
    if (call.phase != Phase::kCommit) {
      Planned& planned = planned_.emplace(make());
      planned.call_op = call.op, planned.n = call.n, planned.ready = call.phase == Phase::kPlan;
      return std::nullopt;
    }
    if (!planned_ || !planned_->IsOf(call) || !planned_->ready) throw NotPlanned();
    std::optional<Planned> planned = std::move(planned_);
    planned_.reset();
    return planned;
  }
  /// The same for a change with rows to come, for which there must be space.
  template <class MakePlan>
  std::optional<Planned> PlanRows(const ParallelFor& parallel, Call call, std::string_view op,
                                  InitialRows initial, bool blank, MakePlan make);
  /// Does all that can fail of a write whose victims are known.
  void PrepareWrite(const ParallelFor& parallel, Planned& write, InitialRows initial);
  /// An eviction by hand.
  [[nodiscard]] Planned Evicting(const ParallelFor& parallel, const Call& call, const Policy& policy,
                                 int64_t step, bool dry_run);
  /// A row for every key.
  [[nodiscard]] Planned Entering(const ParallelFor& parallel, Call call, KeySpan keys) const {
    return {.version = call.version, .change = in_.Enter(parallel, keys)};
  }
  [[nodiscard]] Totals Alone(const Change& change) const { return {in_.store.size(), change.entering()}; }
  [[nodiscard]] Error NotPlanned() const { return NotPlannedError(spec_.name); }
  [[nodiscard]] Planned PlanAdd(const ParallelFor& parallel, Call call, KeySpan keys, const float* deltas);
  [[nodiscard]] Planned PlanAccum(const ParallelFor& parallel, Call call, KeySpan keys, const bool* exists);

  [[nodiscard]] std::unique_ptr<KeyGroups> Grouped(const ParallelFor& parallel, const StepSpan& step,
                                                   const LastBatch::Batch* known) const;
  [[nodiscard]] Located LocateGroups(const ParallelFor& parallel, const LastBatch::Batch* known,
                                     const KeyGroups& groups, KeySpan keys) const;
  [[nodiscard]] ApplyPlan PlanApply(Located found, KeySpan keys, const StepGradients& gradients, int64_t step,
                                    const SlotLayout& layout);
  [[nodiscard]] bool LacksShared(const ApplyPlan& plan) const;
  void EnterShared(ApplyPlan& plan) const;
  void MakeSpace(const ParallelFor& parallel, ApplyPlan& plan) const;
  void PrepareApply(const ParallelFor& parallel, KeySpan keys, const int32_t* counts, ApplyPlan& plan,
                    InitialRows initial);
  void ListUpdates(const ParallelFor& parallel, ApplyPlan& plan, KeySpan keys, const int32_t* counts) const;
  [[nodiscard]] uint32_t SharedRowOf(const ApplyPlan& plan) const;
  void AddUnadmitted(ApplyPlan& plan, const std::vector<ShardSummary>& summaries, size_t shard) const;
  std::optional<Tally> AskOrPrepare(const ParallelFor& parallel, bool known);
  void ForgetPlan() noexcept;
  [[nodiscard]] std::vector<uint64_t> WithShared(const ApplyPlan& plan) const;
  uint32_t CommitApply(ApplyPlan& plan, KeySpan keys, const int32_t* counts);
  void Touch(const ApplyPlan& plan, KeySpan keys) noexcept;
  void Stage(const ApplyPlan& plan, KeySpan keys, const int32_t* counts);
  uint32_t HandOut(Begun out, KeySpan keys, const int32_t* counts);
  uint32_t EndStep(const ParallelFor& parallel);
  void PlanProgram(const ParallelFor& parallel, const ApplyOperands& o);
  uint32_t EndProgram(const ParallelFor& parallel, const float* rows);
  uint32_t RunProgram(const ParallelFor& parallel, StepGradients of, size_t n);

  [[nodiscard]] size_t CheckMerged(KeySpan keys, const int32_t* counts) const;
  /// The targets of a chunk: of its operand, or of the shard's own step if that is empty.
  struct Chunk {
    bool own;
    const Target* targets;
    size_t n;
  };
  [[nodiscard]] Chunk ChunkOf(uint32_t token, const ChunkSpan& chunk) const;
  void CheckChunk(uint32_t token, const Target* targets, size_t n, size_t num_slots) const;
  void CopyOut(const ParallelFor& parallel, const Target* targets, size_t n, std::byte* values, bool* fresh,
               const std::vector<std::byte*>& slots) const;
  uint32_t TakeBack(const ParallelFor& parallel, const Target* targets, size_t n, const std::byte* values,
                    const std::vector<const std::byte*>& slots, bool last, bool holds);

  [[nodiscard]] static bool Valid(const bool* mask, size_t i) { return mask == nullptr || mask[i]; }

  /// The distinct keys without a row, in order of first occurrence, where mask (n,) is true; without a
  /// version, all of them.
  [[nodiscard]] KeyNumbering MissingKeys(const ParallelFor& parallel, ReadVersion version, KeySpan keys,
                                         const bool* mask) const;

  /// The row that unadmitted keys share; without one it is the initial row of its key, which comes after
  /// those of the keys of the call.
  [[nodiscard]] std::vector<std::byte> SharedRow(const ParallelFor& parallel, ReadVersion version,
                                                 KeySpan keys, const bool* mask, InitialRows initial) const;

  /// Writes values (n, dim) of the row type; rows that are kNoRow are passed over. Of equal rows the last one
  /// wins: every row has one owner, and whoever works for it takes its rows in the order of the batch.
  void WriteValues(const ParallelFor& parallel, const RowIds& rows, const std::byte* values) noexcept;
  template <class Delta>
  void AddTo(uint32_t row, Delta delta) {
    std::byte* value = in_.store.Value(row);
    for (int64_t d = 0; d < spec_.dim; ++d) {
      StoreElement(spec_.type, value, d, LoadElement(spec_.type, value, d) + delta(static_cast<size_t>(d)));
    }
    in_.store.SetVersion(row, in_.last_step);
  }

  TableSpec spec_;
  Contents in_;
  VersionGate gate_;
  mutable std::timed_mutex away_turn_;
  std::optional<Planned> planned_;
  Step step_;
  Recent recent_;
  mutable LastBatch last_batch_;
  std::optional<SpaceMaker> space_;  // for one of the two, while the shards choose which rows are evicted
};

}  // namespace kvjax

#include "kvjax/ffi/cpu/apply.h"
#include "kvjax/ffi/cpu/chunks.h"
#include "kvjax/ffi/cpu/delta.h"
#include "kvjax/ffi/cpu/reads.h"
#include "kvjax/ffi/cpu/sharded.h"
#include "kvjax/ffi/cpu/whole.h"
#include "kvjax/ffi/cpu/writes.h"
