// What a write is going to do, between the call that plans it and the one that does it.
//
// On a table of one part both are one call. The shards of a spread table first plan all, then agree, and only
// then do it: a shard that cannot do its part keeps the others from doing theirs.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/admit.h"
#include "kvjax/ffi/core/contents.h"
#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/core/recent.h"
#include "kvjax/ffi/core/slab.h"
#include "kvjax/ffi/core/spec.h"

namespace kvjax {

/// How far a call takes a write.
enum class Phase {
  kWhole,
  kPlan,
  kPropose,  // what room it takes is agreed with the other shards (sharded.h) before it counts as planned
  kCommit,
};

struct Call {
  Call(uint32_t by, Phase how_far = Phase::kWhole)
      : version(by), phase(how_far) {}  // NOLINT: a version will do
  uint32_t version;
  Phase phase;
};

/// Another write that has been planned, and what it takes to prepare it if it has only been proposed.
struct Planned {
  uint32_t version;
  Change change;
  std::string_view op = "";  // static
  std::vector<std::byte> initial = {};
  bool blank = true;
  std::optional<Policy> policy = std::nullopt;  // of an eviction by hand, which has no rows to come
  int64_t step = 0;
  bool ready = false;  // to be committed
};

/// A training write that has been planned.
struct ApplyPlan {
  SlotLayout layout;
  int64_t step = 0;
  bool attach = false;  // the slots
  Change change = {};
  Admission::Decision decision = {};
  bool pools = false;               // whether gradients of unadmitted keys go to the shared row
  std::vector<size_t> pool = {};    // those gradients, and that of the shared key itself
  std::vector<double> pooled = {};  // (dim,) their sum
  uint64_t occurrences = 0;         // of the unadmitted keys
  Recent recent = {};               // what will have changed
  bool ready = false;               // to be committed
};

/// One row of a step: the row and which gradient it gets; kPooled is the sum of the unadmitted keys'.
struct ApplyTarget {
  static constexpr uint32_t kPooled = 0xFFFFFFFFu;
  uint32_t row;
  uint32_t gradient;
};

/// Memory that is not set to zero and is kept for the next use.
template <class T>
class Scratch {
 public:
  T* Resize(size_t n) {
    if (n > room_) data_.reset(new T[n]), room_ = n;
    return data_.get();
  }
  [[nodiscard]] T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  size_t room_ = 0;
};

/// Gradients that arrive from other devices in several rounds. Those of equal keys are summed in the order of
/// the senders, whatever the rounds.
class Inbox {
 public:
  /// The gradients of distinct keys.
  struct Merged {
    size_t n = 0;
    const uint64_t* keys = nullptr;
    const int32_t* counts = nullptr;
    const float* rows = nullptr;
  };

  /// Forgets what has arrived.
  void Open(size_t senders) {
    letters_.assign(senders, {});
    given_.clear();
    given_rows_.clear();
    merged_ = {};
  }

  /// keys, counts: (senders, n); rows: (senders, n, dim); a count of 0 marks padding. `only` says that
  /// nothing else will come.
  void Add(const uint64_t* keys, const int32_t* counts, const float* rows, size_t n, size_t dim, bool only) {
    if (only) return Merge(keys, counts, rows, letters_.size() * n, dim);
    for (size_t s = 0; s < letters_.size(); ++s) {
      Letters& from = letters_[s];
      for (size_t i = s * n; i < (s + 1) * n; ++i) {
        if (counts[i] <= 0) continue;
        from.keys.push_back(keys[i]);
        from.counts.push_back(counts[i]);
        from.rows.insert(from.rows.end(), rows + i * dim, rows + (i + 1) * dim);
      }
    }
  }

  /// Remembers initial rows of keys that may turn out to be new.
  void Give(const std::vector<uint64_t>& keys, const std::byte* rows, size_t row_bytes) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!given_.emplace(keys[i], given_.size()).second) continue;
      given_rows_.insert(given_rows_.end(), rows + i * row_bytes, rows + (i + 1) * row_bytes);
    }
  }

  Merged Close(size_t dim) {
    if (merged_.keys != nullptr) return merged_;
    Letters all;
    for (Letters& from : letters_) {
      all.keys.insert(all.keys.end(), from.keys.begin(), from.keys.end());
      all.counts.insert(all.counts.end(), from.counts.begin(), from.counts.end());
      all.rows.insert(all.rows.end(), from.rows.begin(), from.rows.end());
      from = {};
    }
    Merge(all.keys.data(), all.counts.data(), all.rows.data(), all.keys.size(), dim);
    return merged_;
  }

  [[nodiscard]] const Merged& merged() const { return merged_; }

  /// The remembered rows of `keys`; keys that have none get zeros, which nobody will read.
  [[nodiscard]] std::vector<std::byte> Given(const std::vector<uint64_t>& keys, size_t row_bytes) const {
    std::vector<std::byte> rows(given_.empty() ? 0 : keys.size() * row_bytes);
    for (size_t i = 0; i * row_bytes < rows.size(); ++i) {
      const auto it = given_.find(keys[i]);
      if (it == given_.end()) continue;
      std::memcpy(rows.data() + i * row_bytes, given_rows_.data() + it->second * row_bytes, row_bytes);
    }
    return rows;
  }

 private:
  struct Letters {  // of one sender
    std::vector<uint64_t> keys;
    std::vector<int32_t> counts;
    std::vector<float> rows;
  };

  void Merge(const uint64_t* keys, const int32_t* counts, const float* rows, size_t n, size_t dim) {
    uint64_t* const out_keys = keys_.Resize(n + 1);  // + 1: never null
    int32_t* const out_counts = counts_.Resize(n);
    float* const out_rows = rows_.Resize(n * dim);
    merged_ = {MergeRows(keys, rows, counts, n, dim, out_keys, out_rows, out_counts), out_keys, out_counts,
               out_rows};
  }

  std::vector<Letters> letters_;
  std::unordered_map<uint64_t, size_t> given_;
  std::vector<std::byte> given_rows_;
  Scratch<uint64_t> keys_;
  Scratch<int32_t> counts_;
  Scratch<float> rows_;
  Merged merged_;
};

/// What a shard tells the others about a training write that it has planned, as words that travel.
struct ShardFacts {
  uint64_t failure = 0;             // its number, or 0
  uint64_t size = 0, entering = 0;  // rows, and those to come
  uint64_t occurrences = 0;         // of unadmitted keys whose gradients go to the shared row
  uint64_t lacks_shared = 0;        // 1 if that row would be here, and has yet to be made
  std::vector<double> pooled = {};  // (dim,) the sum of those gradients; empty without a shared row

  static constexpr size_t kWords = 5;  // and one for each of `pooled`

  void Write(uint64_t* words, size_t n) const {
    words[0] = failure, words[1] = size, words[2] = entering, words[3] = occurrences;
    words[4] = lacks_shared;
    for (size_t d = 0; kWords + d < n; ++d) words[kWords + d] = std::bit_cast<uint64_t>(pooled[d]);
  }
  static ShardFacts Read(const uint64_t* words, size_t n) {
    ShardFacts facts{words[0], words[1], words[2], words[3], words[4]};
    for (size_t i = kWords; i < n; ++i) facts.pooled.push_back(std::bit_cast<double>(words[i]));
    return facts;
  }
};

/// The training write that a shard is in the middle of.
struct ShardStep {
  uint32_t version = 0;
  Inbox inbox;
  std::optional<ApplyPlan> plan;
  std::vector<ApplyTarget> targets;
  std::vector<float> pooled;  // (dim,)
};

}  // namespace kvjax
