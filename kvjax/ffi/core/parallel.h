// ParallelFor: the interface by which tables ask for parallel work.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kvjax {

/// Tells the core that this thread waits for a word to change.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Calls body(begin, end) over disjoint ranges that cover [0, n), each of about `grain` items or more, and
/// returns when all are done. The caller takes part, so it never waits for a thread that has not started.
using ParallelFor =
    std::function<void(size_t n, size_t grain, const std::function<void(size_t begin, size_t end)>& body)>;

/// Everything on the calling thread.
inline void Serial(size_t n, size_t /*grain*/, const std::function<void(size_t, size_t)>& body) {
  if (n > 0) body(0, n);
}

/// Cuts [0, n) into chunks that the caller and up to threads - 1 helpers take one by one; schedule(work) has
/// a helper call work(). The caller returns when the last chunk is done; a helper that begins later finds
/// none left and touches nothing of the caller's. So helpers that are late cost speed and can never block the
/// call. What a chunk throws, the caller throws.
template <class Schedule>
void Share(size_t threads, Schedule schedule, size_t n, size_t grain,
           const std::function<void(size_t, size_t)>& body) {
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
  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>();
  } catch (const std::bad_alloc&) {  // then without helpers: some callers can fail no more
    return body(0, n);
  }
  job->body = &body;
  job->n = n;
  job->chunks = chunks;
  try {
    for (size_t t = 1; t < std::min(threads, chunks); ++t) schedule([job] { job->Work(); });
  } catch (const std::bad_alloc&) {
    // Fewer helpers: the caller does the rest.
  } catch (const std::system_error&) {
  }
  job->Work();
  // The last chunk of another is nearly done, and to be woken may take longer.
  constexpr size_t kPauses = 4000;  // about 0.1 ms
  for (size_t i = 0; i < kPauses && job->done.load() < chunks; ++i) Pause();
  for (size_t done; (done = job->done.load()) < chunks;) job->done.wait(done);
  if (job->error) std::rethrow_exception(job->error);
}

/// On threads that are made for the call, or fewer where the system gives none.
inline void OnNewThreads(size_t threads, size_t n, size_t grain,
                         const std::function<void(size_t, size_t)>& body) {
  std::vector<std::jthread> helpers;
  Share(threads, [&](auto work) { helpers.emplace_back(std::move(work)); }, n, grain, body);
}
/// As many as there are processors: for long calls from Python, which come without a pool of XLA's.
inline void OnThreads(size_t n, size_t grain, const std::function<void(size_t, size_t)>& body) {
  OnNewThreads(std::thread::hardware_concurrency(), n, grain, body);
}

}  // namespace kvjax
