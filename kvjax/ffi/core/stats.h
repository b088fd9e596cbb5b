// Counters of a table since it was made. Reads count too, so repeated reads count repeatedly.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace kvjax {

struct Counters {
  // Readers run side by side, a writer is alone.
  std::atomic<uint64_t> hits = 0;
  std::atomic<uint64_t> misses = 0;

  // Of a sharded table: what this device has sent, and the rounds it took; see Traffic.
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

/// What one call on a sharded table has moved: bytes that this device sends to others in each of its rounds,
/// and the rounds that a batch of such a size needs if its keys are evenly distributed.
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

/// All that is known of a table, by the names that Python reads; see Counters for what is counted.
struct Statistics {
  uint64_t size = 0;      // rows
  uint64_t capacity = 0;  // rows that fit before the key index grows
  uint64_t cells = 0;     // cells of the key index
  uint64_t index_bytes = 0;
  uint64_t value_bytes = 0;
  uint64_t header_bytes = 0;
  uint64_t slot_bytes = 0;
  uint64_t admission_bytes = 0;
  uint64_t pinned_bytes = 0;  // in pinned host memory, of a table in two memories; so the next two
  uint64_t pinned_rows = 0;
  uint64_t pinned_occurrences = 0;  // in training, of keys with such rows
  uint64_t row_occurrences = 0;     // in training, of all keys with rows
  uint64_t tracked = 0;             // keys without a row that are counted one by one
  uint64_t last_step = 0;
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t exchanged_keys = 0;
  uint64_t bytes_to_owners = 0;
  uint64_t bytes_from_owners = 0;
  uint64_t rounds = 0;
  uint64_t extra_rounds = 0;
  uint64_t inserted = 0;
  uint64_t removed = 0;
  uint64_t admitted = 0;
  uint64_t refused = 0;
  uint64_t occurrences = 0;
  uint64_t distinct = 0;
  uint64_t over_capacity = 0;
  std::map<std::string, uint64_t, std::less<>> evicted = {};  // rows by reason
  double probe_mean = 0;                                      // buckets or cells between a key and its home
  uint64_t probe_longest = 0;

  /// Takes over what both kinds of table count on the host.
  void SetTraffic(const Counters& counters) {
    exchanged_keys = counters.exchanged_keys;
    bytes_to_owners = counters.bytes_to_owners;
    bytes_from_owners = counters.bytes_from_owners;
    rounds = counters.rounds;
    extra_rounds = counters.extra_rounds;
  }
};

/// The one list of their names.
inline constexpr std::pair<const char*, uint64_t Statistics::*> kStatistics[] = {
    {"size", &Statistics::size},
    {"capacity", &Statistics::capacity},
    {"cells", &Statistics::cells},
    {"index_bytes", &Statistics::index_bytes},
    {"value_bytes", &Statistics::value_bytes},
    {"header_bytes", &Statistics::header_bytes},
    {"slot_bytes", &Statistics::slot_bytes},
    {"admission_bytes", &Statistics::admission_bytes},
    {"pinned_bytes", &Statistics::pinned_bytes},
    {"pinned_rows", &Statistics::pinned_rows},
    {"pinned_occurrences", &Statistics::pinned_occurrences},
    {"row_occurrences", &Statistics::row_occurrences},
    {"tracked", &Statistics::tracked},
    {"last_step", &Statistics::last_step},
    {"hits", &Statistics::hits},
    {"misses", &Statistics::misses},
    {"exchanged_keys", &Statistics::exchanged_keys},
    {"bytes_to_owners", &Statistics::bytes_to_owners},
    {"bytes_from_owners", &Statistics::bytes_from_owners},
    {"rounds", &Statistics::rounds},
    {"extra_rounds", &Statistics::extra_rounds},
    {"inserted", &Statistics::inserted},
    {"removed", &Statistics::removed},
    {"admitted", &Statistics::admitted},
    {"refused", &Statistics::refused},
    {"occurrences", &Statistics::occurrences},
    {"distinct", &Statistics::distinct},
    {"over_capacity", &Statistics::over_capacity},
};

}  // namespace kvjax
