// Counts of what a table has done since it was made. Reads count too, so repeated reads count repeatedly.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvjax {

struct Counters {
  // Readers run side by side, a writer is alone.
  std::atomic<uint64_t> hits = 0;
  std::atomic<uint64_t> misses = 0;

  // Of a spread table: what this device has sent, and the rounds it took; see Traffic.
  std::atomic<uint64_t> exchanged_keys = 0;
  std::atomic<uint64_t> bytes_to_owners = 0;
  std::atomic<uint64_t> bytes_from_owners = 0;
  std::atomic<uint64_t> rounds = 0;
  std::atomic<uint64_t> extra_rounds = 0;

  uint64_t inserted = 0;
  uint64_t removed = 0;
  uint64_t admitted = 0;       // keys
  uint64_t refused = 0;        // occurrences whose gradient was dropped or went to the shared row
  uint64_t occurrences = 0;    // of keys in training
  uint64_t distinct = 0;       // keys a step, summed over steps
  uint64_t over_capacity = 0;  // rows that were made beyond max_capacity
  std::map<std::string, uint64_t, std::less<>> evicted;  // rows by reason
};

/// What one call on a spread table has moved: bytes that this device sends to others in each of its rounds,
/// and the rounds that a batch of such a size needs if its keys are evenly spread.
struct Traffic {
  uint64_t keys = 0;
  uint64_t rounds = 0;
  uint64_t usual_rounds = 0;
  uint64_t to_owners = 0;
  uint64_t from_owners = 0;

  void AddTo(Counters& counters) const {
    counters.exchanged_keys += keys;
    counters.bytes_to_owners += rounds * to_owners;
    counters.bytes_from_owners += rounds * from_owners;
    counters.rounds += rounds;
    counters.extra_rounds += rounds > usual_rounds ? rounds - usual_rounds : 0;
  }
};

/// All that is said of a table, by the names that Python reads (kvjax._stats).
struct Statistics {
  std::vector<std::pair<const char*, uint64_t>> numbers;
  std::map<std::string, uint64_t, std::less<>> evicted;
  double probe_mean = 0;
  uint64_t probe_longest = 0;
};

}  // namespace kvjax
