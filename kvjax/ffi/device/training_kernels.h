// The kernels of a training write: rows appear and are counted, are handed out, and are written
// back.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/device/write_kernels.h"

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
  q.Each(g.n > g.num_seals ? g.n : g.num_seals, [=] KVJAX_HD(size_t i) {
    if (i < g.num_seals && g.seals[i] != g.seal) call.Close(Refusal::kSeal, g.seals[i], g.seal);
    if (i >= g.n) return;
    const int32_t count = g.counts[i];
    const bool behind_padding = i > 0 && count > 0 && g.counts[i - 1] <= 0;
    if (count < 0 || behind_padding || (count > 0 && first[i] != i)) call.Close(Refusal::kMerged, 0, 0);
    // Of a call that is let in this is one lane.
    const bool last = count > 0 && (i + 1 == g.n || g.counts[i + 1] <= 0);
    if (last) Store(call.control->active, static_cast<uint32_t>(i + 1));
  });
}

/// status: 0 if the call is let in, 1 if it has been refused.
template <class Q>
void SayWhetherOpen(Q& q, CallView call, uint32_t* status) {
  q.Once([=] KVJAX_HD() { *status = call.open() ? 0 : 1; });
}

/// The gradients of keys that get no row, whose sum trains one that they share.
struct Unadmitted {
  uint32_t position;   // of the first of them, kNoRow for none
  uint32_t size;       // how many there are, with that of the shared row's own key
  uint32_t entering;   // whether the call makes the shared row for them
  Counts occurrences;  // of all these
};

/// Counts the occurrences of rows (n,) and finds which row each gradient belongs to: targets (n, 2). Keys
/// that have no row are targets with kNoRow, which the rest of the step passes over. totals: (n,) what each
/// row counts, nullptr for its occurrences in this call. With unadmitted keys, rows[n] is the shared one,
/// whose target stands at the position of the first refused key. facts: (n,) about the rows of the targets,
/// or nullptr.
template <class Q>
void CountRows(Q& q, CallView call, RowsView in, GradientsView g, const uint32_t* rows,
               const uint32_t* totals, const Unadmitted* unadmitted, uint64_t shared_key, uint32_t* targets,
               RowFacts* facts) {
  q.Tiles(g.n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    Control& control = *call.control;
    const bool counts = i < g.n && i < control.active && call.open();
    const bool shares = unadmitted != nullptr && unadmitted->position != kNoRow;
    const uint32_t row = counts ? rows[i] : kNoRow;
    const uint64_t occurrences = counts ? static_cast<uint64_t>(g.counts[i]) : 0;
    const uint64_t all = SumOfLanes(tile, occurrences);
    const uint64_t refused = SumOfLanes(tile, row == kNoRow ? occurrences : 0);
    if (tile.rank() == 0) {
      control.occurrences.Add(i / tile.size(), all);
      control.refused.Add(i / tile.size(), refused);
    }
    if (i >= g.n) return;
    targets[2 * i] = row;
    targets[2 * i + 1] = static_cast<uint32_t>(i);
    if (!counts) return;
    uint64_t counted = totals != nullptr ? totals[i] : g.count_batches ? 1 : occurrences;
    uint64_t here = occurrences, key = g.keys[i];
    if (row == kNoRow) {
      if (!shares || i != unadmitted->position) return;
      targets[2 * i] = rows[g.n];
      targets[2 * i + 1] = ApplyTarget::kSharedGradient;
      here = unadmitted->occurrences.Sum(), key = shared_key;
      counted = g.count_batches ? 1 : here;
    } else if (shares && row == rows[g.n]) {
      targets[2 * i] = kNoRow;  // its gradient is part of the shared one
      return;
    }
    RowHeader& header = in.Header(targets[2 * i]);
    if (facts != nullptr) facts[i] = FactsOf(header, here, counted, control.step, key);
    const uint64_t frequency = header.frequency + counted;
    header.frequency = frequency < kMaxFrequency ? frequency : kMaxFrequency;
    header.version = control.step;
  });
}

/// What a training write does at its end.
struct EndStep {
  const Unadmitted* unadmitted;
  int32_t* active;
  uint32_t* used_step;

  KVJAX_HD void operator()(CallView call) const {
    Control& control = *call.control;
    *active = call.open() ? static_cast<int32_t>(control.active) : 0;
    used_step[0] = static_cast<uint32_t>(control.step);
    used_step[1] = static_cast<uint32_t>(static_cast<uint64_t>(control.step) >> 32);
    if (!call.open()) return;
    control.admitted += control.entering - (unadmitted != nullptr ? unadmitted->entering : 0);
    control.distinct += control.active;
    if (control.step > control.last_step) control.last_step = control.step;
  }
};

/// The rows of a step that a chunk is about: [start, start + chunk), cut at `active`.
struct ChunkView {
  CallView call;
  RowsView in;
  const uint32_t* targets;
  size_t num_rows;
  const int32_t* start;  // nullptr for 0
  const int32_t* active;

  /// The position in the step of the i-th row of the chunk, and its row id; kNoRow for none.
  KVJAX_HD uint32_t Row(size_t i, size_t& position) const {
    const int32_t from = start != nullptr ? *start : 0;
    position = static_cast<size_t>(from) + i;
    if (from < 0 || *active < 0 || position >= static_cast<size_t>(*active) || position >= num_rows)
      return kNoRow;
    const uint32_t row = targets[2 * position];
    if (row == kNoRow) return kNoRow;
    if (!call.Current(true)) return kNoRow;
    if (row >= call.control->next_row) call.Refuse(Refusal::kChunk, row, call.control->next_row);
    return row < call.control->next_row ? row : kNoRow;
  }
};

/// What of the rows of a step is copied out and back: the value, or one slot. `bytes` at `offset` of the
/// record are a row of `outside` (n, bytes).
struct Part {
  std::byte* outside;
  size_t bytes, offset;
  bool slot;

  [[nodiscard]] KVJAX_HD std::byte* Of(const RowsView& in, uint32_t row) const {
    return (slot ? in.Slots(row) : in.Value(row)) + offset;
  }
};
/// As many of them as one kernel takes.
struct Parts {
  static constexpr size_t kMost = 8;
  Part part[kMost];
  size_t n;
};

/// What a gather gives beside the parts. The gradients are left out if `grads` is nullptr, and all of it with
/// further parts, if `fresh` is.
struct GatherView {
  const uint64_t* keys;
  const float* rows;
  const float* shared_gradient;  // the gradient of the row of that key
  uint64_t shared_key;
  size_t dim;
  float* grads;
  bool* fresh;
  uint64_t* row_keys;
  const RowFacts* facts;
  RowFacts* row_facts;  // nullptr if nobody wants them
};

/// See Table::Gather. Where there is no row nobody uses what is written, but an optimizer should see numbers.
template <class Q>
void GatherRows(Q& q, ChunkView chunk, GatherView v, Parts parts, size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    size_t position = 0;
    const uint32_t row = i < n ? chunk.Row(i, position) : kNoRow;
    const bool has = row != kNoRow;
    const uint32_t gradient = has ? chunk.targets[2 * position + 1] : 0;
    const bool shared_gradient = gradient == ApplyTarget::kSharedGradient;
    if (i < n && v.fresh != nullptr) {
      v.fresh[i] = !has || chunk.in.Header(row).has_slots == 0;
      v.row_keys[i] = !has ? 0 : shared_gradient ? v.shared_key : v.keys[position];
    }
    if (i < n && v.row_facts != nullptr)
      v.row_facts[i] = has && v.facts != nullptr ? v.facts[position] : RowFacts();
    if (v.grads != nullptr) {
      const float* const from = !has              ? nullptr
                                : shared_gradient ? v.shared_gradient
                                                  : v.rows + size_t{gradient} * v.dim;
      float* const to = i < n ? v.grads + i * v.dim : nullptr;
      CopyRecords(tile, reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                  v.dim * sizeof(float));
    }
    for (size_t p = 0; p < parts.n; ++p) {
      const Part& part = parts.part[p];
      CopyRecords(tile, i < n ? part.outside + i * part.bytes : nullptr,
                  has ? part.Of(chunk.in, row) : nullptr, part.bytes);
    }
  });
}

/// Writes the parts back; `slots` says that there are slots, which are written with them. `out`, unless it is
/// nullptr, gets the version.
template <class Q>
void ScatterRows(Q& q, ChunkView chunk, Parts parts, bool slots, size_t n, uint32_t* out) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    if (i == 0 && out != nullptr) *out = *chunk.call.version;
    size_t position = 0;
    const uint32_t row = i < n ? chunk.Row(i, position) : kNoRow;
    const bool has = row != kNoRow;
    if (has && slots) chunk.in.Header(row).has_slots = 1;
    for (size_t p = 0; p < parts.n; ++p) {
      const Part& part = parts.part[p];
      CopyRecords(tile, has ? part.Of(chunk.in, row) : nullptr, has ? part.outside + i * part.bytes : nullptr,
                  part.bytes);
    }
  });
}

}  // namespace kvjax::device
