// The summary of a planned write that a shard sends to the others before any of them commits it.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvjax {

/// The summary of a write that a shard has planned, as words that travel.
struct ShardSummary {
  uint64_t failure = 0;                      // its number, or 0
  uint64_t size = 0, entering = 0;           // rows, and those to come
  uint64_t occurrences = 0;                  // of unadmitted keys whose gradients go to the shared row
  uint64_t lacks_shared = 0;                 // 1 if that row would be here, and has yet to be made
  std::vector<double> shared_gradient = {};  // (dim,) the sum of those gradients; empty without a shared row

  static constexpr size_t kWords = 5;  // and one for each of `shared_gradient`

  void Write(uint64_t* words, size_t n) const {
    words[0] = failure, words[1] = size, words[2] = entering, words[3] = occurrences;
    words[4] = lacks_shared;
    for (size_t d = 0; kWords + d < n; ++d) words[kWords + d] = std::bit_cast<uint64_t>(shared_gradient[d]);
  }
  static ShardSummary Read(const uint64_t* words, size_t n) {
    ShardSummary summary{words[0], words[1], words[2], words[3], words[4]};
    for (size_t i = kWords; i < n; ++i) summary.shared_gradient.push_back(std::bit_cast<double>(words[i]));
    return summary;
  }
};

}  // namespace kvjax
