// The slab allocator of a table, from the text that Python's kvjax.storage gives for it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "kvjax/ffi/core/away.h"
#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/mapped.h"
#include "kvjax/ffi/core/slab.h"

namespace kvjax {

/// "engine" (rows are in one of the user's, see RowsAway), "host", "host:huge" (huge pages from the first
/// slab on), "host:small" (never) or "mmap:<folder>". Throws kvjax::Error in the name of `table`.
inline std::shared_ptr<SlabAllocator> MakeSlabs(std::string_view text, std::string_view table) {
  constexpr std::string_view kMmap = "mmap:";
  if (text == "engine") return std::make_shared<HostSlabs>();
  if (text == "host") return std::make_shared<HostSlabs>();
  if (text == "host:huge") return std::make_shared<HostSlabs>(0);
  if (text == "host:small") return std::make_shared<HostSlabs>(SIZE_MAX);
  if (text.starts_with(kMmap)) {
    return std::make_shared<MappedSlabs>(std::string(text.substr(kMmap.size())), std::string(table));
  }
  throw StorageError(table, text);
}

}  // namespace kvjax
