// What a backend supplies to the handlers.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/table.h"

namespace kvjax {

/// `Ctx` is the FFI context that carries the execution resource, `Exec` its decoded form, `Table` the table.
/// All pointers point where the backend's buffers live; the version too, which only the backend may read.
/// The functions throw kvjax::Error or std::bad_alloc.
template <class B>
concept Backend =
    requires(typename B::Exec& exec, typename B::Table& table, const uint32_t* version, uint32_t* next,
             KeySpan keys, std::byte* bytes, const std::byte* const_bytes, bool* flags, float* floats,
             const float* const_floats, int64_t* longs, int32_t* ints, const int32_t* const_ints,
             uint64_t* words, const int64_t* step, const SlotLayout& layout, size_t n, std::string_view name,
             const std::vector<std::byte*>& slots, const std::vector<const std::byte*>& const_slots) {
      typename B::Ctx;
      B::Lookup(exec, table, version, keys, bytes, flags, floats, n);
      B::Inspect(exec, table, name, version, keys, flags, longs, longs);
      B::Insert(exec, table, version, keys, next);
      B::Upsert(exec, table, version, keys, const_bytes, next);
      B::Remove(exec, table, version, keys, next);
      B::Clear(exec, table, version, next);
      B::ClearSlots(exec, table, version, next);
      B::BeginApply(exec, table, version, keys, const_ints, version, n, step, layout, next, next, ints);
      B::Gather(exec, table, version, version, n, const_ints, const_ints, n, const_floats, bytes, floats,
                flags, slots);
      B::Scatter(exec, table, version, version, n, const_ints, const_ints, n, const_bytes, const_slots, next);
      B::Merge(exec, keys, const_floats, const_ints, version, n, n, words, floats, ints);
      B::Seal(exec, name, const_floats, n, next);
      B::Copy(exec, version, next);
    };

}  // namespace kvjax
