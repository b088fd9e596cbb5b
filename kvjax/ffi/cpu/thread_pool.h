// ParallelFor on as many threads as XLA's own pool has.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/cpu/workers.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

inline void RunOnPool(const xla::ffi::ThreadPool& pool, size_t n, size_t grain,
                      const std::function<void(size_t, size_t)>& body) {
  Workers::Own().Run(static_cast<size_t>(std::max<int64_t>(pool.num_threads(), 1)), n, grain, body);
}

}  // namespace kvjax
