// The parts of a row: the values in the table's row type, a header, and the optimizer's slots.
#pragma once
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/half.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax {

enum class RowType { kFloat32, kBFloat16, kFloat16 };

KVJAX_HD inline size_t ItemSize(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

inline RowType ParseRowType(const std::string& text) {
  if (text == "float32") return RowType::kFloat32;
  if (text == "bfloat16") return RowType::kBFloat16;
  if (text == "float16") return RowType::kFloat16;
  throw OptionError("dtype float32, bfloat16 or float16", text);
}

KVJAX_HD inline void StoreElement(RowType type, std::byte* row, int64_t column, float value) {
  if (type == RowType::kFloat32) {
    std::memcpy(row + column * 4, &value, 4);
  } else {
    const uint16_t half = type == RowType::kBFloat16 ? ToBFloat16(value) : ToFloat16(value);
    std::memcpy(row + column * 2, &half, 2);
  }
}

KVJAX_HD inline float LoadElement(RowType type, const std::byte* row, int64_t column) {
  if (type == RowType::kFloat32) {
    float value;
    std::memcpy(&value, row + column * 4, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, row + column * 2, 2);
  return type == RowType::kBFloat16 ? FromBFloat16(half) : FromFloat16(half);
}

/// A key and the row it has.
struct KeyRow {
  uint64_t key;
  uint32_t row;
};

/// What the table knows of a row beside its value. `frequency` counts the occurrences of the key in
/// training, `version` is the step that last wrote the row, `has_slots` is 0 until an optimizer has, and a
/// pinned row is never evicted.
struct RowHeader {
  uint64_t frequency : 62;
  uint64_t pinned : 1;
  uint64_t has_slots : 1;
  int64_t version;
};
static_assert(sizeof(RowHeader) == 16);

/// Where frequencies stop.
inline constexpr uint64_t kMaxFrequency = (uint64_t{1} << 62) - 1;

/// What the slots of a row have at most: far more than any optimizer's.
inline constexpr size_t kMaxSlotBytes = size_t{1} << 30;

/// One optimizer slot: `bytes` per row at `offset` of the slot record. `type` is its dtype and shape as
/// Python writes them ("float32[64]"); the core compares and stores that text and never reads it.
struct Slot {
  std::string name;
  std::string type;
  size_t bytes;
  size_t offset;

  bool operator==(const Slot&) const = default;
};

/// All slots of a table, in the order in which the optimizer passes them.
class SlotLayout {
 public:
  /// Throws if a row would have more than kMaxSlotBytes of them.
  void Add(std::string name, std::string type, size_t bytes) {
    if (bytes > kMaxSlotBytes - stride_) throw SlotsError(name + " " + type);
    slots_.push_back({std::move(name), std::move(type), bytes, 0});
    stride_ = 0;
    // Multiples of 16 bytes lie first, and so at such: a device moves them at once. Python's in_record_order
    // knows.
    for (const bool wide : {true, false}) {
      for (Slot& slot : slots_) {
        if ((slot.bytes % 16 == 0) != wide) continue;
        slot.offset = stride_;
        stride_ += (slot.bytes + 3) / 4 * 4;
      }
    }
  }
  [[nodiscard]] const std::vector<Slot>& slots() const { return slots_; }
  [[nodiscard]] size_t stride() const { return stride_; }
  [[nodiscard]] bool empty() const { return slots_.empty(); }
  bool operator==(const SlotLayout&) const = default;

  /// The text of kvjax._values.slot_layout: name, type and bytes per row of each slot,
  /// "mu|float32[64]|256;nu|float32[64]|256".
  static SlotLayout Parse(std::string_view text) {
    SlotLayout layout;
    while (!text.empty()) {
      const size_t end = std::min(text.find(';'), text.size());
      const std::string_view item = text.substr(0, end);
      const size_t a = std::min(item.find('|'), item.size()),
                   b = std::min(item.find('|', a + 1), item.size());
      size_t bytes = 0;
      const char* const last = item.data() + item.size();
      const auto read = std::from_chars(item.data() + std::min(b + 1, item.size()), last, bytes);
      if (read.ec != std::errc() || read.ptr != last) throw SlotsError(item);
      layout.Add(std::string(item.substr(0, a)), std::string(item.substr(a + 1, b - a - 1)), bytes);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return layout;
  }
  /// "mu float32[64], nu float32[64]"
  [[nodiscard]] std::string ToString() const {
    std::string text;
    for (const Slot& slot : slots_) text += (text.empty() ? "" : ", ") + slot.name + " " + slot.type;
    return text.empty() ? "no slots" : text;
  }

 private:
  std::vector<Slot> slots_;
  size_t stride_ = 0;
};

}  // namespace kvjax
