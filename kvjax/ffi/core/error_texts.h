// The errors of the C++ side and their texts, the same for every table.
#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "kvjax/ffi/core/error.h"

namespace kvjax {

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
  return MakeError(
      ErrorCode::kFailedPrecondition, table, op, "the live handle (version " + std::to_string(live) + ")",
      "a stale one (version " + std::to_string(version) + ")",
      "use the Table that the last write returned, as an argument of the jitted function, or "
      "table.refresh(), which has the rows of now (older ones, as a deepcopy would have, are those of "
      "a checkpoint or of Table.copy); a read that must come before a write is ordered by table.after(x). "
      "Where the table was made anew since, by another init or after drop_table, its rows are others: init "
      "again, outside of jit (of a model with nn.jit after kvjax.drop_table), and give a second model on "
      "this "
      "table reuse=True");
}

/// Keys that JAX may have cut, for a table that has longer ones.
inline Error WidthError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "64-bit keys, as this table holds them",
                   "32-bit keys made while jax_enable_x64 is off, where JAX cuts 64-bit integers to 32",
                   "pass kvjax.keys(numpy_ids), which is exact; for ids that really have 32 bits, "
                   "kvjax.keys(ids, key_dtype='int32') says so");
}

/// Gradients whose canary is broken.
inline Error CanaryError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "gradients as kvjax.value_and_grad made them",
                   "gradients whose keys went through arithmetic",
                   "transforms over dense and sparse gradients together go into kvjax.optax.joint(tx); "
                   "microbatch gradients are concatenated (stacked by lax.scan), not added; "
                   "kvjax.optax.apply_if_finite leaves a step out");
}

/// A call for which there is no memory.
inline Error MemoryError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kResourceExhausted, table, op, "memory for the call", "none",
                   "the table is as it was before: remove rows or give the process more memory");
}

/// The same where neither the table nor the call is known, or there is not even memory for their names.
inline constexpr const char* kNoMemory =
    "kvjax: want memory for the call, got none; tables are as they were before: give the process more memory";

inline Error SpeechlessError() { return {ErrorCode::kResourceExhausted, kNoMemory}; }

/// An exception that is neither an Error nor about memory.
inline Error UnexpectedError(std::string_view op, std::string_view text) {
  return {ErrorCode::kInternal, std::string("kvjax: ").append(op).append(": ").append(text)};
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

/// Text that says no slots, or more than any row has.
inline Error SlotsError(std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, "", "apply",
                   "slots name|dtype[shape]|bytes, of 2**30 bytes in all at most", text,
                   "call kvjax's Python functions, which prepare the operands");
}

/// An optimizer with other slots than those that the table holds.
inline Error OptimizerError(std::string_view table, const std::string& held, const std::string& wanted) {
  return MakeError(
      ErrorCode::kFailedPrecondition, table, "apply",
      "the optimizer whose slots the table holds (" + held + ")", "one with " + wanted,
      "table.switch_optimizer(tx) keeps the slots that both have; table.clear_slots() forgets them all");
}

/// A lookup of rows of now, of rows that are ahead of the state that says what now is.
inline Error AheadError(std::string_view table, std::string_view op) {
  return MakeError(
      ErrorCode::kFailedPrecondition, table, op,
      "the optimizer's state that the last write returned, and the transform of that write",
      "an older state, of which rows are ahead, or another transform (its rates, betas or decay differ)",
      "keep and restore the state together with the table; where a failed step has lost it, do one without "
      "gradients (docs/laziness.md); to begin with a new one, or with another transform, sweep by those that "
      "belong to the rows, then table.clear_slots()");
}

/// A chunk that is not inside its step.
inline Error RangeError(std::string_view table, int32_t start, int32_t active) {
  return MakeError(ErrorCode::kInvalidArgument, table, "apply", "a chunk inside the step",
                   "start " + std::to_string(start) + ", active " + std::to_string(active),
                   "this is a defect of kvjax: please report it");
}

/// A row program with something in its word number `at` that its table has not.
inline Error ProgramError(std::string_view table, size_t at) {
  return MakeError(ErrorCode::kInvalidArgument, table, "apply", "a program for rows of this table",
                   "another at word " + std::to_string(at), "this is a defect of kvjax: please report it");
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
    return MakeError(
        ErrorCode::kResourceExhausted, table, op, want, std::to_string(rows),
        "evict or remove some first, or make the table with on_full='evict' or a larger max_capacity");
  }
  return MakeError(ErrorCode::kResourceExhausted, table, op, want,
                   std::to_string(rows) + " of which " + std::to_string(*evictable) + " may go",
                   "pinned rows and those of the batch stay: make the table with a larger max_capacity");
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
  return MakeError(
      ErrorCode::kInvalidArgument, table, "value_and_grad", "a loss that uses each lookup at most once",
      "lookup " + std::to_string(i + 1) + " of " + std::to_string(lookups) + " used " +
          std::to_string(static_cast<int64_t>(used)) + " times",
      "a lookup in a scan, or in a function that is called twice, where the loss has it inside of a "
      "shard_map, a while_loop, a jit with shardings or an inner derivative, or goes by values outside "
      "of jit: look the rows up before it and pass them in");
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

// ---- operands ------------------------------------------------------------------------------------------

/// Operands, results or attributes that kvjax's Python functions do not make.
inline Error OperandError(std::string_view table, std::string_view op, std::string_view want,
                          std::string_view got) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, want, got,
                   "call kvjax's Python functions, which prepare the operands");
}

/// Rows of another dim or dtype than those of the table, as an earlier one of its name had them.
inline Error OtherRowsError(std::string_view table, std::string_view op, std::string_view want,
                            std::string_view got) {
  return MakeError(
      ErrorCode::kFailedPrecondition, table, op, want, got,
      "the table was made anew with other options since this handle was made, so take the handle "
      "that came of that, or kvjax.get_table(name)");
}

/// A phase of a write that there is not.
inline Error PhaseError(std::string_view table, std::string_view op, std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, table, op, "a phase whole, plan, propose or commit", text,
                   "call kvjax's Python functions");
}

// ---- options of tables -----------------------------------------------------------------------------------

/// An option with a value that there is not; want: those that there are.
inline Error OptionError(std::string_view want, std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, "", "get_table", want, text, "choose one of these");
}

/// A kind of initializer that there is not.
inline Error InitializerError(std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, "", "initializer", "one of kvjax.initializers", text,
                   "call its functions");
}

/// A row pool of so many elements, which are no whole rows.
inline Error PoolError(std::string_view table, size_t elements) {
  return MakeError(ErrorCode::kInvalidArgument, table, "get_table", "a pool of whole rows",
                   std::to_string(elements) + " elements", "see kvjax.initializers.from_pool");
}

/// A width that rows cannot have.
inline Error DimError(std::string_view table, int64_t most, int64_t dim) {
  return MakeError(ErrorCode::kInvalidArgument, table, "get_table", "dim in 1.." + std::to_string(most),
                   std::to_string(dim), "dim is the width of a row");
}

/// A kind of admission, or of reading unadmitted keys, that there is not.
inline Error AdmissionError(std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, "", "get_table", "an admission of kvjax.admit", text,
                   "call kvjax's Python functions");
}

/// A storage that the backend does not have.
inline Error StorageError(std::string_view table, std::string_view text) {
  return MakeError(ErrorCode::kInvalidArgument, table, "get_table", "one of kvjax.storage",
                   std::string("'").append(text).append("'"), "see kvjax.storage");
}

/// A policy that kvjax.evict does not write; got: what of it.
inline Error PolicyError(std::string_view got) {
  return MakeError(ErrorCode::kInvalidArgument, "", "evict", "a policy made by kvjax.evict", got,
                   "this is a defect of kvjax: please report it");
}

/// A policy with a formula that is nested too deep.
inline Error PolicyDepthError(size_t most) {
  return MakeError(ErrorCode::kInvalidArgument, "", "evict",
                   "a policy nested at most " + std::to_string(most) + " deep", "a deeper one",
                   "write it with fewer parentheses");
}

// ---- tables of a process ---------------------------------------------------------------------------------

/// A call in a fork of the process that made the table.
inline Error ForkedError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op, "the process that made it", "a forked one",
                   "tables stay behind in the parent: start processes that use them by multiprocessing's "
                   "'spawn', and make them there");
}

/// A new table with the name of another.
inline Error NameError(std::string_view table) {
  return MakeError(ErrorCode::kInvalidArgument, table, "create", "a free name", "one in use",
                   "kvjax.drop_table(name) first, or choose another name");
}

/// A name that no table of the backend has.
inline Error NoTableError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kNotFound, table, op, "a table of this name on this platform", "none",
                   "make it with kvjax.get_table(name, dim=...); one that is elsewhere, in the memory of the "
                   "host or of a GPU, comes here by table.to(storage)");
}

/// A device on which the table has no shard.
inline Error DeviceError(std::string_view table, std::string_view op, int32_t device) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op, "a call on a device of the table's mesh",
                   "one on device " + std::to_string(device),
                   "run the program on the mesh that the table was made with, or kvjax.reshard(table, mesh)");
}

/// A number that none of the `shards` shards of a table in this process has.
inline Error ShardError(std::string_view table, std::string_view op, size_t shards, size_t shard) {
  return MakeError(ErrorCode::kNotFound, table, op,
                   "one of the " + std::to_string(shards) + " shards of this process",
                   "shard " + std::to_string(shard) + " of another place, as before a move",
                   "use kvjax.get_table(name), or its live(), which are of the table where it is now");
}

/// A table that was written while another thread made its new shards.
inline Error WrittenError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op, "a table that nobody writes meanwhile",
                   "a write of another thread", "wait for it, and begin again with table.refresh()");
}

/// A call from inside the user's function that the table waits for.
inline Error UserCodeError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op,
                   "a call once the user's function that it waits for has returned",
                   "one from that function, which is a sink, a score function or an engine",
                   "use the rows that the function is given");
}

/// A call that has waited so long for the user's function, whoever it comes from.
inline Error SlowUserCodeError(std::string_view table, std::string_view op, int64_t milliseconds) {
  return MakeError(
      ErrorCode::kFailedPrecondition, table, op, "the end of an eviction",
      "a sink, score function or engine of it that has run for " + std::to_string(milliseconds / 1000) +
          " s and more",
      "call again once it is done, and let it hand slow work to a thread of its own; if it waits "
      "for this call itself, use the rows that it is given instead");
}

/// What the user's function `what`, a sink, a score function or an engine, has raised.
inline Error UserError(std::string_view table, std::string_view op, std::string_view what,
                       std::string_view raised) {
  return MakeError(ErrorCode::kInvalidArgument, table, op,
                   std::string("a ").append(what).append(" that works"), raised,
                   "mend it and begin again with table.refresh(): the table is as it was");
}

/// Rows to be loaded of which a column has `got` elements.
inline Error ColumnError(std::string_view table, std::string_view want, size_t got) {
  return MakeError(ErrorCode::kInvalidArgument, table, "load", want, std::to_string(got),
                   "all arrays have one row per key");
}

/// More rows to be loaded than the table may have.
inline Error LoadCapacityError(std::string_view table, size_t capacity, size_t rows) {
  return MakeError(ErrorCode::kResourceExhausted, table, "load",
                   "at most max_capacity=" + std::to_string(capacity) + " rows", std::to_string(rows),
                   "make the table with a larger max_capacity, or prune the rows first");
}

/// Rows to be loaded with a frequency or a step below 0.
inline Error NegativeError(std::string_view table) {
  return MakeError(ErrorCode::kInvalidArgument, table, "load", "frequencies and a last step from 0 on",
                   "negative ones", "load what kvjax has exported");
}

/// Rows to be loaded of which one was last written before step 0 or after the last step.
inline Error RowVersionError(std::string_view table, int64_t last_step, int64_t version) {
  return MakeError(ErrorCode::kInvalidArgument, table, "load",
                   "row versions from 0 to last_step=" + std::to_string(last_step), std::to_string(version),
                   "load what kvjax has exported, with a last_step of the greatest row version or more");
}

// ---- the system and CUDA ---------------------------------------------------------------------------------

/// A file of rows in a folder; error: the errno of the call that has failed.
inline Error FileError(std::string_view table, std::string_view op, std::string_view want,
                       std::string_view folder, int error, std::string_view mend) {
  const bool full =
      error == ENOSPC || error == EDQUOT || error == EFBIG || error == EMFILE || error == ENFILE;
  return MakeError(
      full ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument, table, op, want,
      std::string("'").append(folder).append("': ").append(std::system_category().message(error)), mend);
}

/// A folder in which no file of rows can be made.
inline Error FolderError(std::string_view table, std::string_view folder, int error) {
  return FileError(table, "storage", "a folder to make a file in", folder, error,
                   "make the folder writable, or give kvjax.storage.Mmap another one");
}

inline Error DiskError(std::string_view table, std::string_view op, const NoDisk& disk) {
  return FileError(table, op, std::to_string(disk.bytes) + " bytes more on disk", disk.folder, disk.error,
                   "the table is as it was before: free some disk space, or remove rows");
}

/// The CUDA call `what`, and what CUDA says of it.
inline Error CudaError(std::string_view what, std::string_view text) {
  return MakeError(ErrorCode::kInternal, "", what, "success from CUDA", text,
                   "a kernel that ran before may be the cause: CUDA_LAUNCH_BLOCKING=1 shows which");
}

/// More items than a kernel counts.
inline Error ItemsError(size_t n) {
  return MakeError(ErrorCode::kInvalidArgument, "", "a call on the GPU", "fewer than 2^31 items",
                   std::to_string(n), "split the call");
}

// ---- sharded tables --------------------------------------------------------------------------------------

/// A partitioner's answer that is no shard.
inline Error OwnerError(std::string_view table, uint64_t key, int32_t owner, uint32_t shards) {
  return MakeError(ErrorCode::kInvalidArgument, table, "partitioner",
                   "shards in 0.." + std::to_string(shards - 1),
                   std::to_string(owner) + " for key " + std::to_string(static_cast<int64_t>(key)),
                   "partitioner(keys, num_shards) returns the shard of each key");
}

/// A program for another mesh: the device has shard `held`, the program takes it for `wanted`.
inline Error MeshError(std::string_view table, std::string_view op, uint32_t held, uint32_t wanted) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op,
                   "a program on the mesh that the table was made with (this device has shard " +
                       std::to_string(held) + ")",
                   "one whose mesh makes it shard " + std::to_string(wanted),
                   "use that mesh, or kvjax.reshard(table, mesh)");
}

/// A read through a following handle, in a program that was made while the rows were elsewhere.
inline Error MovedError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op,
                   "the table where the program takes its rows to be", "one that was resharded since",
                   "give the program kvjax.get_table(name).live()");
}

/// Operands that differ between devices that must have the same.
inline Error DifferError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kInvalidArgument, table, op,
                   "the same call with the same keys and values on every device", "others on some devices",
                   "processes make the same calls and give equal arrays, or their parts of one by "
                   "jax.make_array_from_process_local_data; copies of a table along an axis want what is "
                   "gathered over it, or shard_map with check_vma=True, where kvjax does it");
}

/// A training step that no shard has done, for an error of one of them: JAX may raise it only where a result
/// of the step is used, so it says what is in hand then.
inline Error StepError(const Error& refused) {
  return {
      refused.code(),
      std::string(refused.what())
          .append("; no shard has done the step, and what its program returned, dense parameters too, is "
                  "nothing: go on from what it was given and table.refresh(), or, where that was donated, "
                  "from a checkpoint; partition(..., on_refused='keep') gives all back")};
}

/// A failure whose error another process has.
inline Error ElsewhereError(std::string_view table, std::string_view op) {
  return MakeError(ErrorCode::kFailedPrecondition, table, op, "a call that all shards can do",
                   "a failure in another process", "the error there says why; nothing has changed here");
}

/// Places of strings that are not in their buffer.
inline Error SpansError() {
  return MakeError(ErrorCode::kInvalidArgument, "", "hash_keys", "strings inside of their buffer",
                   "some that end elsewhere",
                   "the array is damaged: make it anew, or give a list of its strings");
}

}  // namespace kvjax
