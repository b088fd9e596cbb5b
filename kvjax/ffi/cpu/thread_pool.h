// ParallelFor on XLA's own thread pool.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "kvjax/ffi/core/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

inline void RunOnPool(xla::ffi::ThreadPool& pool, size_t n, size_t grain,
                      const std::function<void(size_t, size_t)>& body) {
  const auto threads = static_cast<size_t>(std::max<int64_t>(pool.num_threads(), 1));
  Share(threads, [&](auto work) { pool.Schedule(std::move(work)); }, n, grain, body);
}

}  // namespace kvjax
