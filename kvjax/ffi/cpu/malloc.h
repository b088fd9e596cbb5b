// KeepBuffers: has malloc keep the memory of large arrays, instead of giving it back to the system after each
// call.
//
// XLA takes the results of a program from malloc. glibc maps blocks of 32 MiB and more anew each time, and
// unmaps them when they are freed, so every call pays for the page faults of its results: ten times what a
// lookup costs. The buffers of XLA's own operations are as large, so it does not help to choose the memory of
// ours.
//
// Threads beside the first one take memory from arenas of 64 MiB each. What is larger is mapped all the same,
// and what is freed stays with its arena, so memory that many threads would take is better mapped by its
// owner (checkpoint/_disk/direct.py). One arena for all (MALLOC_ARENA_MAX=1) ends both; it is left to the
// user, because all threads of the process would then wait for its lock.
#pragma once
#include <cstdlib>
#include <cstring>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace kvjax {

/// Not if KVJAX_KEEP_BUFFERS is 0, nor if the environment says how malloc shall do it. Returns whether it
/// has.
inline bool KeepBuffers() {
#if defined(__GLIBC__)
  constexpr int kLargest =
      1 << 30;  // bytes: larger blocks are still mapped, and given back when they are freed
  constexpr const char* kOwn[] = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_",
                                  "MALLOC_TOP_PAD_"};
  const char* const wish = std::getenv("KVJAX_KEEP_BUFFERS");
  if (wish != nullptr && std::strcmp(wish, "0") == 0) return false;
  for (const char* name : kOwn) {
    if (std::getenv(name) != nullptr) return false;
  }
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr) return false;
  return mallopt(M_MMAP_THRESHOLD, kLargest) == 1 && mallopt(M_TRIM_THRESHOLD, kLargest) == 1;
#else
  return false;
#endif
}

}  // namespace kvjax
