// What a training write does on the device: rows appear and are counted, are handed out, and are written
// back.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/plan.h"
#include "kvjax/ffi/cuda/writes.h"

namespace kvjax::device {

/// Gradients as a training write gets them; see Table::BeginApply.
struct GradientsView {
  const uint64_t* keys;
  const int32_t* counts;
  const float* rows;
  size_t n;
  const uint32_t* seals;
  size_t num_seals;
  uint32_t seal;         // what each of them has to be
  const uint32_t* step;  // two words
  bool count_batches;
};

/// Refuses what merging cannot have made. first: (n,) as GroupKeys gives it for the keys that count.
template <class Q>
void CheckGradients(Q& q, CallView call, GradientsView g, const uint32_t* first) {
  q.Each(g.num_seals, [=] KVJAX_HD(size_t i) {
    if (g.seals[i] != g.seal) call.Close(Refusal::kSeal, g.seals[i], g.seal);
  });
  q.Each(g.n, [=] KVJAX_HD(size_t i) {
    const int32_t count = g.counts[i];
    const bool behind_padding = i > 0 && count > 0 && g.counts[i - 1] <= 0;
    if (count < 0 || behind_padding || (count > 0 && first[i] != i)) call.Close(Refusal::kMerged, 0, 0);
    if (count > 0) Raise(call.control->active, static_cast<uint32_t>(i + 1));
  });
  q.Once([=] KVJAX_HD() {
    Control& control = *call.control;
    const auto step = static_cast<int64_t>(uint64_t{g.step[1]} << 32 | g.step[0]);
    control.step = step >= 0 ? step : control.last_step + (control.last_step < INT64_MAX ? 1 : 0);
    if (!call.open()) control.active = 0;
  });
}

/// The gradients of keys that get no row, which go to one that they share.
struct Pool {
  uint32_t place;      // of the first of them, kNoRow for none
  uint32_t size;       // how many there are, with that of the shared row's own key
  uint32_t entering;   // whether the call makes the shared row for them
  Counts occurrences;  // of all these
};

/// Counts the occurrences of rows (n,) and tells which row each gradient belongs to: targets (n, 2). Keys
/// that have no row are targets with kNoRow, which the rest of the step passes over. totals: (n,) what each
/// row counts, nullptr for its occurrences in this call. With a pool, rows[n] is the shared one, whose target
/// stands in the place of the first refused key.
template <class Q>
void CountRows(Q& q, CallView call, RowsView in, GradientsView g, const uint32_t* rows,
               const uint32_t* totals, const Pool* pool, uint32_t* targets, int32_t* active,
               uint32_t* used_step) {
  q.Each(g.n, [=] KVJAX_HD(size_t i) {
    Control& control = *call.control;
    const bool counts = i < control.active && call.open();
    const bool pools = pool != nullptr && pool->place != kNoRow;
    targets[2 * i] = counts ? rows[i] : kNoRow;
    targets[2 * i + 1] = static_cast<uint32_t>(i);
    if (!counts) return;
    const auto occurrences = static_cast<uint64_t>(g.counts[i]);
    uint64_t counted = totals != nullptr ? totals[i] : g.count_batches ? 1 : occurrences;
    control.occurrences.Add(i, occurrences);
    if (rows[i] == kNoRow) {
      control.refused.Add(i, occurrences);
      if (!pools || i != pool->place) return;
      targets[2 * i] = rows[g.n];
      targets[2 * i + 1] = ApplyTarget::kPooled;
      counted = g.count_batches ? 1 : pool->occurrences.Sum();
    } else if (pools && rows[i] == rows[g.n]) {
      targets[2 * i] = kNoRow;  // its gradient is in the pool
      return;
    }
    RowHeader& header = in.Header(targets[2 * i]);
    const uint64_t frequency = header.frequency + counted;
    header.frequency = frequency < kMaxFrequency ? frequency : kMaxFrequency;
    header.version = control.step;
  });
  q.Once([=] KVJAX_HD() {
    Control& control = *call.control;
    *active = static_cast<int32_t>(control.active);
    used_step[0] = static_cast<uint32_t>(control.step);
    used_step[1] = static_cast<uint32_t>(static_cast<uint64_t>(control.step) >> 32);
    if (!call.open()) return;
    control.admitted += control.entering - (pool != nullptr ? pool->entering : 0);
    control.distinct += control.active;
    if (control.step > control.last_step) control.last_step = control.step;
  });
}

/// The rows of a step that a chunk is about: [start, start + chunk), cut at `active`.
struct ChunkView {
  CallView call;
  RowsView in;
  const uint32_t* targets;
  size_t num_rows;
  const int32_t* start;
  const int32_t* active;

  /// The place in the step of the i-th row of the chunk, and its row id; kNoRow for none.
  KVJAX_HD uint32_t Row(size_t i, size_t& place) const {
    place = static_cast<size_t>(*start) + i;
    if (*start < 0 || *active < 0 || place >= static_cast<size_t>(*active) || place >= num_rows)
      return kNoRow;
    const uint32_t row = targets[2 * place];
    if (row == kNoRow) return kNoRow;
    if (!call.Current(true)) return kNoRow;
    if (row >= call.control->next_row) call.Refuse(Refusal::kChunk, row, call.control->next_row);
    return row < call.control->next_row ? row : kNoRow;
  }
};

/// See Table::Gather.
struct GatherView {
  const uint64_t* keys;
  const float* rows;
  const float* pooled;  // the gradient of the row of that key
  uint64_t shared_key;
  size_t dim, row_bytes;
  std::byte* values;
  float* grads;
  bool* fresh;
  uint64_t* row_keys;
};
template <class Q>
void GatherRows(Q& q, ChunkView chunk, GatherView v, size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    size_t place = 0;
    const uint32_t row = i < n ? chunk.Row(i, place) : kNoRow;
    if (i < n) {
      v.fresh[i] = row == kNoRow || chunk.in.Header(row).has_slots == 0;
    }
    const uint32_t gradient_of = row == kNoRow ? 0 : chunk.targets[2 * place + 1];
    if (i < n)
      v.row_keys[i] = row == kNoRow ? 0 : gradient_of == ApplyTarget::kPooled ? v.shared_key : v.keys[place];
    const size_t base = i - tile.rank();
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t from = tile.Shuffle(row, lane);
      const auto gradient = tile.Shuffle(gradient_of, lane);
      const size_t k = base + lane;
      if (k >= n) break;
      auto* const grads = reinterpret_cast<std::byte*>(v.grads + k * v.dim);
      if (from == kNoRow) {  // nobody uses them, but an optimizer should see numbers
        FillRecord(tile, v.values + k * v.row_bytes, 0, v.row_bytes);
        FillRecord(tile, grads, 0, v.dim * sizeof(float));
      } else {
        CopyRecord(tile, v.values + k * v.row_bytes, chunk.in.Value(from), v.row_bytes);
        const float* const source =
            gradient == ApplyTarget::kPooled ? v.pooled : v.rows + size_t{gradient} * v.dim;
        CopyRecord(tile, grads, source, v.dim * sizeof(float));
      }
    }
  });
}

/// Copies one slot, `bytes` at `offset` of the record, of each row of the chunk out (n, bytes) or, `back`,
/// in.
template <class Q>
void CopySlot(Q& q, ChunkView chunk, size_t offset, size_t bytes, std::byte* slot, size_t n, bool back) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    size_t place = 0;
    const uint32_t row = i < n ? chunk.Row(i, place) : kNoRow;
    const size_t base = i - tile.rank();
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t of = tile.Shuffle(row, lane);
      if (base + lane >= n) break;
      std::byte* const outside = slot + (base + lane) * bytes;
      if (of == kNoRow) {
        if (!back) FillRecord(tile, outside, 0, bytes);
      } else if (back) {
        CopyRecord(tile, chunk.in.Slots(of) + offset, outside, bytes);
      } else {
        CopyRecord(tile, outside, chunk.in.Slots(of) + offset, bytes);
      }
    }
  });
}

/// Writes values (n, row_bytes) back; `slots` says that there are slots, which are written with them.
template <class Q>
void ScatterRows(Q& q, ChunkView chunk, const std::byte* values, size_t row_bytes, bool slots, size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    size_t place = 0;
    const uint32_t row = i < n ? chunk.Row(i, place) : kNoRow;
    if (row != kNoRow && slots) chunk.in.Header(row).has_slots = 1;
    const size_t base = i - tile.rank();
    for (int lane = 0; lane < tile.size(); ++lane) {
      const uint32_t to = tile.Shuffle(row, lane);
      if (base + lane >= n) break;
      if (to != kNoRow) CopyRecord(tile, chunk.in.Value(to), values + (base + lane) * row_bytes, row_bytes);
    }
  });
}

}  // namespace kvjax::device
