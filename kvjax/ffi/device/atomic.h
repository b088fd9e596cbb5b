// Atomic access to words that many lanes write: the same source for the device and for host threads.
#pragma once
#include <atomic>
#include <cstdint>

#include "kvjax/ffi/core/portable.h"

#ifdef __CUDACC__
#include <cuda/atomic>
#endif

namespace kvjax::device {

// Kernels follow one another on a queue, which orders what they write; within one, nothing but the words
// themselves is handed from lane to lane, so relaxed order is enough everywhere.
#ifdef __CUDACC__
template <class T>
using Atomic = cuda::atomic_ref<T, cuda::thread_scope_device>;
inline constexpr auto kRelaxed = cuda::memory_order_relaxed;
#else
template <class T>
using Atomic = std::atomic_ref<T>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
#endif

template <class T>
KVJAX_HD T Load(T& word) {
  return Atomic<T>(word).load(kRelaxed);
}
template <class T>
KVJAX_HD void Store(T& word, T value) {
  Atomic<T>(word).store(value, kRelaxed);
}
/// Returns what was there before.
template <class T>
KVJAX_HD T Add(T& word, T amount) {
  return Atomic<T>(word).fetch_add(amount, kRelaxed);
}
template <class T>
KVJAX_HD void SetBits(T& word, T bits) {
  Atomic<T>(word).fetch_or(bits, kRelaxed);
}
/// Puts `desired` where `expected` was; sets `expected` to what was found otherwise.
template <class T>
KVJAX_HD bool Exchange(T& word, T& expected, T desired) {
  return Atomic<T>(word).compare_exchange_strong(expected, desired, kRelaxed, kRelaxed);
}
/// No lane waits for another where one has been before that had as low a value.
template <class T>
KVJAX_HD void Lower(T& word, T value) {
#ifdef __CUDACC__
  if (value < Load(word)) Atomic<T>(word).fetch_min(value, kRelaxed);
#else
  for (T seen = Load(word); value < seen && !Exchange(word, seen, value);) {
  }
#endif
}
template <class T>
KVJAX_HD void Raise(T& word, T value) {
#ifdef __CUDACC__
  if (Load(word) < value) Atomic<T>(word).fetch_max(value, kRelaxed);
#else
  for (T seen = Load(word); seen < value && !Exchange(word, seen, value);) {
  }
#endif
}

#ifndef KVJAX_ON_BUS
#define KVJAX_ON_BUS()  // tests count what kernels do with words for the host
#endif

/// Between two words for the host: whoever sees the second sees what was written before it.
KVJAX_HD inline void FenceForHost() {
#ifdef __CUDA_ARCH__
  __threadfence_system();
#endif
}
/// Writes a word that the host reads while the device continues. On host threads each is a fence of its own,
/// because ThreadSanitizer knows no others.
template <class T>
KVJAX_HD void StoreForHost(T& word, T value) {
  KVJAX_ON_BUS();
#ifdef __CUDA_ARCH__
  cuda::atomic_ref<T, cuda::thread_scope_system>(word).store(value, cuda::memory_order_relaxed);
#else
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
#endif
}
/// The host's side of it.
template <class T>
T LoadFromDevice(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_acquire);
}

}  // namespace kvjax::device
