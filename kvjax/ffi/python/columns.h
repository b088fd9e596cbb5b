// The columns of a snapshot, by the names under which Python gets and gives them.
#pragma once

namespace kvjax::column {

inline constexpr const char* kKeys = "keys";           // (n,) int64
inline constexpr const char* kValues = "values";       // (n, dim) of the table's dtype, as bytes
inline constexpr const char* kFrequencies = "freqs";   // (n,) int64
inline constexpr const char* kVersions = "versions";   // (n,) int64
inline constexpr const char* kHasSlots = "has_slots";  // (n,) one byte each
inline constexpr const char* kPinned = "pinned";       // (n,) one byte each
inline constexpr const char* kSlots = "slots";         // a list of (name, type, [bytes of one,] bytes of all)
inline constexpr const char* kOffsets = "offsets";  // (NUM_BUCKETS + 1,) int64, the first row of each bucket
inline constexpr const char* kLastStep = "last_step";            // int
inline constexpr const char* kPendingKeys = "pending_keys";      // (p,) int64, keys that wait for admission
inline constexpr const char* kPendingCounts = "pending_counts";  // (p,) int64
inline constexpr const char* kSketch = "sketch";                 // (NUM_BUCKETS * cells,) uint16

}  // namespace kvjax::column
