// Device memory: arrays that last, and scratch that is freed with its scope.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvjax/ffi/core/portable.h"

namespace kvjax::device {

/// The device's own, or the host's, pinned, which kernels reach under the same address.
enum class Memory : uint8_t { kDevice, kPinned };

/// What the device's own is for: to last, or for the time of a call.
enum class Use : uint8_t { kRows, kScratch };

/// The queue of the call that this thread is in, see order.h; nullptr outside of calls.
template <class Q>
struct Calling {
  static inline thread_local Q* queue = nullptr;
};

/// n elements that outlive the queue they were made on.
template <class Q, class T>
class Array {
 public:
  Array() = default;
  /// Throws std::bad_alloc.
  Array(Q& q, size_t n, Memory memory = Memory::kDevice, Use use = Use::kRows)
      : data_(static_cast<T*>(New(q, std::max<size_t>(n, 1) * sizeof(T), memory, use))),
        n_(n),
        memory_(memory) {}
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), n_(std::exchange(other.n_, 0)), memory_(other.memory_) {}
  Array& operator=(Array other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  /// Inside of a call as Retire. Outside of any, what has used the memory must be done.
  ~Array() {
    if (data_ == nullptr) return;
    if (Calling<Q>::queue != nullptr) {
      Retire(*Calling<Q>::queue);
    } else {
      memory_ == Memory::kDevice ? Q::Release(data_) : Q::FreeShared(data_);
    }
  }
  /// Gives the memory back once what is on the queue has been done. Pinned memory is given back by the host,
  /// which waits for that.
  void Retire(Q& q) noexcept {
    n_ = 0;
    if (data_ == nullptr) return;
    T* const data = std::exchange(data_, nullptr);
    if (memory_ == Memory::kDevice) return q.Free(data);
    q.Settle();
    Q::FreeShared(data);
  }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] size_t size() const { return n_; }
  [[nodiscard]] size_t bytes() const { return n_ * sizeof(T); }
  [[nodiscard]] Memory memory() const { return memory_; }

 private:
  static void* New(Q& q, size_t bytes, Memory memory, Use use) {
    return memory == Memory::kDevice ? q.Allocate(bytes, use) : Q::AllocateShared(bytes);
  }

  T* data_ = nullptr;
  size_t n_ = 0;
  Memory memory_ = Memory::kDevice;
};

/// n elements for the calls that follow on a queue, as long as the scope lasts.
template <class Q, class T>
class Scratch {
 public:
  /// For none it has no address.
  Scratch(Q& q, size_t n)
      : q_(q), array_(n > 0 ? Array<Q, T>(q, n, Memory::kDevice, Use::kScratch) : Array<Q, T>()) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { array_.Retire(q_); }

  [[nodiscard]] T* data() const { return array_.data(); }

 private:
  Q& q_;
  Array<Q, T> array_;
};

/// What the lanes that share a piece of memory have of it: as much each, and what all of them have of one
/// kind side by side.
struct LaneMemory {
  std::byte* begin;
  uint32_t lanes;  // that share it, whole tiles
  uint32_t lane;   // this one's number among them
};

/// How a queue shares memory out to the lanes of a kernel: so many lanes to a piece, and how many pieces of
/// scratch that takes, 0 where the processors have enough of their own.
struct Sharing {
  size_t lanes, pieces;
};
/// Such memory, as a queue needs to know of it.
struct TileMemoryView {
  size_t bytes;  // of each lane
  Sharing sharing;
  std::byte* scratch;
};

/// Memory for each lane of a kernel of tiles, for the calls that follow on a queue: that of the processors
/// themselves, where the queue has such and it is enough, or else scratch.
template <class Q>
class TileMemory {
 public:
  /// So many bytes for each of n lanes. Throws std::bad_alloc.
  TileMemory(Q& q, size_t bytes, size_t n)
      : bytes_((bytes + 7) / 8 * 8),
        sharing_(q.SharingOf(bytes_, n)),
        scratch_(q, sharing_.pieces * sharing_.lanes * bytes_) {}
  [[nodiscard]] TileMemoryView view() const { return {bytes_, sharing_, scratch_.data()}; }

 private:
  size_t bytes_;
  Sharing sharing_;
  Scratch<Q, std::byte> scratch_;
};

/// Words from the host that travel in the arguments of a kernel.
template <class T>
struct Handful {
  static constexpr size_t kMost = 2048 / sizeof(T);
  T words[kMost];
};
/// Writes n words. A copy of memory of the host may have to wait for it.
template <class Q, class T>
void WriteFromHost(Q& q, T* to, const T* from, size_t n) {
  using Some = Handful<T>;
  for (size_t begin = 0; begin < n; begin += Some::kMost) {
    const size_t m = std::min(Some::kMost, n - begin);
    Some some = {};
    std::copy_n(from + begin, m, some.words);
    T* const at = to + begin;
    q.Each(m, [=] KVJAX_HD(size_t i) { at[i] = some.words[i]; });
  }
}

/// n words, all the same.
template <class Q>
void FillWords(Q& q, uint32_t* out, size_t n, uint32_t word) {
  q.Each(n, [=] KVJAX_HD(size_t i) { out[i] = word; });
}

}  // namespace kvjax::device
