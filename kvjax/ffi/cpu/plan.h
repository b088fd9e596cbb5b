// Planned writes: what is kept between the call that plans a write and the one that commits it.
//
// On a table of one part both are one call. The shards of a sharded table first all plan, then agree, and
// only then do it: a shard that cannot do its part keeps the others from doing theirs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/operation.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/route.h"
#include "kvjax/ffi/core/shard_summary.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/cpu/changed_rows.h"
#include "kvjax/ffi/cpu/contents.h"
#include "kvjax/ffi/cpu/receive_buffer.h"
#include "kvjax/ffi/cpu/row_pass.h"

namespace kvjax {

/// A call of a write: what it does, and to how many keys, says which plan its commit is about.
struct Call {
  // NOLINTNEXTLINE: a version will do
  Call(uint32_t of, Phase how_far = Phase::kWhole, std::string_view what = "", size_t keys = 0)
      : version(of), phase(how_far), op(what), n(keys) {}
  uint32_t version;
  Phase phase;
  std::string_view op;  // static
  size_t n;
};

/// Of the batch of a write the keys that a shard owns, and what belongs to them; where they are not all,
/// these are copies.
struct OwnBatch {
  OwnBatch(KeySpan all, const bool* mask) : keys(all, mask) {}
  Selected keys;
  std::vector<std::byte> rows = {};
  std::vector<float> old_rows = {}, new_rows = {};
  std::vector<uint8_t> exists = {};
};

/// Another write that has been planned, with all memory that its commit will want, and what it takes to
/// prepare it if it has only been proposed.
struct Planned {
  uint32_t version;
  Change change;
  std::unique_ptr<OwnBatch> batch = nullptr;
  std::vector<float> sums = {};    // (n, dim) of an addition, by distinct key
  std::vector<bool> present = {};  // of accum, which fresh keys have got a row
  std::string_view op = "";        // static
  std::vector<std::byte> initial = {};
  bool blank = true;
  std::optional<Policy> policy = std::nullopt;  // of an eviction by hand, which has no rows to come
  int64_t step = 0;
  bool dry_run = false;           // whose victims are only counted
  bool ready = false;             // to be committed
  std::string_view call_op = "";  // of the call that has planned it, as is n
  size_t n = 0;

  [[nodiscard]] bool IsOf(const Call& call) const {
    return version == call.version && call_op == call.op && n == call.n;
  }
};

/// A training write that has been planned.
struct ApplyPlan {
  SlotLayout layout;
  int64_t step = 0;
  bool attach = false;                                         // the slots
  std::optional<RowStore::NewSlots> new_slots = std::nullopt;  // once it is prepared: these
  Change change = {};
  Admission::Decision decision = {};
  bool shares = false;                       // whether gradients of unadmitted keys go to the shared row
  std::vector<size_t> unadmitted = {};       // those gradients, and that of the shared key itself
  std::vector<double> shared_gradient = {};  // (dim,) their sum
  uint64_t occurrences = 0;                  // of the unadmitted keys
  Recent recent = {};                        // what will have changed
  UnfilledResult<RowUpdate> updates = {};    // once it is committed: the rows
  std::vector<float> shared_sum = {};        // (dim,) and the gradient of the shared one
  uint64_t shared_count = 0;                 // and occurrences of the keys that share it
  bool ready = false;                        // to be committed
};

/// What is to be written to the rows of a step once it ends: as many of them as it has been made for, each
/// with its value and then its record of slots.
struct StagedRows {
  void Reserve(size_t n, size_t bytes) {
    rows.clear();
    rows.reserve(n);
    records.Resize(n * bytes);
    most = n;
  }
  size_t most = 0;
  std::vector<uint32_t> rows;
  ReusedMemory<std::byte> records;
};

/// The training write that a table is in the middle of.
struct Step {
  /// By which calls it comes: Apply and EndApply, BeginApply and Scatter, or Receive and those after it. A
  /// call of another way finds other members than it needs.
  enum class Way : uint8_t { kNone, kProgram, kChunks, kShard };
  Way way = Way::kNone;
  uint32_t version = 0;  // that it is made from
  ReceiveBuffer received;
  std::optional<ApplyPlan> plan;
  std::unique_ptr<RowPass> pass;
  std::unique_ptr<KeyGroups> groups;  // of its batch, where that was not received,
  size_t num_rows = 0;                // and how many gradients that has
  // For any other update, which runs in chunks outside of the table:
  bool open = false;
  uint32_t token = 0;                  // by which its calls know it
  std::vector<uint64_t> keys;          // the distinct ones
  std::vector<int32_t> counts;         // and their occurrences
  std::vector<ApplyTarget> targets;    // of a shard
  std::vector<float> shared_gradient;  // (dim,) of a shard
  bool wants_facts = false;            // of a shard
  std::vector<RowFacts> facts;         // of a shard
  StagedRows staged;
};

}  // namespace kvjax
