// Admission: the rule by which training gives keys a row, to those that have come often enough, or that a
// hash chooses.
//
// A batch is decided from the counts before it and only then counted, so neither the order of its keys nor
// what else is in it changes a decision. And a gradient trains the row that it was taken at: where keys
// without a row read otherwise than as their initial row, they read as that from the moment that one more
// occurrence would admit them, and only then may a step admit them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax {

struct AdmissionSpec {
  enum class Kind { kEvery, kMinCount, kSketch, kProbability };
  /// What a key without a row reads as, and where its gradient goes: nowhere, or to the row of a shared key.
  enum class Unadmitted { kInitial, kZeros, kShared };

  Kind kind = Kind::kEvery;
  Unadmitted unadmitted = Unadmitted::kInitial;
  uint64_t shared_key = 0;
  uint32_t threshold = 1;   // occurrences, of which the last one admits
  uint32_t cells = 0;       // of a bucket of the sketch: 4 rows of a power of two
  int64_t halve_every = 0;  // steps, 0 for never
  double probability = 1.0;
  uint64_t seed = 0;

  /// Whether keys that are not admitted share a row.
  [[nodiscard]] KVJAX_HD bool shares() const {
    return kind != Kind::kEvery && unadmitted == Unadmitted::kShared;
  }

  /// Whether a key without a row gets one, which has occurred `total` times by now.
  [[nodiscard]] KVJAX_HD bool Admits(uint64_t key, uint32_t total) const {
    if (kind == Kind::kEvery) return true;
    if (shares() && key == shared_key) return true;
    if (kind != Kind::kProbability) return total >= threshold;
    return static_cast<double>(Mix(key + Mix(seed ^ 0xAD317A11ull)) >> 11) * 0x1p-53 < probability;
  }

  /// Whether a step gives a row to a key without one, which has occurred `seen` times before it, and `total`
  /// times with it.
  [[nodiscard]] KVJAX_HD bool Enters(uint64_t key, uint32_t seen, uint32_t total) const {
    return unadmitted == Unadmitted::kInitial ? Admits(key, total) : ReadsInitial(key, seen);
  }
  /// Whether such a key reads as its initial row, if the table decides.
  [[nodiscard]] KVJAX_HD bool ReadsInitial(uint64_t key, uint32_t seen) const {
    return unadmitted == Unadmitted::kInitial || Admits(key, Total(seen, 1));
  }

  /// How often the sketch is halved between two steps.
  [[nodiscard]] KVJAX_HD int Halvings(int64_t last_step, int64_t step) const {
    if (halve_every <= 0 || step <= last_step) return 0;
    const int64_t halvings = step / halve_every - last_step / halve_every;
    return halvings < 16 ? static_cast<int>(halvings) : 16;
  }

  /// All cells of a key lie in its virtual bucket's part of the sketch, so the sketch can be cut into shards.
  static constexpr int kRows = 4;
  [[nodiscard]] KVJAX_HD size_t Cell(uint64_t key, int row) const {
    const uint32_t width = cells / kRows;
    const uint64_t hash = Mix(Mix(key) ^ 0x5EEDull) >> (16 * row);
    return size_t{BucketOf(key)} * cells + static_cast<uint32_t>(row) * width + (hash & (width - 1));
  }

  /// An occurrence count, of which indexes can hold this much.
  [[nodiscard]] KVJAX_HD static uint32_t Total(uint32_t before, uint32_t occurrences) {
    const uint64_t total = uint64_t{before} + occurrences;
    return total < kNoRow ? static_cast<uint32_t>(total) : kNoRow - 1;
  }
};

/// What a checkpoint keeps of an admission: the counts of keys without a row, sorted by (bucket, key), or the
/// cells of the sketch (kNumBuckets, cells).
struct AdmissionState {
  std::vector<int64_t> keys;
  std::vector<int64_t> counts;
  std::vector<uint16_t> cells;
};

class Admission {
 public:
  explicit Admission(const AdmissionSpec& spec) : spec_(spec) {
    if (spec_.kind == AdmissionSpec::Kind::kSketch) cells_.resize(size_t{kNumBuckets} * spec_.cells);
  }

  [[nodiscard]] const AdmissionSpec& spec() const { return spec_; }
  [[nodiscard]] bool shares() const { return spec_.shares(); }
  /// Keys without a row that are counted one by one.
  [[nodiscard]] size_t tracked() const { return waiting_.size(); }
  [[nodiscard]] size_t bytes() const { return waiting_.bytes() + cells_.size() * sizeof(uint16_t); }

  /// For each of n distinct keys without a row: whether it gets one, and its occurrences, this batch's
  /// included.
  struct Decision {
    std::vector<uint8_t> admitted;
    std::vector<uint32_t> totals;
    int halvings = 0;
  };

  /// counts: (n,) occurrences in this batch. Changes nothing but the space for what Commit does.
  Decision Decide(const std::vector<uint64_t>& keys, const std::vector<uint32_t>& counts, int64_t last_step,
                  int64_t step) {
    Decision d{std::vector<uint8_t>(keys.size()), counts, spec_.Halvings(last_step, step)};
    size_t waiting = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      d.totals[i] = AdmissionSpec::Total(Count(keys[i], d.halvings), counts[i]);
      d.admitted[i] = spec_.Enters(keys[i], Count(keys[i]), d.totals[i]);
      waiting += d.admitted[i] == 0;
    }
    if (spec_.kind == AdmissionSpec::Kind::kMinCount) waiting_.Reserve(waiting_.size() + waiting);
    return d;
  }

  /// Counts the batch that was decided: the first keys of `keys`.
  void Commit(const std::vector<uint64_t>& keys, const Decision& d) noexcept {
    if (d.halvings > 0) {
      for (uint16_t& cell : cells_) cell = static_cast<uint16_t>(cell >> d.halvings);
    }
    for (size_t i = 0; i < d.admitted.size(); ++i) {
      switch (spec_.kind) {
        case AdmissionSpec::Kind::kMinCount:
          if (d.admitted[i]) {
            waiting_.Erase(keys[i]);
          } else if (uint32_t* count = waiting_.Locate(keys[i])) {
            *count = d.totals[i];
          } else {
            waiting_.Insert(keys[i], d.totals[i]);
          }
          break;
        case AdmissionSpec::Kind::kSketch: {
          // Conservative update: no cell rises above the estimate. Beyond the threshold nothing is decided.
          const auto total = static_cast<uint16_t>(std::min(d.totals[i], spec_.threshold));
          for (int row = 0; row < AdmissionSpec::kRows; ++row) {
            uint16_t& cell = cells_[spec_.Cell(keys[i], row)];
            cell = std::max(cell, total);
          }
          break;
        }
        default:
          break;
      }
    }
  }

  /// Gives memory back once few keys wait.
  void Compact() noexcept {
    if (8 * waiting_.size() < waiting_.capacity()) waiting_.Shrink(2 * waiting_.size());
  }

  /// The key has a row now that no training step gave it.
  void Forget(uint64_t key) noexcept { waiting_.Erase(key); }

  void Clear() noexcept {
    waiting_.Clear();
    std::fill(cells_.begin(), cells_.end(), uint16_t{0});
  }

  [[nodiscard]] AdmissionState Save() const {
    AdmissionState state;
    std::vector<std::pair<int64_t, uint32_t>> counts;
    counts.reserve(waiting_.size());
    waiting_.ForEach(
        [&](uint64_t key, uint32_t count) { counts.emplace_back(static_cast<int64_t>(key), count); });
    std::sort(counts.begin(), counts.end(), [](const auto& x, const auto& y) {
      return std::pair(BucketOf(static_cast<uint64_t>(x.first)), x.first) <
             std::pair(BucketOf(static_cast<uint64_t>(y.first)), y.first);
    });
    for (const auto& [key, count] : counts) state.keys.push_back(key), state.counts.push_back(count);
    state.cells = cells_;
    return state;
  }

  /// An admission of the same kind with the counts of `state`; what the kind does not keep is left out.
  [[nodiscard]] Admission With(const AdmissionState& state) const {
    Admission next(spec_);
    if (spec_.kind == AdmissionSpec::Kind::kMinCount) {
      next.waiting_.Reserve(state.keys.size());
      for (size_t i = 0; i < state.keys.size(); ++i) {
        const auto key = static_cast<uint64_t>(state.keys[i]);
        const auto count = static_cast<uint32_t>(std::clamp<int64_t>(state.counts[i], 0, kNoRow - 1));
        if (next.waiting_.Locate(key) == nullptr) next.waiting_.Insert(key, count);
      }
    }
    if (state.cells.size() == cells_.size()) next.cells_ = state.cells;
    return next;
  }

  /// Occurrences of a key without a row, as far as they are counted.
  [[nodiscard]] uint32_t Count(uint64_t key, int halvings = 0) const {
    if (spec_.kind == AdmissionSpec::Kind::kMinCount) {
      const uint32_t count = waiting_.Find(key);
      return count == kNoRow ? 0 : count;
    }
    if (spec_.kind != AdmissionSpec::Kind::kSketch) return 0;
    uint16_t least = UINT16_MAX;
    for (int row = 0; row < AdmissionSpec::kRows; ++row)
      least = std::min(least, cells_[spec_.Cell(key, row)]);
    return least >> halvings;
  }
  [[nodiscard]] bool ReadsInitial(uint64_t key) const { return spec_.ReadsInitial(key, Count(key)); }
  /// Whether a step changes what keys without a row read as that are not in it.
  [[nodiscard]] bool changes_others() const {
    return shares() || (spec_.kind == AdmissionSpec::Kind::kSketch &&
                        spec_.unadmitted != AdmissionSpec::Unadmitted::kInitial);
  }

 private:
  AdmissionSpec spec_;
  KeyIndex waiting_;  // occurrences instead of row ids
  std::vector<uint16_t> cells_;
};

}  // namespace kvjax
