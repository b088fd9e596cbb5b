// An operator new to be loaded before others (LD_PRELOAD), which fails where failing.py says.
#include <execinfo.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

struct Range {
  uintptr_t begin = 0, end = 0;
  bool Has(const void* at) const {
    const auto address = reinterpret_cast<uintptr_t>(at);
    return begin <= address && address < end;
  }
};
Range ranges[3];
const Range &own = ranges[0], &counted = ranges[1], &between = ranges[2];
std::atomic<long> count{0}, fail_at{0};
std::atomic<bool> armed{false}, for_good{false};

bool Counts() {
  void* frames[12];
  const int n = backtrace(frames, 12);
  for (int i = 0; i < n; ++i) {
    if (counted.Has(frames[i])) return true;
    if (!between.Has(frames[i]) && !own.Has(frames[i])) return false;
  }
  return false;
}

void* Get(size_t bytes, size_t align) {
  if (armed.load() && Counts()) {
    const long now = ++count;
    if (now == fail_at || (for_good && now > fail_at)) return nullptr;
  }
  if (bytes == 0) bytes = 1;
  return align == 0 ? std::malloc(bytes) : std::aligned_alloc(align, (bytes + align - 1) / align * align);
}
void* Must(size_t bytes, size_t align) {
  if (void* p = Get(bytes, align)) return p;
  throw std::bad_alloc();
}

}  // namespace

extern "C" {
/// Where this library is (0), the one whose allocations count (1), and libstdc++, which makes some for it
/// (2).
void failing_of(int which, size_t begin, size_t end) {
  ranges[which] = {begin, end};
  void* frame;
  backtrace(&frame, 1);  // which takes memory when it is first called
}
void failing_arm(long at, int all_behind) {
  count = 0, fail_at = at, for_good = all_behind != 0, armed = true;
}
long failing_disarm() {
  armed = false;
  return count;
}
}

void* operator new(size_t n) { return Must(n, 0); }
void* operator new[](size_t n) { return Must(n, 0); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return Get(n, 0); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept { return Get(n, 0); }
void* operator new(size_t n, std::align_val_t a) { return Must(n, static_cast<size_t>(a)); }
void* operator new[](size_t n, std::align_val_t a) { return Must(n, static_cast<size_t>(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }
