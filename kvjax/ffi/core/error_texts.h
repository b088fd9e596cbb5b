// The errors of the C++ side and their texts, the same for every table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvjax/ffi/core/error.h"

namespace kvjax {

/// A step of a sharded table whose program has ended: its shards may be at different steps.
inline Error HalfwayError(std::string_view table) {
  return MakeError(ErrorCode::kFailedPrecondition, table, "refresh", "a training step that goes on",
                   "one that has stopped half-way", "kvjax.drop_table(name) and restore the last checkpoint");
}

/// A handle of another version than the live one.
inline Error VersionError(std::string_view table, std::string_view op, uint32_t version, uint32_t live) {
  if (static_cast<int32_t>(version - live) > 0) {
    return MakeError(
        ErrorCode::kFailedPrecondition, table, op,
        "a handle made in this process (live: version " + std::to_string(live) + ")",
        "one that no write here has made (version " + std::to_string(version) + ")",
        "rows are not part of a handle: save them with kvjax.orbax.split and TableSave, restore them "
        "with TableRestore; and do no arithmetic on a tree that holds tables");
  }
  return MakeError(ErrorCode::kFailedPrecondition, table, op,
                   "the live handle (version " + std::to_string(live) + ")",
                   "a stale one (version " + std::to_string(version) + ")",
                   "use the Table that the last write returned, as an argument of the jitted function, or "
                   "table.refresh(); a read that must come before a write is ordered by table.after(x)");
}

/// Keys that JAX may have cut, for a table that has longer ones.
inline Error WidthError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "64-bit keys, as this table holds them",
                   "32-bit keys made while jax_enable_x64 is off, where JAX cuts 64-bit integers to 32",
                   "pass kvjax.keys(numpy_ids), which is exact; for ids that really have 32 bits, "
                   "kvjax.keys(array) says so");
}

/// Gradients whose seal is broken.
inline Error SealError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "gradients as kvjax.value_and_grad made them",
                   "gradients whose keys went through arithmetic",
                   "transforms over dense and sparse gradients together go into kvjax.optax.joint(tx); "
                   "microbatch gradients are concatenated (stacked by lax.scan), not added");
}

/// A call for which there is no memory.
inline Error MemoryError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kResourceExhausted, table, op, "memory for the call", "none",
                   "the table is as it was before: remove rows or give the process more memory");
}

/// An operation that the handler it came to does not know.
inline Error UnknownOpError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "an operation of kvjax", op,
                   "call kvjax's Python functions");
}

/// A slot that the optimizer's state does not have; held: its layout.
inline Error SlotError(std::string_view table, std::string_view slot, size_t bytes, std::string_view held) {
  return MakeError(ErrorCode::kFailedPrecondition, table, "slot",
                   "a slot " + std::string(slot) + " of " + std::to_string(bytes) + " bytes", held,
                   "the optimizer has changed: call slot outside of what was compiled");
}

/// An optimizer with other slots than those that the table holds.
inline Error OptimizerError(std::string_view table, const std::string& held, const std::string& wanted) {
  return MakeError(ErrorCode::kFailedPrecondition, table, "apply",
                   "the optimizer whose slots the table holds (" + held + ")", "one with " + wanted,
                   "table.clear_slots() forgets the old optimizer's state");
}

/// A chunk that is not inside its step.
inline Error RangeError(std::string_view table, int32_t start, int32_t active) {
  return MakeError(ErrorCode::kInvalidArgument, table, "apply", "a chunk inside the step",
                   "start " + std::to_string(start) + ", active " + std::to_string(active),
                   "this is a defect of kvjax: please report it");
}

/// A key twice, or padding in between, where an update would be lost.
inline Error MergedError(std::string_view table) {
  return MakeError(ErrorCode::kInvalidArgument, table, "apply", "distinct keys, then padding",
                   "a merged gradient that was changed or joined to another",
                   "give the gradients to kvjax.merge together");
}

/// A shard that is to do what it has not said it can.
inline Error NotPlannedError(std::string_view table) {
  return MakeError(ErrorCode::kFailedPrecondition, table, "write", "a write that has been planned", "none",
                   "another write came between: use each handle for one write");
}

/// Rows to be loaded of which two have one key.
inline Error TwiceError(std::string_view table, int64_t key) {
  return MakeError(ErrorCode::kInvalidArgument, table, "load", "distinct keys",
                   "key " + std::to_string(key) + " twice", "remove the duplicates first");
}

/// More rows than row ids.
inline Error RowsError(std::string_view table, std::string_view op, size_t rows) {
  return MakeError(ErrorCode::kResourceExhausted, table, op, "fewer than 2^32 - 1 rows", std::to_string(rows),
                   "shard the table over several devices");
}

/// A table that is full and evicts nothing, or of whose `rows`, as many as there would be, too few may be
/// evicted.
inline Error FullError(std::string_view table, std::string_view op, size_t capacity, uint64_t rows,
                       std::optional<uint64_t> evictable = {}) {
  const std::string want = "at most max_capacity=" + std::to_string(capacity) + " rows";
  if (!evictable) {
    return MakeError(ErrorCode::kResourceExhausted, table, op, want, std::to_string(rows),
                     "evict or remove some first, or make the table with on_full='evict' or more capacity");
  }
  return MakeError(ErrorCode::kResourceExhausted, table, op, want,
                   std::to_string(rows) + " of which " + std::to_string(*evictable) + " may go",
                   "pinned rows and those of the batch stay: give the table more capacity");
}

/// Fewer rows with the call than new keys.
inline Error InitialError(std::string_view table, std::string_view op, size_t rows) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "initial rows for all new keys",
                   std::to_string(rows), "this is a defect of kvjax: please report it");
}

/// Rows or slots that the step has not made.
inline Error ChunkError(std::string_view table) {
  return MakeError(ErrorCode::kInvalidArgument, table, "apply", "rows and slots made by BeginApply", "others",
                   "this is a defect of kvjax: please report it");
}

/// A loss that has used the i-th of its lookups, from 0 on, otherwise than once or never.
inline Error UsesError(std::string_view table, size_t i, size_t lookups, float used) {
  return MakeError(ErrorCode::kInvalidArgument, table, "value_and_grad",
                   "a loss that uses each lookup at most once",
                   "lookup " + std::to_string(i + 1) + " of " + std::to_string(lookups) + " used " +
                       std::to_string(static_cast<int64_t>(used)) + " times",
                   "a lookup inside a scan, vmap or twice-called jit of the loss: look the rows up before it "
                   "and pass them in");
}

/// A bag of fewer than no keys.
inline Error LengthError(std::string_view table, int32_t length, size_t bag) {
  return MakeError(ErrorCode::kInvalidArgument, table, "lookup_bag", "lengths of at least 0",
                   std::to_string(length) + " for bag " + std::to_string(bag),
                   "lengths say how many of the keys belong to each bag, in order");
}

/// Bags that have more than the n keys together, the first of them that this is true of.
inline Error LengthsError(std::string_view table, size_t bag, size_t n) {
  return MakeError(ErrorCode::kInvalidArgument, table, "lookup_bag",
                   "lengths that add up to at most " + std::to_string(n) + ", the number of keys",
                   "more, from bag " + std::to_string(bag) + " on",
                   "lengths say how many of the keys belong to each bag, in order");
}

}  // namespace kvjax
