// The operations of a table and the phases of a write: their names, and what each operation needs.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "kvjax/ffi/core/error_texts.h"

namespace kvjax {

enum class Op : uint32_t {
  kLookup,
  kContains,
  kFrequency,
  kVersionOf,
  kPinned,
  kSlot,
  kPrefetch,
  kAfter,
  kRoute,
  kMerge,
  kLookupBag,
  kValueAndGrad,
  kLookupOrInsert,
  kPin,
  kUnpin,
  kRemove,
  kUpsert,
  kAssign,
  kAdd,
  kAccum,
  kEvict,
  kRestrict,
  kClear,
  kClearSlots,
  kApply,
};

/// What an operation is: Python reads the same table as OPERATIONS.
struct Operation {
  Op op;
  std::string_view name;
  bool writes = false;         // makes the next version
  bool makes_rows = false;     // may give a row to a key that has none
  bool needs_initial = false;  // such a row begins as the initial row of its key
  bool evicts = false;         // removes the rows that a policy chooses
};

inline constexpr std::array<Operation, 25> kOperations = {{
    {Op::kLookup, "lookup"},
    {Op::kContains, "contains"},
    {Op::kFrequency, "frequency"},
    {Op::kVersionOf, "version_of"},
    {Op::kPinned, "pinned"},
    {Op::kSlot, "slot"},
    {Op::kPrefetch, "prefetch"},
    {Op::kAfter, "after"},
    {Op::kRoute, "route"},
    {Op::kMerge, "merge"},
    {Op::kLookupBag, "lookup_bag"},
    {Op::kValueAndGrad, "value_and_grad"},
    {.op = Op::kLookupOrInsert,
     .name = "lookup_or_insert",
     .writes = true,
     .makes_rows = true,
     .needs_initial = true},
    {.op = Op::kPin, .name = "pin", .writes = true, .makes_rows = true, .needs_initial = true},
    {.op = Op::kUnpin, .name = "unpin", .writes = true},
    {.op = Op::kRemove, .name = "remove", .writes = true},
    {.op = Op::kUpsert, .name = "upsert", .writes = true, .makes_rows = true},
    {.op = Op::kAssign, .name = "assign", .writes = true},
    {.op = Op::kAdd, .name = "add", .writes = true, .makes_rows = true, .needs_initial = true},
    {.op = Op::kAccum, .name = "accum", .writes = true, .makes_rows = true},
    {.op = Op::kEvict, .name = "evict", .writes = true, .evicts = true},
    {.op = Op::kRestrict, .name = "restrict", .writes = true, .evicts = true},
    {.op = Op::kClear, .name = "clear", .writes = true},
    {.op = Op::kClearSlots, .name = "clear_slots", .writes = true},
    {.op = Op::kApply, .name = "apply", .writes = true, .makes_rows = true, .needs_initial = true},
}};

constexpr const Operation& About(Op op) { return kOperations[static_cast<size_t>(op)]; }
constexpr std::string_view Name(Op op) { return About(op).name; }

/// Of a number that has travelled through device memory.
constexpr std::string_view NameOfOp(uint32_t number) {
  return number < kOperations.size() ? kOperations[number].name : "call";
}

static_assert([] {
  for (size_t i = 0; i < kOperations.size(); ++i) {
    if (static_cast<size_t>(kOperations[i].op) != i) return false;
  }
  return true;
}());

inline Op ParseOp(std::string_view table, std::string_view text) {
  for (const Operation& operation : kOperations) {
    if (operation.name == text) return operation.op;
  }
  throw UnknownOpError(table, text);
}

/// How far a call takes a write. On a table that is not sharded it takes it all the way; shards plan or
/// propose it, agree, and then commit it.
enum class Phase {
  kWhole,
  kPlan,
  kPropose,  // what space it takes is agreed with the other shards (cpu/sharded.h) before it counts as
             // planned
  kCommit,
};
inline constexpr std::array<std::string_view, 4> kPhases = {"whole", "plan", "propose", "commit"};

/// Whether the call only says what it would do.
constexpr bool Plans(Phase phase) { return phase == Phase::kPlan || phase == Phase::kPropose; }

inline Phase ParsePhase(std::string_view table, std::string_view op, std::string_view text) {
  for (size_t i = 0; i < kPhases.size(); ++i) {
    if (kPhases[i] == text) return static_cast<Phase>(i);
  }
  throw PhaseError(table, op, text);
}

}  // namespace kvjax
