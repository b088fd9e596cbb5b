// Allocations that fail: a program that includes this gets an operator new that counts them. One file of a
// program may.
#pragma once
#include <cstdlib>
#include <new>

namespace {

/// Counts allocations while armed. The one that brings the count to `fail_at` fails, and with `for_good` all
/// behind it too, as on a machine that is out of memory.
struct Faults {
  bool armed = false;
  bool for_good = false;
  int count = 0;
  int fail_at = 0;

  void Hit() {
    if (!armed) return;
    ++count;
    if (count == fail_at || (for_good && count > fail_at)) throw std::bad_alloc();
  }
} faults;

}  // namespace

// Not inlined, or GCC takes the pair of malloc and delete in its callers for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  faults.Hit();
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t align) {
  faults.Hit();
  void* p = nullptr;
  if (posix_memalign(&p, static_cast<size_t>(align), bytes > 0 ? bytes : 1) == 0) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
