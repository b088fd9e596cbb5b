// The CPU backend: what the handlers need of the CPU table.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/cpu/backend_bags.h"
#include "kvjax/ffi/cpu/backend_sharded.h"
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

/// Calls the core, reading on the spot the scalars that the handlers hand through as pointers.
struct Cpu : CpuBags, CpuSharded {
  using Ctx = xla::ffi::ThreadPool;
  using Exec = xla::ffi::ThreadPool;
  using Table = kvjax::Table;

  static void Lookup(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                     InitialRows initial, Missing missing, std::byte* rows, bool* found, float* used,
                     size_t num_used) {
    t.Lookup(On(pool), *version, keys, mask, initial, missing, rows, found);
    std::fill_n(used, num_used, 1.0f);
  }
  static void FindMissing(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const bool* mask,
                          uint64_t* missing, int32_t* count) {
    const size_t n = t.FindMissing(On(pool), *version, keys, mask, missing);
    std::fill(missing + n, missing + keys.n + 1, uint64_t{0});
    *count = static_cast<int32_t>(n);
  }
  static void Inspect(Exec& pool, Table& t, std::string_view op, const uint32_t* version, KeySpan keys,
                      bool* found, int64_t* frequency, int64_t* row_version) {
    t.Inspect(On(pool), op, *version, keys, found, frequency, row_version);
  }
  static void ReadSlot(Exec& pool, Table& t, const uint32_t* version, std::string_view slot, size_t bytes,
                       KeySpan keys, std::byte* out) {
    t.ReadSlot(On(pool), *version, slot, bytes, keys, out);
  }
  static void Changed(Exec&, Table& t, const uint32_t* version, const uint32_t* since, KeySpan keys,
                      bool* changed) {
    t.Changed(*version, *since, keys, changed);
  }
  static void WriteKeys(Exec& pool, Table& t, std::string_view op, Operand by, KeySpan keys, const bool* mask,
                        InitialRows initial, uint32_t* next) {
    const Selected own(keys, mask);
    const Call call = CallOf(by);
    *next = op == "lookup_or_insert" ? t.Insert(On(pool), call, own.keys(), initial)
            : op == "pin"            ? t.Pin(On(pool), call, own.keys(), initial)
            : op == "unpin"          ? t.Unpin(call, own.keys())
            : op == "remove"         ? t.Remove(call, own.keys())
                                     : throw Unknown(t, op);
  }
  static void WriteRows(Exec& pool, Table& t, std::string_view op, Operand by, KeySpan keys, const bool* mask,
                        const std::byte* rows, InitialRows initial, uint32_t* next) {
    const Selected own(keys, mask);
    const Call call = CallOf(by);
    std::vector<std::byte> room;
    const size_t bytes = op == "add" ? static_cast<size_t>(t.spec().dim) * sizeof(float) : t.row_bytes();
    rows = own.Rows(rows, bytes, room);
    *next = op == "upsert"   ? t.Upsert(On(pool), call, own.keys(), rows)
            : op == "assign" ? t.Assign(On(pool), call, own.keys(), rows)
            : op == "add" ? t.Add(On(pool), call, own.keys(), reinterpret_cast<const float*>(rows), initial)
                          : throw Unknown(t, op);
  }
  static void Accum(Exec& pool, Table& t, Operand by, KeySpan keys, const bool* mask, const float* old_rows,
                    const float* new_rows, const bool* exists, uint32_t* next) {
    const Selected own(keys, mask);
    const auto dim = static_cast<size_t>(t.spec().dim);
    std::vector<float> old_room, new_room;
    std::vector<uint8_t> exists_room;
    const auto* flags = own.Rows(reinterpret_cast<const uint8_t*>(exists), 1, exists_room);
    *next = t.Accum(On(pool), CallOf(by), own.keys(), own.Rows(old_rows, dim, old_room),
                    own.Rows(new_rows, dim, new_room), reinterpret_cast<const bool*>(flags));
  }
  static void Evict(Exec& pool, Table& t, std::string_view op, Operand by, const Policy& policy,
                    const int64_t* step, uint32_t* next) {
    *next = t.Evict(On(pool), op, CallOf(by), policy, Unaligned(step));
  }
  static void Clear(Exec&, Table& t, Operand by, uint32_t* next) { *next = t.Clear(CallOf(by)); }
  static void ClearSlots(Exec&, Table& t, Operand by, uint32_t* next) { *next = t.ClearSlots(CallOf(by)); }
  static void BeginApply(Exec& pool, Table& t, const uint32_t* version, KeySpan keys, const int32_t* counts,
                         const uint32_t* seals, size_t num_seals, const float* rows, const int64_t* step,
                         const SlotLayout& layout, InitialRows initial, uint32_t* next, uint32_t* targets,
                         int32_t* active, int64_t* used_step, float* pooled) {
    CheckSeals(t.spec().name, "apply", seals, num_seals);
    int64_t used = 0;
    *next = t.BeginApply(On(pool), *version, keys, counts, rows, Unaligned(step), layout, initial,
                         {reinterpret_cast<Table::Target*>(targets), active, &used, pooled});
    std::memcpy(used_step, &used, sizeof(used));
  }
  static void Gather(Exec& pool, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                     const int32_t* start, const int32_t* active, size_t chunk, const uint64_t* keys,
                     const float* rows, const float* pooled, std::byte* values, float* grads, bool* fresh,
                     uint64_t* row_keys, const std::vector<std::byte*>& slots) {
    Chunk c(t, targets, num_rows, *start, *active, chunk);
    if (c.own) {
      const Inbox::Merged& in = t.shard_step().inbox.merged();
      num_rows = in.n, keys = in.keys, rows = in.rows, pooled = t.shard_step().pooled.data();
    }
    const auto dim = static_cast<size_t>(t.spec().dim);
    t.Gather(On(pool), *version, c.of, c.n, values, fresh, slots);
    for (size_t i = 0, run; i < c.n; i += run) {  // gradients mostly stand one behind the other
      const uint32_t g = c.of[i].gradient;
      const bool in_rows = g < num_rows;
      for (run = 1; in_rows && i + run < c.n && c.of[i + run].gradient == g + run;) ++run;
      if (grads != nullptr)
        std::memcpy(grads + i * dim, in_rows ? rows + g * dim : pooled, run * dim * sizeof(float));
      const uint64_t* from = in_rows ? keys + g : &t.spec().admission.shared_key;
      std::memcpy(row_keys + i, from, run * sizeof(uint64_t));
    }
    std::memset(row_keys + c.n, 0, (chunk - c.n) * sizeof(uint64_t));
  }
  static void Scatter(Exec& pool, Table& t, const uint32_t* version, const uint32_t* targets, size_t num_rows,
                      const int32_t* start, const int32_t* active, size_t chunk, const std::byte* values,
                      const std::vector<const std::byte*>& slots, uint32_t* out) {
    const Chunk c(t, targets, num_rows, *start, *active, chunk);
    t.Scatter(On(pool), *version, c.of, c.n, values, slots,
              /*last=*/static_cast<size_t>(*start) + chunk >= static_cast<size_t>(*active));
    *out = *version;
  }
  static void Merge(Exec&, KeySpan keys, const float* rows, const int32_t* counts, const uint32_t* seals,
                    size_t num_seals, size_t dim, uint64_t* out_keys, float* out_rows, int32_t* out_counts) {
    CheckSeals("", "merge", seals, num_seals);
    MergeRows(keys.data, rows, counts, keys.n, dim, out_keys, out_rows, out_counts);
  }
  static void Seal(Exec&, std::string_view table, const float* used, size_t lookups, uint32_t* seal) {
    for (size_t i = 0; i < lookups; ++i) {
      if (used[i] == 0.0f || used[i] == 1.0f) continue;
      throw UsesError(table, i, lookups, used[i]);
    }
    *seal = kSeal;
  }
  static void Copy(Exec&, const uint32_t* version, uint32_t* out) { *out = *version; }
  static void Fill(Exec&, uint32_t* out, size_t n, uint32_t word) { std::fill_n(out, n, word); }

 private:
  static Error Unknown(const Table& t, std::string_view op) {
    return MakeError(ErrorCode::kInvalidArgument, t.spec().name, op, "an operation of kvjax", op,
                     "call kvjax's Python functions");
  }
  /// The targets of the chunk at `start`: of the operand, or of the shard's own step if that is empty.
  struct Chunk {
    Chunk(const Table& t, const uint32_t* targets, size_t num_rows, int32_t start, int32_t active,
          size_t chunk)
        : own(num_rows == 0) {
      const auto& step = t.shard_step().targets;
      const auto rows = static_cast<int64_t>(std::min<size_t>(own ? step.size() : num_rows, INT32_MAX));
      if (start < 0 || active < 0 || active > rows || start > rows) {
        throw MakeError(ErrorCode::kInvalidArgument, t.spec().name, "apply", "a chunk inside the step",
                        "start " + std::to_string(start) + ", active " + std::to_string(active),
                        "this is a defect of kvjax: please report it");
      }
      of = (own ? step.data() : reinterpret_cast<const Table::Target*>(targets)) + start;
      n = std::min(chunk, static_cast<size_t>(std::max(active - start, 0)));
    }
    bool own;
    const Table::Target* of;
    size_t n;
  };
};

}  // namespace kvjax
