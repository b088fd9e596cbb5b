// The rows of a device table: index, planes, the row ids that are free, and how all of it grows.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/device/budget.h"
#include "kvjax/ffi/device/control.h"
#include "kvjax/ffi/device/index.h"
#include "kvjax/ffi/device/plane.h"

namespace kvjax::device {

/// What the rows look like to a kernel.
struct RowsView {
  IndexView index;
  PlaneView values, headers, slots;
  uint32_t* free;  // a stack of row ids

  [[nodiscard]] KVJAX_HD RowHeader& Header(uint32_t row) const {
    return *reinterpret_cast<RowHeader*>(headers.At(row));
  }
  [[nodiscard]] KVJAX_HD std::byte* Value(uint32_t row) const { return values.At(row); }
  [[nodiscard]] KVJAX_HD std::byte* Slots(uint32_t row) const { return slots.At(row); }

  /// The row id that the number-th new key of a call takes.
  [[nodiscard]] KVJAX_HD uint32_t FreeRow(const Control& control, uint32_t number) const {
    return number < control.free_rows ? free[control.free_rows - 1 - number]
                                      : control.next_row + (number - control.free_rows);
  }
};

template <class Q>
class Contents {
 public:
  Contents() = default;
  /// With an index for `keys` keys. Throws std::bad_alloc.
  Contents(Q& q, size_t row_bytes, size_t keys, Budget budget = {})
      : budget_(budget),
        index_(q, keys),
        values_(RecordStride(row_bytes), budget.slab_bytes),
        headers_(sizeof(RowHeader)),
        slots_(0) {
    values_.Place(q, RowsOnDevice(slots_));
  }

  [[nodiscard]] RowsView view() const {
    return {index_.view(), values_.view(), headers_.view(), slots_.view(), free_.data()};
  }
  [[nodiscard]] const Index<Q>& index() const { return index_; }
  [[nodiscard]] const SlotLayout& layout() const { return layout_; }
  [[nodiscard]] size_t rows() const { return rows_; }
  /// Bytes from a value, or the slots of a row, to the next.
  [[nodiscard]] size_t value_stride() const { return values_.stride(); }
  [[nodiscard]] static size_t StrideOf(const SlotLayout& layout) {
    return RecordStride(std::max<size_t>(layout.stride(), 4));
  }
  /// Values and slots of rows below this are in device memory, all others in pinned host memory.
  [[nodiscard]] size_t device_rows() const { return values_.device_rows(); }
  [[nodiscard]] size_t pinned_bytes() const { return values_.pinned_bytes() + slots_.pinned_bytes(); }
  [[nodiscard]] size_t value_bytes() const { return values_.bytes(); }
  [[nodiscard]] size_t header_bytes() const { return headers_.bytes() + free_.bytes(); }
  [[nodiscard]] size_t slot_bytes() const { return slots_.bytes(); }

  /// How many row ids the stack of free ones can hold.
  [[nodiscard]] size_t free_capacity() const { return free_.size(); }

  /// Reserves space for `rows` row ids. Throws std::bad_alloc and leaves everything as it was.
  void ReserveRows(Q& q, const Control* control, size_t rows) {
    if (rows <= rows_) return;
    if (free_.size() < rows) {
      Array<Q, uint32_t> free(q, std::max(rows, 2 * free_.size()));
      CopyFree(q, free_.data(), free.data(), control);
      std::swap(free_, free);
      free.Retire(q);
    }
    values_.Reserve(q, rows);
    headers_.Reserve(q, rows);
    slots_.Reserve(q, rows);
    rows_ = rows;
  }

  /// Makes the index anew, for `keys` keys: what was erased is forgotten. Throws std::bad_alloc and leaves
  /// everything as it was. The number of used slots in `control` is set to that of the keys.
  void Reindex(Q& q, Control* control, size_t keys) {
    Index<Q> next(q, keys);
    Rehash(q, index_.view(), next.view(), control);
    std::swap(index_, next);
    next.Retire(q);
  }

  /// Gives every row slots, where there were none. Throws std::bad_alloc and leaves everything as it was.
  void Attach(Q& q, const SlotLayout& layout) {
    Plane<Q> slots = MakeSlots(q, layout);
    Attach(q, layout, slots);
  }
  /// Slots for that, while there are none. Throws std::bad_alloc and leaves everything as it was.
  [[nodiscard]] Plane<Q> MakeSlots(Q& q, const SlotLayout& layout) {
    Plane<Q> slots(StrideOf(layout), budget_.slab_bytes);
    const size_t on_device = RowsOnDevice(slots);
    values_.Place(q, on_device);  // first, so that there is never more on the device than may be
    try {
      slots.Place(q, on_device);
      slots.Reserve(q, rows_);
    } catch (...) {
      Detach(q);
      throw;
    }
    return slots;
  }
  /// And gives them to the rows. More rows than there were then is the only thing that can throw.
  void Attach(Q& q, SlotLayout layout, Plane<Q>& slots) {
    slots.Reserve(q, rows_);
    std::swap(slots_, slots);
    slots.Retire(q);
    layout_ = std::move(layout);
  }
  /// Forgets the slots; the headers say so already.
  void Detach(Q& q) noexcept {
    slots_.Retire(q);
    slots_ = Plane<Q>(0);
    layout_ = {};
    try {
      values_.Place(q, RowsOnDevice(slots_));
    } catch (...) {  // then they stay where they are, which is as good but for speed
    }
  }
  void Retire(Q& q) noexcept {
    index_.Retire(q);
    for (Plane<Q>* plane : {&values_, &headers_, &slots_}) plane->Retire(q);
    free_.Retire(q);
  }

  static void CopyFree(Q& q, const uint32_t* from, uint32_t* to, const Control* control) {
    if (from == nullptr) return;
    constexpr size_t kLanes = 4096;
    q.Each(kLanes, [=] KVJAX_HD(size_t lane) {
      for (size_t i = lane; i < control->free_rows; i += kLanes) to[i] = from[i];
    });
  }
  static void Rehash(Q& q, IndexView from, IndexView to, Control* control) {
    MoveKeys(q, from, to);
    q.Once([=] KVJAX_HD() { control->cells_used.Set(control->size); });
  }

 private:
  /// How many rows, the first ones, the device may hold with these slots.
  [[nodiscard]] size_t RowsOnDevice(const Plane<Q>& slots) const {
    size_t rows = 0;
    for (size_t bit = size_t{1} << 32; bit > 0; bit /= 2) {
      if (values_.BytesFor(rows + bit) + slots.BytesFor(rows + bit) <= budget_.bytes) rows += bit;
    }
    return rows;
  }

  Budget budget_;
  Index<Q> index_;
  Plane<Q> values_, headers_, slots_;
  Array<Q, uint32_t> free_;
  SlotLayout layout_;
  size_t rows_ = 0;  // row ids that there is space for
};

}  // namespace kvjax::device
