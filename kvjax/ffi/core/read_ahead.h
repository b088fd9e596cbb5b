// Pages of a file that a call is about to use: the disk is asked for all of them at once.
//
// A thread that touches a page which is not in memory waits for the disk, so a call would wait for one page
// after the other, where a disk answers many at the same time. But to ask for a page that is in memory costs
// more than to read a row of it. So nothing is asked before the process has waited for pages.
#pragma once
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvjax/ffi/core/pages.h"

namespace kvjax {

class ReadAhead {
 public:
  static constexpr size_t kFew = 16;  // rows, which are not worth a question

  /// Whether it is worth while to ask for the pages of the next `n` rows, of which start(i) is in the i-th;
  /// nullptr for none.
  template <class Start>
  [[nodiscard]] bool Worth(size_t n, Start start) {
    if (n < kFew) return false;
    const int64_t waits = Waits(), since = waits - waits_.exchange(waits);
    const size_t rows = rows_.exchange(n);
    if (!cold_ && since * kSeldom <= static_cast<int64_t>(rows)) return false;
    bool cold = false;
    for (size_t i = 0; i < n && !cold; i += n / kSamples + 1) {
      const std::byte* const at = start(i);
      cold = at != nullptr && !InMemory(at);
    }
    cold_ = cold;
    return cold;
  }

  /// Asks for these pages, which are addresses divided by PageBytes(), in any order.
  static void Ask(std::vector<uintptr_t> pages) noexcept {
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    // More would push out of memory what has just been read. The rest is waited for as it is used.
    const size_t page = PageBytes(), n = std::min(pages.size(), kMost / page),
                 run = std::max(kRun / page, size_t{1});
    for (size_t i = 0; i < n;) {
      const size_t first = i;
      while (++i < n && i - first < run && pages[i] == pages[i - 1] + 1) continue;
      madvise(reinterpret_cast<void*>(pages[first] * page), (i - first) * page, MADV_WILLNEED);
    }
  }

 private:
  static constexpr int64_t kSeldom = 64;  // rows for each page that was waited for
  static constexpr size_t kSamples = 64;
  static constexpr size_t kMost = size_t{1} << 29;  // bytes
  static constexpr size_t kRun = size_t{1}
                                 << 17;  // of one question: of more, Linux would read the first ones

  /// How often the process has waited for a page so far.
  static int64_t Waits() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
  }
  static bool InMemory(const std::byte* at) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(at) / PageBytes() * PageBytes();
    std::array<unsigned char, 1> in{1};
    return mincore(reinterpret_cast<void*>(page), PageBytes(), in.data()) != 0 || (in[0] & 1) != 0;
  }

  std::atomic<int64_t> waits_ = Waits();  // when Worth was asked last
  std::atomic<size_t> rows_ = 0;          // of which it was asked then
  std::atomic<bool> cold_ = false;        // what it has answered
};

}  // namespace kvjax
