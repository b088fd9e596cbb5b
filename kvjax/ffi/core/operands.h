// The operands of each operation: decoded and checked once by the handlers, and given whole to every backend.
//
// Pointers point where the buffers of the backend live, so only the backend may read them; the version of the
// handle too. int64 numbers are aligned as pairs of uint32: whoever reads one on the host copies it (Load64).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/bag.h"
#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/operation.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

/// Reads a number of 64 bits that is aligned like one of 32.
template <class T>
T Load64(const T* words) {
  T value;
  std::memcpy(&value, words, sizeof(value));
  return value;
}

// ---- reads: no version is that of a following handle, which reads what the last write has finished

struct LookupOperands {
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  const bool* mask = nullptr;         // (n,), or nullptr for one that is true
  InitialRows initial = {};           // (m, dim) rows of the distinct keys without one
  Missing missing = Missing::kTable;  // what a key without a row reads as
  bool own_rows = false;              // `found` says of a key whether it reads as a row of its own
  std::byte* rows = nullptr;          // out (n, dim) of the table's dtype
  bool* found = nullptr;              // out (n,)
  float* used = nullptr;              // out (num_used,), always 1
  size_t num_used = 0;
};

struct FindMissingOperands {
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  const bool* mask = nullptr;         // (n,) or nullptr
  uint64_t* missing = nullptr;        // out (n + 1,), of which the first `count` are valid, the others 0
  int32_t* count = nullptr;           // out ()
};

struct InspectOperands {
  Op op = Op::kContains;
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  bool* found = nullptr;              // out (n,)
  int64_t* frequency = nullptr;       // out (n,), 0 without a row
  int64_t* row_version = nullptr;     // out (n,), -1 without a row
  bool* pinned = nullptr;             // out (n,)
};

struct ReadSlotOperands {
  const uint32_t* version = nullptr;  // ()
  std::string_view slot = {};         // its name; empty: whether the row has slots
  size_t bytes = 0;                   // of a row of it
  KeySpan keys = {};                  // (n,)
  std::byte* out = nullptr;           // out (n, bytes)
};

struct ChangedOperands {
  const uint32_t* version = nullptr;  // ()
  const uint32_t* since = nullptr;    // (), an earlier version
  KeySpan keys = {};                  // (n,)
  bool* changed = nullptr;            // out (n,)
};

// ---- writes: `next` gets the version of the next handle ---------------------------------------------------

/// op: lookup_or_insert, pin, unpin or remove.
struct WriteKeysOperands {
  Op op = Op::kLookupOrInsert;
  Phase phase = Phase::kWhole;
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  const bool* mask = nullptr;         // (n,) or nullptr
  InitialRows initial = {};           // (m, dim)
  uint32_t* next = nullptr;           // out ()
};

/// op: upsert, assign or add.
struct WriteRowsOperands {
  Op op = Op::kUpsert;
  Phase phase = Phase::kWhole;
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  const bool* mask = nullptr;         // (n,) or nullptr
  const std::byte* rows = nullptr;    // (n, dim) of the table's dtype, of add float32
  InitialRows initial = {};           // (m, dim)
  uint32_t* next = nullptr;           // out ()
};

struct AccumOperands {
  Phase phase = Phase::kWhole;
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  const bool* mask = nullptr;         // (n,) or nullptr
  const float* old_rows = nullptr;    // (n, dim)
  const float* new_rows = nullptr;    // (n, dim)
  const bool* exists = nullptr;       // (n,)
  uint32_t* next = nullptr;           // out ()
};

/// op: evict or restrict. A dry run removes nothing, and the next version is the one that there is.
struct EvictOperands {
  Op op = Op::kEvict;
  Phase phase = Phase::kWhole;
  const uint32_t* version = nullptr;  // ()
  Policy policy = {};
  const int64_t* step = nullptr;  // (), below 0 for the table's last
  bool dry_run = false;
  uint32_t* next = nullptr;    // out ()
  uint32_t* counts = nullptr;  // of a dry run, once it is more than planned: out (parts,)
  size_t parts = 0;            // of the policy
};

/// op: clear or clear_slots.
struct ClearOperands {
  Op op = Op::kClear;
  Phase phase = Phase::kWhole;
  const uint32_t* version = nullptr;  // ()
  uint32_t* next = nullptr;           // out ()
};

// ---- training --------------------------------------------------------------------------------------------

/// Gradients by key, as they come: some keys more than once.
struct GradientSpan {
  const int32_t* counts = nullptr;     // (n,) occurrences; 0 marks padding
  const float* rows = nullptr;         // (n, dim)
  const uint32_t* canaries = nullptr;  // (num_canaries,), each kCanary
  size_t num_canaries = 0;
};

struct MergeOperands {
  KeySpan keys = {};            // (n,)
  GradientSpan gradients = {};  // (n, dim)
  size_t dim = 0;
  uint64_t* out_keys = nullptr;   // out (n,) distinct keys in order of first occurrence, then padding
  float* out_rows = nullptr;      // out (n, dim)
  int32_t* out_counts = nullptr;  // out (n,)
};

/// A step as a call brings it.
struct StepSpan {
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (n,)
  GradientSpan gradients = {};        // (n, dim)
  const int64_t* step = nullptr;      // (), below 0 for the one after the last
  SlotLayout layout = {};             // that the optimizer wants
  InitialRows initial = {};           // (m, dim)
};

/// A training write whose update is a row program.
struct ApplyOperands {
  StepSpan step = {};
  Program program = {};
  const uint64_t* shared = nullptr;  // (program.shared,) its shared registers
  bool holds = false;                // whether another call ends it
  bool planned = false;              // whether another call has planned it: see PlanApplyOperands
  uint32_t* next = nullptr;          // out (), or the word by which that call knows it
};

/// What a step would be refused for; changes and holds nothing. The call that does it, as `planned`, does
/// nothing for another version than the live one, which is no failure then.
struct PlanApplyOperands {
  StepSpan step = {};          // of whose gradients no row is read
  bool reports = false;        // whether the call waits for the device, and throws what that says
  uint32_t* status = nullptr;  // out (), 0 if it can be done
};

/// The end of a step that holds for it.
struct EndApplyOperands {
  const uint32_t* token = nullptr;  // ()
  const float* rows = nullptr;      // (n, dim) the gradients, if a program updates the rows
  size_t num_rows = 0;
  uint32_t* next = nullptr;  // out ()
};

struct BeginApplyOperands {
  StepSpan step = {};                // of distinct keys, then padding
  uint32_t* next = nullptr;          // out ()
  uint32_t* targets = nullptr;       // out (n, 2), see ApplyTarget
  int32_t* active = nullptr;         // out (), how many of the targets are valid
  int64_t* used_step = nullptr;      // out ()
  float* shared_gradient = nullptr;  // out (dim,), the gradient of the shared row
  RowFacts* facts = nullptr;         // out (n,), or nullptr if nobody wants them
};

/// The rows of a step of distinct keys as its update is to see them, each where its gradient stands; zeros
/// elsewhere. Changes nothing.
struct ReadStepOperands {
  StepSpan step = {};
  size_t size = 0;                     // of the results, n or more
  int64_t* used_step = nullptr;        // out ()
  std::byte* values = nullptr;         // out (size, dim) of the table's dtype
  float* grads = nullptr;              // out (size, dim), or nullptr if nobody wants them
  bool* fresh = nullptr;               // out (size,), whether no optimizer has written the row's slots
  uint64_t* row_keys = nullptr;        // out (size,)
  RowFacts* row_facts = nullptr;       // out (size,), or nullptr if nobody wants them
  std::vector<std::byte*> slots = {};  // out (size, bytes of the slot) each
};

/// The whole of that step, with what the update has made of its rows.
struct WriteStepOperands {
  StepSpan step = {};                        // of whose gradients no row is read
  bool planned = false;                      // as in ApplyOperands
  const std::byte* values = nullptr;         // (n or more, dim) of the table's dtype
  std::vector<const std::byte*> slots = {};  // (n or more, bytes of the slot) each
  uint32_t* next = nullptr;                  // out ()
};

/// Rows [start, start + chunk) of a step, cut at `active`; without targets (num_rows is 0) those of a
/// shard's.
struct ChunkSpan {
  const uint32_t* targets = nullptr;  // (num_rows, 2)
  size_t num_rows = 0;
  const int32_t* start = nullptr;   // ()
  const int32_t* active = nullptr;  // ()
  size_t size = 0;                  // rows of the chunk
  SlotLayout layout = {};           // of their slots
};

struct GatherOperands {
  const uint32_t* version = nullptr;  // ()
  ChunkSpan chunk = {};
  const uint64_t* keys = nullptr;          // (num_rows,), of the step
  const float* rows = nullptr;             // (num_rows, dim), its gradients
  const float* shared_gradient = nullptr;  // (dim,), that of the shared row
  const RowFacts* facts = nullptr;         // (num_rows,), of the step
  std::byte* values = nullptr;             // out (chunk, dim) of the table's dtype
  float* grads = nullptr;                  // out (chunk, dim), or nullptr if nobody wants them
  bool* fresh = nullptr;                   // out (chunk,), whether no optimizer has written the row's slots
  uint64_t* row_keys = nullptr;            // out (chunk,)
  RowFacts* row_facts = nullptr;           // out (chunk,), or nullptr if nobody wants them
  std::vector<std::byte*> slots = {};      // out (chunk, bytes of the slot) each
};

struct ScatterOperands {
  const uint32_t* version = nullptr;  // ()
  ChunkSpan chunk = {};
  const std::byte* values = nullptr;         // (chunk, dim) of the table's dtype
  std::vector<const std::byte*> slots = {};  // (chunk, bytes of the slot) each
  bool holds = false;                        // whether another call ends the step
  uint32_t* out = nullptr;                   // out (), the version
};

struct CanaryOperands {
  std::string_view table = {};
  const float* used = nullptr;  // (lookups,), how often the loss has used each
  size_t lookups = 0;
  uint32_t* canary = nullptr;  // out (), kCanary
};

// ---- sharded tables --------------------------------------------------------------------------------------

struct OwnerSpan {
  const int32_t* given = nullptr;  // (n,) by a partitioner, or nullptr for those of virtual buckets
  uint32_t shards = 1;
};

struct OwnedOperands {
  std::string_view table = {};
  KeySpan keys = {};  // (n,)
  OwnerSpan owners = {};
  uint32_t shard = 0;     // this one
  bool* owned = nullptr;  // out (n,)
};

struct RouteOperands {
  std::string_view table = {};
  KeySpan keys = {};           // (n,)
  const bool* mask = nullptr;  // (n,) or nullptr
  OwnerSpan owners = {};
  int32_t capacity = 0;  // keys to each owner that a round takes
  Routed out = {};
};

/// Gradients that have arrived in one of several rounds.
struct ReceiveOperands {
  const uint32_t* version = nullptr;  // ()
  KeySpan keys = {};                  // (senders, n)
  GradientSpan gradients = {};        // (senders, n, dim)
  size_t senders = 0;
  const int32_t* round = nullptr;   // ()
  const int32_t* rounds = nullptr;  // ()
  InitialRows initial = {};         // (m, dim)
};

struct PlanStepOperands {
  const uint32_t* version = nullptr;  // ()
  const int64_t* step = nullptr;      // ()
  SlotLayout layout = {};
  std::optional<Program> program = {};  // of the update, if it is one
  const uint64_t* shared = nullptr;     // (program.shared,) its shared registers
  bool facts = false;                   // whether another update wants facts about rows
  uint64_t* summary = nullptr;          // out (words,), see ShardSummary
  size_t words = 0;
};

struct SummaryOperands {
  const uint32_t* version = nullptr;  // ()
  uint64_t* summary = nullptr;        // out (words,)
  size_t words = 0;
};

/// What the shards have to add up before the write is prepared.
struct TallyResult {
  uint32_t* tally = nullptr;  // out (Tally::kWords,)
  uint32_t* more = nullptr;   // out (), 1 if they have to
};

struct PrepareOperands {
  Op op = Op::kApply;
  const uint32_t* version = nullptr;    // ()
  const uint64_t* summaries = nullptr;  // (shards, words / shards)
  size_t words = 0;
  size_t shards = 1;
  const int32_t* shard = nullptr;  // (), this one
  TallyResult out = {};
};

struct ContinueOperands {
  Op op = Op::kApply;
  const uint32_t* version = nullptr;  // ()
  const uint32_t* sum = nullptr;      // (Tally::kWords,) of the tallies of all shards
  TallyResult out = {};
};

struct CommitStepOperands {
  const uint32_t* version = nullptr;  // ()
  uint32_t* next = nullptr;           // out ()
  int32_t* active = nullptr;          // out (), the rows of the step
  int64_t* used_step = nullptr;       // out ()
};

// ---- bags ------------------------------------------------------------------------------------------------

struct BagSumOperands {
  BagShape shape = {};
  const float* weights = nullptr;  // (n,)
  const float* rows = nullptr;     // (n, dim)
  float* bags = nullptr;           // out (bags, dim)
};

struct BagExpandOperands {
  BagShape shape = {};
  const float* weights = nullptr;  // (n,)
  const float* bags = nullptr;     // (bags, dim)
  float* rows = nullptr;           // out (n, dim)
};

struct BagDotOperands {
  BagShape shape = {};
  const float* rows = nullptr;  // (n, dim)
  const float* bags = nullptr;  // (bags, dim)
  float* weights = nullptr;     // out (n,)
};

struct BagMaxOperands {
  BagShape shape = {};
  const float* rows = nullptr;   // (n, dim)
  float* bags = nullptr;         // out (bags, dim)
  int32_t* positions = nullptr;  // out (bags, dim), the row that each maximum comes from
};

struct BagPlaceOperands {
  BagShape shape = {};
  const int32_t* positions = nullptr;  // (bags, dim)
  const float* bags = nullptr;         // (bags, dim)
  float* rows = nullptr;               // out (n, dim)
};

struct BagIdsOperands {
  std::string_view table = {};
  const int32_t* lengths = nullptr;  // (bags,)
  size_t bags = 0;
  int32_t* ids = nullptr;  // out (n,), -1 for padding
  size_t n = 0;
};

}  // namespace kvjax
