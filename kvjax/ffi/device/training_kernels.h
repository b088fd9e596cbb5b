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
  const uint32_t* canaries;
  size_t num_canaries;
  const uint32_t* step;  // two words
  bool count_batches;
  bool merged = false;  // by the call itself: no key comes twice
};

/// Refuses what merging cannot have made. first: (n,) as GroupKeys gives it for the keys that count.
template <class Q>
void CheckGradients(Q& q, CallView call, GradientsView g, const uint32_t* first) {
  q.Each(g.n > g.num_canaries ? g.n : g.num_canaries, [=] KVJAX_HD(size_t i) {
    if (i < g.num_canaries && g.canaries[i] != kCanary) call.Close(Refusal::kCanary, g.canaries[i], kCanary);
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

/// Which row a gradient trains.
struct StepRow {
  uint32_t row = kNoRow;     // kNoRow for none: then the rest does not count
  size_t position = 0;       // that of its key among the keys of the call
  uint32_t gradient = 0;     // see ApplyTarget
  uint64_t occurrences = 0;  // of the keys whose gradient it gets
  uint64_t counted = 0;      // what its frequency rises by
  uint64_t key = 0;
};
/// The rows of a step. rows: (n,) of its keys, kNoRow for those without; totals: (n,) what each row counts,
/// nullptr for its occurrences in this call. With unadmitted keys, rows[n] is the shared one, which the first
/// refused key stands for.
struct StepRowsView {
  GradientsView of;
  const uint32_t* rows;
  const uint32_t* totals;
  const Unadmitted* unadmitted;
  uint64_t shared_key;

  KVJAX_HD StepRow At(CallView call, size_t i) const {
    StepRow out;
    if (i >= of.n || i >= call.control->active || !call.open()) return out;
    const bool shares = unadmitted != nullptr && unadmitted->position != kNoRow;
    const auto occurrences = static_cast<uint64_t>(of.counts[i]);
    if (rows[i] == kNoRow) {
      if (!shares || i != unadmitted->position) return out;
      const uint64_t all = unadmitted->occurrences.Sum();
      return {rows[of.n], of.n, ApplyTarget::kSharedGradient, all, of.count_batches ? 1 : all, shared_key};
    }
    if (shares && rows[i] == rows[of.n]) return out;  // its gradient is part of the shared one
    const uint64_t counted = totals != nullptr ? totals[i] : of.count_batches ? 1 : occurrences;
    return {rows[i], i, static_cast<uint32_t>(i), occurrences, counted, of.keys[i]};
  }
};

/// Counts the occurrences of rows and says which row each gradient belongs to: targets (n, 2), with kNoRow
/// for those that the rest of the step passes over. facts: (n,) about the rows of the targets, or nullptr.
template <class Q>
void CountRows(Q& q, CallView call, RowsView in, StepRowsView rows, uint32_t* targets, RowFacts* facts) {
  const size_t n = rows.of.n;
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    Control& control = *call.control;
    const bool counts = i < n && i < control.active && call.open();
    const uint64_t occurrences = counts ? static_cast<uint64_t>(rows.of.counts[i]) : 0;
    const uint64_t all = SumOfLanes(tile, occurrences);
    const uint64_t refused = SumOfLanes(tile, counts && rows.rows[i] == kNoRow ? occurrences : 0);
    if (tile.rank() == 0) {
      control.occurrences.Add(i / tile.size(), all);
      control.refused.Add(i / tile.size(), refused);
    }
    if (i >= n) return;
    const StepRow at = rows.At(call, i);
    targets[2 * i] = at.row;
    targets[2 * i + 1] = at.gradient;
    if (at.row == kNoRow) return;
    RowHeader& header = in.Header(at.row);
    if (facts != nullptr) facts[i] = FactsOf(header, at.occurrences, at.counted, control.step, at.key);
    const uint64_t frequency = header.frequency + at.counted;
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
    PutWords(used_step, static_cast<uint64_t>(control.step));
    if (!call.open()) return;
    control.admitted += control.entering - (unadmitted != nullptr ? unadmitted->entering : 0);
    control.distinct += control.active;
    if (control.step > control.last_step) control.last_step = control.step;
  }
};

/// The rows of a step that has begun.
struct TargetsView {
  CallView call;
  RowsView in;
  const uint32_t* targets;  // (n, 2)
  size_t n;
  const int32_t* active;

  /// The row id of the i-th target; kNoRow for none.
  [[nodiscard]] KVJAX_HD uint32_t Row(size_t i) const {
    if (i >= n || *active < 0 || i >= static_cast<size_t>(*active)) return kNoRow;
    return targets[2 * i];
  }
};

/// What of the rows of a step is outside of the table: the value, or one slot. `bytes` at `offset` of the
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

/// What is read of the rows of a step beside the parts; nothing with further parts, if `fresh` is nullptr.
struct StepResults {
  const float* shared_gradient;  // (dim,)
  size_t dim;
  float* grads;  // or nullptr if nobody wants them
  bool* fresh;
  uint64_t* row_keys;   // or nullptr if nobody wants them
  RowFacts* row_facts;  // the same
  uint32_t* used_step;  // two words
};

/// Reads the rows of a step, also those that it would make, n of them at most, and changes nothing. v: as
/// FindNew leaves it. attached: whether rows have slots. Where there is no row nobody uses what is written,
/// but an optimizer should see numbers.
template <class Q>
void ReadRows(Q& q, EnterView v, StepRowsView rows, bool attached, StepResults out, Parts parts, size_t n) {
  q.Tiles(n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const StepRow at = i < n ? rows.At(v.call, i) : StepRow();
    const bool has = at.row != kNoRow;
    const uint32_t first = has ? v.first[at.position] : 0;
    const bool is_new = has && v.flag[first] != 0, is_old = has && !is_new;
    if (i < n && out.fresh != nullptr) {
      out.fresh[i] = !is_old || v.in.Header(at.row).has_slots == 0;
      if (out.row_keys != nullptr) out.row_keys[i] = at.key;
    }
    if (i < n && out.row_facts != nullptr) {
      const RowHeader header = is_old ? v.in.Header(at.row) : RowHeader();
      out.row_facts[i] =
          has ? FactsOf(header, at.occurrences, at.counted, v.call.control->step, at.key) : RowFacts();
    }
    if (out.grads != nullptr) {
      const float* const from = !has                                          ? nullptr
                                : at.gradient == ApplyTarget::kSharedGradient ? out.shared_gradient
                                                                              : rows.of.rows + i * out.dim;
      float* const to = i < n ? out.grads + i * out.dim : nullptr;
      CopyRecords(tile, reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                  out.dim * sizeof(float));
    }
    for (size_t p = 0; p < parts.n; ++p) {
      const Part& part = parts.part[p];
      const bool initial = is_new && !part.slot;
      std::byte* const to = i < n ? part.outside + i * part.bytes : nullptr;
      const bool there = is_old && (attached || !part.slot);
      CopyRecords(tile, initial ? nullptr : to, there ? part.Of(v.in, at.row) : nullptr, part.bytes);
      if (!part.slot)
        v.initial.WriteRows(tile, at.key, initial ? v.before[first] : 0, initial ? to : nullptr);
    }
    if (i == 0 && out.used_step != nullptr)
      PutWords(out.used_step, static_cast<uint64_t>(v.call.control->step));
  });
}

/// Writes the parts back; `slots` says that there are slots, which are written with them.
template <class Q>
void WriteRows(Q& q, TargetsView rows, Parts parts, bool slots) {
  q.Tiles(rows.n, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const uint32_t row = rows.Row(i);
    const bool has = row != kNoRow;
    if (has && slots) rows.in.Header(row).has_slots = 1;
    for (size_t p = 0; p < parts.n; ++p) {
      const Part& part = parts.part[p];
      CopyRecords(tile, has ? part.Of(rows.in, row) : nullptr, has ? part.outside + i * part.bytes : nullptr,
                  part.bytes);
    }
  });
}

/// Rows of arrays that a chunk of a step is copied from or to: (n, bytes) `all`, of which (size, bytes)
/// `some` are from *start on.
struct ChunkPart {
  std::byte *all, *some;
  size_t bytes;
  uint8_t fill;  // what is beyond the end
};
struct ChunkParts {
  static constexpr size_t kMost = 8;
  ChunkPart part[kMost];
  size_t n;
};
/// active: how many rows the step has left; of those beyond nothing is copied.
template <class Q>
void CopyChunk(Q& q, ChunkParts parts, const int32_t* start, const int32_t* active, size_t n, size_t size,
               bool in) {
  q.Tiles(size, [=] KVJAX_HD(typename Q::Tile tile, size_t i) {
    const int64_t at = *start + static_cast<int64_t>(i);
    const bool there = i < size && at >= 0 && at < *active && static_cast<size_t>(at) < n;
    for (size_t p = 0; p < parts.n; ++p) {
      const ChunkPart& part = parts.part[p];
      std::byte* const all = there ? part.all + static_cast<size_t>(at) * part.bytes : nullptr;
      std::byte* const some = i < size ? part.some + i * part.bytes : nullptr;
      if (in) {
        CopyRecords(tile, all, there ? some : nullptr, part.bytes);
      } else {
        CopyRecords(tile, some, all, part.bytes, part.fill);
      }
    }
  });
}

}  // namespace kvjax::device
