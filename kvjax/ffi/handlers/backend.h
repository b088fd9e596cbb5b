// What a backend supplies to the handlers.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/policy.h"
#include "kvjax/ffi/core/row.h"

namespace kvjax {

/// `Ctx` is the FFI context that carries the execution resource, `Exec` its decoded form, `Table` the table.
/// All pointers point where the backend's buffers live; the version too, which only the backend may read.
/// The functions throw kvjax::Error or std::bad_alloc.
template <class B>
concept Backend = requires(
    typename B::Exec& exec, typename B::Table& table, const uint32_t* version, Operand call, uint32_t* next,
    KeySpan keys, InitialRows initial, Missing missing, std::byte* bytes, const std::byte* const_bytes,
    bool* flags, const bool* const_flags, float* floats, const float* const_floats, int64_t* longs,
    int32_t* ints, const int32_t* const_ints, uint64_t* words, const uint64_t* const_words,
    const int64_t* step, Policy policy, const SlotLayout& layout, size_t n, std::string_view name,
    const std::vector<std::byte*>& slots, const std::vector<const std::byte*>& const_slots) {
  typename B::Ctx;
  B::Lookup(exec, table, version, keys, const_flags, initial, missing, bytes, flags, floats, n);
  B::FindMissing(exec, table, version, keys, const_flags, words, ints);
  B::Inspect(exec, table, name, version, keys, flags, longs, longs);
  B::ReadSlot(exec, table, version, name, n, keys, bytes);
  B::Changed(exec, table, version, version, keys, flags);
  B::WriteKeys(exec, table, name, call, keys, const_flags, initial, next);
  B::WriteRows(exec, table, name, call, keys, const_flags, const_bytes, initial, next);
  B::Accum(exec, table, call, keys, const_flags, const_floats, const_floats, const_flags, next);
  B::Evict(exec, table, name, call, policy, step, next);
  B::Clear(exec, table, call, next);
  B::ClearSlots(exec, table, call, next);
  B::BeginApply(exec, table, version, keys, const_ints, version, n, const_floats, step, layout, initial, next,
                next, ints, longs, floats);
  B::Gather(exec, table, version, version, n, const_ints, const_ints, n, const_words, const_floats,
            const_floats, bytes, floats, flags, words, slots);
  B::Scatter(exec, table, version, version, n, const_ints, const_ints, n, const_bytes, const_slots, next);
  B::Merge(exec, keys, const_floats, const_ints, version, n, n, words, floats, ints);
  B::Seal(exec, name, const_floats, n, next);
  B::Copy(exec, version, next);
  B::Fill(exec, next, n, 0u);
};

}  // namespace kvjax
