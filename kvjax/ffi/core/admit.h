// Admission: the rule by which training gives keys a row, to those that have come often enough, or that a
// hash chooses.
//
// Waiting keys are forgotten by windows: when one ends, those go that have not occurred in it. A window ends
// after so many steps, or when more keys would wait than may.
//
// A batch is decided from the counts before it and only then counted, so neither the order of its keys nor
// what else is in it changes a decision. And a gradient trains the row that it was taken at: where keys
// without a row read otherwise than as their initial row, they read as that from the moment that one more
// occurrence would admit them, and only then may a step admit them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/index.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/sorted.h"

namespace kvjax {

struct AdmissionSpec {
  enum class Kind { kEvery, kMinCount, kSketch, kProbability };
  /// What a key without a row reads as, and where its gradient goes: nowhere, or to the row of a shared key.
  enum class Unadmitted { kInitial, kZeros, kShared };

  Kind kind = Kind::kEvery;
  Unadmitted unadmitted = Unadmitted::kInitial;
  uint64_t shared_key = 0;
  uint32_t threshold = 1;    // occurrences, of which the last one admits
  uint32_t cells = 0;        // of a bucket of the sketch: 4 rows of a power of two
  int64_t halve_every = 0;   // steps, 0 for never
  int64_t max_age = 0;       // steps of a window, 0 for no end
  uint64_t max_waiting = 0;  // keys that may wait, 0 for no limit
  double probability = 1.0;
  uint64_t seed = 0;

  static Kind ParseKind(std::string_view text) {
    if (text == "min_count") return Kind::kMinCount;
    if (text == "sketch") return Kind::kSketch;
    if (text == "probability") return Kind::kProbability;
    throw AdmissionError(text);
  }
  static Unadmitted ParseUnadmitted(std::string_view text) {
    if (text == "init") return Unadmitted::kInitial;
    if (text == "zeros") return Unadmitted::kZeros;
    if (text == "shared") return Unadmitted::kShared;
    throw AdmissionError(text);
  }

  /// Whether there is something to admit.
  [[nodiscard]] KVJAX_HD bool decides() const { return kind != Kind::kEvery; }
  /// Whether keys without a row are counted one by one.
  [[nodiscard]] KVJAX_HD bool counts_keys() const { return kind == Kind::kMinCount; }
  /// Whether a sketch counts them.
  [[nodiscard]] KVJAX_HD bool sketches() const { return kind == Kind::kSketch; }
  /// Whether keys that are not admitted share a row.
  [[nodiscard]] KVJAX_HD bool shares() const { return decides() && unadmitted == Unadmitted::kShared; }

  /// Whether a key without a row gets one, which has occurred `total` times by now.
  [[nodiscard]] KVJAX_HD bool Admits(uint64_t key, uint32_t total) const {
    if (!decides()) return true;
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

  /// Whether waiting keys are forgotten. Their counts have the number of the window in which they last
  /// occurred in the two upper bits then: no key is older than the window before the current one.
  [[nodiscard]] KVJAX_HD bool forgets() const { return max_age > 0 || max_waiting > 0; }
  static constexpr uint32_t kWindow = 1u << 30;
  [[nodiscard]] KVJAX_HD uint32_t Word(uint32_t count, uint32_t window) const {
    const uint32_t most = kWindow - 2;  // so that no word is kNoRow
    return forgets() ? (count < most ? count : most) | window << 30 : count;
  }
  [[nodiscard]] KVJAX_HD uint32_t CountOf(uint32_t word) const { return forgets() ? word % kWindow : word; }
  [[nodiscard]] KVJAX_HD bool Stays(uint32_t word, uint32_t window) const {
    return !forgets() || ((window - word / kWindow) & 3u) <= 1;
  }
  /// The window after a step, to which `waiting` keys may wait, its own new ones included.
  [[nodiscard]] KVJAX_HD uint32_t WindowAfter(uint32_t window, int64_t last_step, int64_t step,
                                              uint64_t waiting) const {
    int64_t ends = max_age > 0 && step > last_step ? step / max_age - last_step / max_age : 0;
    if (ends == 0 && max_waiting > 0 && waiting > max_waiting) ends = 1;
    return (window + static_cast<uint32_t>(ends < 2 ? ends : 2)) & 3u;
  }
  /// A count as checkpoints have it: kWindow more for a key that has occurred in the current window.
  [[nodiscard]] int64_t Saved(uint32_t word, uint32_t window) const {
    return int64_t{CountOf(word)} + (forgets() && word / kWindow == (window & 3u) ? kWindow : 0);
  }
  /// The word of such a count, in window 0.
  [[nodiscard]] uint32_t Loaded(int64_t saved) const {
    const auto count = static_cast<uint32_t>(saved < 0 ? 0 : saved < kNoRow ? saved : kNoRow - 1);
    return Word(forgets() || count < 2 * kWindow ? count % kWindow : count, count / kWindow == 1 ? 0 : 3);
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
    if (spec_.sketches()) cells_.resize(size_t{kNumBuckets} * spec_.cells);
  }

  [[nodiscard]] const AdmissionSpec& spec() const { return spec_; }
  [[nodiscard]] bool shares() const { return spec_.shares(); }
  /// How many keys wait, that are counted one by one.
  [[nodiscard]] size_t tracked() const { return waiting_.size(); }
  [[nodiscard]] size_t bytes() const { return waiting_.bytes() + cells_.size() * sizeof(uint16_t); }

  /// For each of n distinct keys without a row: whether it gets one, and its occurrences, this batch's
  /// included.
  struct Decision {
    std::vector<uint8_t> admitted;
    std::vector<uint32_t> totals;
    int halvings = 0;
    uint32_t window = 0;
    std::vector<uint64_t> forgotten = {};
  };

  /// counts: (n,) occurrences in this batch. Changes nothing but the space for what Commit does.
  Decision Decide(const std::vector<uint64_t>& keys, const std::vector<uint32_t>& counts, int64_t last_step,
                  int64_t step) {
    Decision d{std::vector<uint8_t>(keys.size()), counts, spec_.Halvings(last_step, step)};
    d.window = spec_.WindowAfter(window_, last_step, step, waiting_.size() + keys.size());
    if (d.window != window_) {
      waiting_.ForEach([&](uint64_t key, uint32_t word) {
        if (!spec_.Stays(word, d.window)) d.forgotten.push_back(key);
      });
    }
    size_t waiting = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      d.totals[i] = AdmissionSpec::Total(Count(keys[i], d.halvings, d.window), counts[i]);
      d.admitted[i] = spec_.Enters(keys[i], Count(keys[i]), d.totals[i]);
      waiting += d.admitted[i] == 0;
    }
    if (spec_.counts_keys()) waiting_.Reserve(waiting_.size() + waiting);
    return d;
  }

  /// Whether a decision ends a window: then the counts of all keys that wait are saved as others.
  [[nodiscard]] bool EndsWindow(const Decision& d) const { return d.window != window_; }

  /// Counts the batch that was decided: the first keys of `keys`.
  void Commit(const std::vector<uint64_t>& keys, const Decision& d) noexcept {
    if (d.halvings > 0) {
      for (uint16_t& cell : cells_) cell = static_cast<uint16_t>(cell >> d.halvings);
    }
    for (const uint64_t key : d.forgotten) waiting_.Erase(key);
    window_ = d.window;
    for (size_t i = 0; i < d.admitted.size(); ++i) {
      if (spec_.counts_keys()) {
        if (d.admitted[i]) {
          waiting_.Erase(keys[i]);
        } else if (uint32_t* count = waiting_.Locate(keys[i])) {
          *count = spec_.Word(d.totals[i], window_);
        } else {
          waiting_.Insert(keys[i], spec_.Word(d.totals[i], window_));
        }
      } else if (spec_.sketches()) {
        // Conservative update: no cell rises above the estimate. Beyond the threshold nothing is decided.
        const auto total = static_cast<uint16_t>(std::min(d.totals[i], spec_.threshold));
        for (int row = 0; row < AdmissionSpec::kRows; ++row) {
          uint16_t& cell = cells_[spec_.Cell(keys[i], row)];
          cell = std::max(cell, total);
        }
      }
    }
  }

  /// Gives memory back once few keys wait.
  void Compact() noexcept {
    if (8 * waiting_.size() < waiting_.capacity()) waiting_.Shrink(2 * waiting_.size());
  }

  /// The key has a row now that no training step gave it, or is to be forgotten. Returns whether it was
  /// counted.
  bool Forget(uint64_t key) noexcept { return waiting_.Erase(key) != kNoRow; }

  void Clear() noexcept {
    waiting_.Clear();
    std::fill(cells_.begin(), cells_.end(), uint16_t{0});
  }

  /// What is known of some keys without a row, sorted by (bucket, key), and all cells.
  [[nodiscard]] AdmissionState Save(const std::vector<int64_t>& keys) const {
    AdmissionState state;
    for (const int64_t key : keys) {
      const uint32_t word = waiting_.Find(static_cast<uint64_t>(key));
      if (word != kNoRow) state.keys.push_back(key), state.counts.push_back(spec_.Saved(word, window_));
    }
    state.cells = cells_;
    return state;
  }
  [[nodiscard]] AdmissionState Save() const {
    AdmissionState state;
    std::vector<KeyRow> counts;  // and their words in the place of rows
    counts.reserve(waiting_.size());
    waiting_.ForEach([&](uint64_t key, uint32_t word) { counts.push_back({key, word}); });
    SortRows(counts);
    for (const KeyRow& c : counts) {
      state.keys.push_back(static_cast<int64_t>(c.key));
      state.counts.push_back(spec_.Saved(c.row, window_));
    }
    state.cells = cells_;
    return state;
  }

  /// An admission of the same kind with the counts of `state`; what the kind does not keep is left out.
  [[nodiscard]] Admission With(const AdmissionState& state) const {
    Admission next(spec_);
    if (spec_.counts_keys()) {
      next.waiting_.Reserve(state.keys.size());
      for (size_t i = 0; i < state.keys.size(); ++i) {
        const auto key = static_cast<uint64_t>(state.keys[i]);
        if (next.waiting_.Locate(key) == nullptr) next.waiting_.Insert(key, spec_.Loaded(state.counts[i]));
      }
    }
    if (state.cells.size() == cells_.size()) next.cells_ = state.cells;
    return next;
  }

  /// Occurrences of a key without a row, as far as they are counted.
  [[nodiscard]] uint32_t Count(uint64_t key) const { return Count(key, 0, window_); }
  [[nodiscard]] bool ReadsInitial(uint64_t key) const { return spec_.ReadsInitial(key, Count(key)); }
  /// Whether a step changes what keys without a row read as that are not in it.
  [[nodiscard]] bool changes_others() const {
    const bool alone = !spec_.sketches() && !spec_.forgets();
    return shares() || (!alone && spec_.unadmitted != AdmissionSpec::Unadmitted::kInitial);
  }

 private:
  /// The same after so many halvings, and in a window.
  [[nodiscard]] uint32_t Count(uint64_t key, int halvings, uint32_t window) const {
    if (spec_.counts_keys()) {
      const uint32_t word = waiting_.Find(key);
      return word == kNoRow || !spec_.Stays(word, window) ? 0 : spec_.CountOf(word);
    }
    if (!spec_.sketches()) return 0;
    uint16_t least = UINT16_MAX;
    for (int row = 0; row < AdmissionSpec::kRows; ++row)
      least = std::min(least, cells_[spec_.Cell(key, row)]);
    return least >> halvings;
  }

  AdmissionSpec spec_;
  KeyIndex waiting_;  // words of counts instead of row ids
  uint32_t window_ = 0;
  std::vector<uint16_t> cells_;
};

}  // namespace kvjax
