// Counts of what a table has done since it was made. Reads count too, so repeated reads count repeatedly.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace kvjax {

struct Counters {
  // Readers run side by side, a writer is alone.
  std::atomic<uint64_t> hits = 0;
  std::atomic<uint64_t> misses = 0;

  uint64_t inserted = 0;
  uint64_t removed = 0;
  uint64_t admitted = 0;       // keys
  uint64_t refused = 0;        // occurrences whose gradient was dropped or went to the shared row
  uint64_t occurrences = 0;    // of keys in training
  uint64_t distinct = 0;       // keys a step, summed over steps
  uint64_t over_capacity = 0;  // rows that were made beyond max_capacity
  std::map<std::string, uint64_t, std::less<>> evicted;  // rows by reason
};

}  // namespace kvjax
