// The secret of the process: what hash tables in memory mix into keys, so that nobody can choose keys that
// collide.
//
// The hash itself is part of the checkpoint format, and public. So whoever chooses ids could choose a hundred
// thousand that belong into one bucket, and every search among them would walk past them all. No result
// depends on the secret: only where keys stand in memory does.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdint>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/portable.h"

namespace kvjax {

/// Drawn when it is first asked for. Tests set it, before they make what takes it.
inline uint64_t& Secret() {
  static uint64_t secret = [] {
    uint64_t drawn = 0;
    if (getentropy(&drawn, sizeof(drawn)) == 0) return drawn;
    // A system without entropy: an address and the time are better than nothing.
    return Mix(reinterpret_cast<uintptr_t>(&drawn)) ^
           static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }();
  return secret;
}

/// The hash by which a table in memory places a key.
KVJAX_HD constexpr uint64_t PlaceHash(uint64_t key, uint64_t secret) { return Mix(key ^ secret); }

}  // namespace kvjax
