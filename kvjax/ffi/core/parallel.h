// ParallelFor: the interface by which tables ask for parallel work.
#pragma once
#include <cstddef>
#include <functional>

namespace kvjax {

/// Calls body(begin, end) over disjoint ranges that cover [0, n), each of about `grain` items or more, and
/// returns when all are done. The caller takes part, so it never waits for a thread that has not started.
using ParallelFor =
    std::function<void(size_t n, size_t grain, const std::function<void(size_t begin, size_t end)>& body)>;

/// Everything on the calling thread.
inline void Serial(size_t n, size_t /*grain*/, const std::function<void(size_t, size_t)>& body) {
  if (n > 0) body(0, n);
}

}  // namespace kvjax
