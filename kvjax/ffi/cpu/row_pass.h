// The row pass of a training write: every row of the step is counted and updated where it lies, once.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/copy.h"
#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/core/store.h"
#include "kvjax/ffi/cpu/program/machine.h"
#include "kvjax/ffi/cpu/row_workers.h"

namespace kvjax {

/// One row of a step: which gradient it gets, and how often its key occurred.
struct RowUpdate {
  uint32_t row;
  uint32_t gradient;  // or ApplyTarget::kSharedGradient
  uint64_t occurrences;
};

/// The gradients of a step: rows (n, dim), and which of them belong to each key; without groups, row i is
/// that of key i.
struct StepGradients {
  const uint64_t* keys = nullptr;  // distinct
  const float* rows = nullptr;
  const KeyGroups* groups = nullptr;
  const float* shared = nullptr;    // (dim,) that of the row that unadmitted keys share
  const int32_t* counts = nullptr;  // occurrences of each key
  uint64_t shared_count = 0;        // of all keys that share that row

  /// Those of a batch, as it came.
  static StepGradients Of(const KeyGroups& groups, const float* rows) {
    return {.keys = groups.keys().data(), .rows = rows, .groups = &groups, .counts = groups.counts().data()};
  }

  [[nodiscard]] uint64_t Occurrences(uint32_t gradient) const {
    return gradient == ApplyTarget::kSharedGradient ? shared_count : static_cast<uint64_t>(counts[gradient]);
  }

  /// That of a key which needs no sum, or nullptr.
  [[nodiscard]] const float* Single(uint32_t gradient, size_t dim) const {
    if (gradient == ApplyTarget::kSharedGradient) return shared;
    if (groups == nullptr) return rows + gradient * dim;
    const std::span<const uint32_t> which = groups->rows(gradient);
    return which.size() == 1 ? rows + which[0] * dim : nullptr;
  }
  /// Fetches where the rows of such a key are listed.
  [[gnu::always_inline]] void PrefetchList(uint32_t gradient) const {
    if (groups != nullptr && gradient != ApplyTarget::kSharedGradient) groups->Prefetch(gradient);
  }
  /// Fetches the first of them: the sum fetches the others.
  [[gnu::always_inline]] void PrefetchRows(uint32_t gradient, size_t dim) const {
    constexpr size_t kMost = 8;
    const std::span<const uint32_t> which = groups->rows(gradient);
    for (const uint32_t row : which.first(std::min(which.size(), kMost)))
      PrefetchRecord(reinterpret_cast<const std::byte*>(rows + row * dim), dim * sizeof(float));
  }

  template <class Sum>
  const float* SumOf(uint32_t gradient, size_t dim, float* memory, Sum sum) const {
    if (gradient == ApplyTarget::kSharedGradient) return shared;
    return groups == nullptr ? rows + gradient * dim
                             : SumRows(rows, groups->rows(gradient), dim, memory, sum);
  }
};

/// Takes what may fail when it is made; Run cannot.
class RowPass {
 public:
  /// `shared`: the program's shared registers, eight bytes each.
  RowPass(const TableSpec& spec, const Program& program, const SlotLayout& layout, const uint64_t* shared,
          int64_t step)
      : spec_(spec),
        shared_(static_cast<size_t>(program.shared)),
        batch_{shared_.data(), spec.initializer.seed, step},
        workers_(RowWorkers::Of(program, layout, spec.row_bytes())),
        has_slots_(!layout.empty()),
        wants_facts_(program.wants_facts()) {
    if (!shared_.empty()) std::memcpy(shared_.data(), shared, shared_.size() * sizeof(program::Cell));
  }

  /// The same bits for any number of threads: no row knows of another.
  void Run(const ParallelFor& parallel, RowStore& store, std::span<const RowUpdate> updates,
           const StepGradients& gradients) {
    const auto part = [&](size_t begin, size_t end) {
      std::unique_ptr<RowWorker> worker = workers_->Take();
      worker->machine.Begin(batch_);
      Work(*worker, store, updates.subspan(begin, end - begin), gradients);
      workers_->Give(std::move(worker));
    };
    parallel(updates.size(), kGrain, std::cref(part));  // by reference: a copy would need memory
  }

 private:
  static constexpr size_t kGrain = 256;  // rows: below this, waking a second thread costs more than it saves

  void Work(RowWorker& worker, RowStore& store, std::span<const RowUpdate> updates,
            const StepGradients& gradients) const {
    const auto rows = static_cast<size_t>(worker.machine.rows());
    const auto tile = [&](size_t begin) {
      begin = std::min(begin, updates.size());
      return updates.subspan(begin, std::min(rows, updates.size() - begin));
    };
    for (const RowUpdate& u : tile(0)) Announce(u, store, gradients);
    Fill(worker, 0, store, tile(0), tile(rows), gradients);
    for (size_t begin = 0, now = 0; begin < updates.size(); begin += rows, now ^= 1) {
      Fill(worker, now ^ 1, store, tile(begin + rows), tile(begin + 2 * rows), gradients);
      Sum(worker, now, gradients);
      worker.machine.Run(now);
    }
  }

  [[gnu::always_inline]] static void Announce(const RowUpdate& u, const RowStore& store,
                                              const StepGradients& gradients) {
    store.PrefetchHeader(u.row);
    gradients.PrefetchList(u.gradient);
  }

  /// Finds the parts of a tile's rows and counts them; `next` will come after them.
  void Fill(RowWorker& worker, size_t number, RowStore& store, std::span<const RowUpdate> updates,
            std::span<const RowUpdate> next, const StepGradients& gradients) const {
    program::Tile& tile = worker.machine.tile(number);
    tile.Clear(), worker.repeated[number].clear();
    const auto dim = static_cast<size_t>(spec_.dim);
    for (const RowUpdate& u : next) Announce(u, store, gradients);
    for (size_t i = 0; i < updates.size(); ++i) {
      const RowUpdate& u = updates[i];
      const RowHeader header = store.Header(u.row);
      const bool fresh = has_slots_ && header.has_slots == 0;
      if (fresh) store.MarkSlots(u.row);
      const uint64_t* const key = u.gradient == ApplyTarget::kSharedGradient ? &spec_.admission.shared_key
                                                                             : gradients.keys + u.gradient;
      RowFacts* const facts = wants_facts_ ? &worker.facts[number][i] : nullptr;
      if (wants_facts_)
        *facts = FactsOf(header, gradients.Occurrences(u.gradient), u.occurrences, batch_.step, *key);
      store.Count(u.row, u.occurrences, batch_.step);
      const float* gradient = gradients.Single(u.gradient, dim);
      if (gradient == nullptr) {
        gradients.PrefetchRows(u.gradient, dim);
        float* const sum = worker.sums[number].data() + i * 2 * dim;
        worker.repeated[number].push_back({u.gradient, sum});
        gradient = sum;
      }
      tile.Add({store.Value(u.row), store.Slots(u.row), gradient, key, fresh, facts});
    }
  }

  /// Sums the gradients of the keys that occur several times, which have been fetched by now.
  void Sum(RowWorker& worker, size_t number, const StepGradients& gradients) const {
    for (const RowWorker::Repeated& some : worker.repeated[number])
      gradients.SumOf(some.gradient, static_cast<size_t>(spec_.dim), some.sum, worker.machine.sum());
  }

  const TableSpec& spec_;
  std::vector<program::Cell> shared_;
  program::Batch batch_;
  std::shared_ptr<RowWorkers> workers_;
  bool has_slots_, wants_facts_;
};

}  // namespace kvjax
