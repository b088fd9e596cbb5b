// Budget: how much of a table may be in device memory, from the text that Python's kvjax.storage gives for
// it.
#pragma once
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "kvjax/ffi/core/error_texts.h"

namespace kvjax::device {

struct Budget {
  size_t bytes = SIZE_MAX;  // of values and slots
  size_t slab_bytes = size_t{2} << 20;

  /// "hybrid:<bytes>", and for tests of small tables "hybrid:<bytes>:<bytes of a slab>"; all other storages
  /// have no limit. Throws kvjax::Error in the name of `table`.
  static Budget Parse(std::string_view text, std::string_view table) {
    constexpr std::string_view kHybrid = "hybrid:";
    Budget budget;
    if (!text.starts_with(kHybrid)) return budget;
    const char* at = text.data() + kHybrid.size();
    const char* const end = text.data() + text.size();
    const auto number = [&](size_t& out) {
      const auto [rest, error] = std::from_chars(at, end, out);
      at = rest;
      return error == std::errc();
    };
    bool fits = number(budget.bytes);
    if (fits && at != end) fits = *at++ == ':' && number(budget.slab_bytes) && budget.slab_bytes > 0;
    if (fits && at == end) return budget;
    throw StorageError(table, text);
  }
};

}  // namespace kvjax::device
