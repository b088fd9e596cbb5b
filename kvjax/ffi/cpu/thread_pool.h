// ParallelFor on XLA's own thread pool.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>

#include "xla/ffi/api/ffi.h"

namespace kvjax {

/// Cuts [0, n) into chunks that the caller and the pool's threads take one by one. The caller returns when
/// the last chunk is done; a task that the pool starts later finds none left and touches nothing of the
/// caller's. So a busy pool costs speed and can never block the call. What a chunk throws, the caller throws.
inline void RunOnPool(xla::ffi::ThreadPool& pool, size_t n, size_t grain,
                      const std::function<void(size_t, size_t)>& body) {
  const auto threads = static_cast<size_t>(std::max<int64_t>(pool.num_threads(), 1));
  const size_t chunks = std::min(n / grain, threads * 4);
  if (chunks < 2 || threads < 2) {
    if (n > 0) body(0, n);
    return;
  }
  struct Job {
    const std::function<void(size_t, size_t)>* body;
    size_t n, chunks;
    std::atomic<size_t> next{0}, done{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // the first that a chunk threw; read once all are done
    void Work() {
      for (size_t c; (c = next.fetch_add(1)) < chunks;) {
        try {
          (*body)(n* c / chunks, n * (c + 1) / chunks);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
        }
        if (done.fetch_add(1) + 1 == chunks) done.notify_one();
      }
    }
  };
  auto job = std::make_shared<Job>();
  job->body = &body;
  job->n = n;
  job->chunks = chunks;
  try {
    for (size_t t = 1; t < std::min(threads, chunks); ++t) pool.Schedule([job] { job->Work(); });
  } catch (const std::bad_alloc&) {
    // Fewer helpers: the caller does the rest.
  }
  job->Work();
  for (size_t done; (done = job->done.load()) < chunks;) job->done.wait(done);
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace kvjax
