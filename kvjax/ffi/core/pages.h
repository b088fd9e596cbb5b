// Memory directly from the system, in huge pages on request.
//
// Rows and index entries are read at random, so what costs most in a large table is the walk through the page
// tables. A huge page covers 2 MiB with one entry of the TLB, and zeroing it takes one fault instead of 512.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvjax {

inline constexpr size_t kHugePage = size_t{1} << 21;

/// Bytes of a page of the system: 4 KiB, or 16 or 64 on some Arm processors. Where less is unmapped, or asked
/// about, the system refuses. Tests set it.
inline size_t& PageBytes() {
  static auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

/// Bytes of the pages that hold so many.
inline size_t InPages(size_t bytes, bool huge) {
  const size_t page = huge ? kHugePage : PageBytes();
  return (bytes + page - 1) / page * page;
}

/// `bytes` zeroed bytes, with `huge` aligned to a huge page and asked to be made of them (the system may
/// decline). Throws std::bad_alloc.
inline std::byte* MapPages(size_t bytes, bool huge) {
  const size_t spare = huge ? kHugePage : 0;
  if (bytes > SIZE_MAX - spare - PageBytes()) throw std::bad_alloc();
  bytes += -bytes & (PageBytes() - 1);  // or what is behind them could not be given back
  void* const map = mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  auto* const start = static_cast<std::byte*>(map);
  if (!huge) return start;
  // Untouched address space costs nothing, so a failure to trim it is none.
  const size_t before = -reinterpret_cast<uintptr_t>(start) & (kHugePage - 1);
  if (before > 0) munmap(start, before);
  munmap(start + before + bytes, spare - before);
  madvise(start + before, bytes, MADV_HUGEPAGE);
  return start + before;
}

inline void UnmapPages(std::byte* start, size_t bytes) noexcept {
  // Cutting a hole may need one mapping more than the system allows; the memory can be given back all the
  // same.
  if (munmap(start, bytes) != 0) madvise(start, bytes, MADV_DONTNEED);
}

/// Gives memory back and keeps its address space, which reads as zeros.
inline void GiveBackPages(std::byte* start, size_t bytes) noexcept { madvise(start, bytes, MADV_DONTNEED); }

/// Asks for huge pages where an array of somebody else's is about to be written, perhaps for the first time:
/// one fault in the place of 512.
inline void WantHugePages(std::byte* start, size_t bytes) noexcept {
  const size_t before = -reinterpret_cast<uintptr_t>(start) & (kHugePage - 1);
  if (bytes < before + 2 * kHugePage) return;
  madvise(start + before, (bytes - before) & ~(kHugePage - 1), MADV_HUGEPAGE);
}

/// For containers that may grow large: from 2 huge pages on their memory is made of them.
template <class T>
struct PageAllocator {
  using value_type = T;

  T* allocate(size_t n) {
    if (n > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    if (n * sizeof(T) < kFrom) return std::allocator<T>().allocate(n);
    return reinterpret_cast<T*>(MapPages(n * sizeof(T), true));
  }
  void deallocate(T* items, size_t n) noexcept {
    if (n * sizeof(T) < kFrom) return std::allocator<T>().deallocate(items, n);
    UnmapPages(reinterpret_cast<std::byte*>(items), n * sizeof(T));
  }
  bool operator==(const PageAllocator&) const = default;

 private:
  static constexpr size_t kFrom = 2 * kHugePage;
};

/// For arrays that each call makes anew, results first of all: malloc's, which keeps them for the next
/// (cpu/malloc.h), from the beginning of a cache line on.
template <class T>
struct ResultAllocator {
  using value_type = T;

  T* allocate(size_t n) {
    if (n > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    void* const items = ::operator new(n * sizeof(T), kLine);
    WantHugePages(static_cast<std::byte*>(items), n * sizeof(T));
    return static_cast<T*>(items);
  }
  void deallocate(T* items, size_t) noexcept { ::operator delete(items, kLine); }
  bool operator==(const ResultAllocator&) const = default;

 private:
  static constexpr std::align_val_t kLine{64};
};

/// For arrays whose maker writes every element: these begin without a value, so that the memory is first
/// touched by the thread that fills it.
template <class T, template <class> class From = PageAllocator>
struct UnfilledAllocator : From<T> {
  template <class U>
  struct rebind {
    using other = UnfilledAllocator<U, From>;
  };
  template <class U, class... Args>
  void construct(U* item, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(item)) U;
    } else {
      ::new (static_cast<void*>(item)) U(std::forward<Args>(args)...);
    }
  }
};
template <class T>
using Unfilled = std::vector<T, UnfilledAllocator<T>>;
template <class T>
using UnfilledResult = std::vector<T, UnfilledAllocator<T, ResultAllocator>>;

}  // namespace kvjax
