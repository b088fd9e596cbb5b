// Queues that do what they are asked for later, as the streams of a GPU do: each in its order, and none in
// that of another, but for events.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cpp/support/device.h"

namespace later {

using device::Bytes;
using kvjax::device::Threads;

/// One of several streams, each of which lags behind by up to `lag` tasks.
class Later : public Threads {
 public:
  static constexpr bool kEveryDevice = false;
  static inline size_t lag = 0;
  static inline size_t asked = 0;  // tasks
  static inline size_t waits = 0;  // however short
  static inline size_t idle = 0;   // how often a stream has had nothing to do

  explicit Later(uint64_t stream = 1) : Threads(1), stream_(stream) {}
  Later(const Later&) = default;
  Later& operator=(const Later&) = default;
  /// What was done alone is done when the call returns.
  ~Later() {
    if (stream_ == kAlone) RunTo(stream_, lines[stream_].asked);
  }
  static Later Alone(int /*device*/ = 0) { return Later(kAlone); }

  struct Event {
    uint64_t stream = 0, number = 0;
    void Wait() const {
      ++waits;
      if (stream != 0) RunTo(stream, number);
    }
  };
  [[nodiscard]] uint64_t id() const { return stream_; }
  void Record(Event& event) const { event = {stream_, lines[stream_].asked}; }
  void WaitFor(const Event& event) const {
    if (event.stream == 0 || event.stream == stream_) return;
    Ask([event] { RunTo(event.stream, event.number); });
  }

  /// The last lane runs first: no kernel may rely on an order.
  template <class F>
  void Each(size_t n, F f) {
    Ask([=] { Threads(1).Each(n, [=](size_t i) { f(n - 1 - i); }); });
  }
  template <class F>
  void Tiles(size_t n, F f) {
    Ask([=] { Threads(1).Tiles(n, [=](Tile tile, size_t i) { f(tile, n - 1 - i); }); });
  }
  static kvjax::device::Sharing SharingOf(size_t, size_t) { return {1, 1}; }
  template <class F>
  void Tiles(size_t n, kvjax::device::TileMemoryView memory, F f) {
    Ask([=] { Threads(1).Tiles(n, memory, f); });
  }
  template <class F>
  void Once(F f) {
    Ask(f);
  }
  template <class Work>
  void CountBins(size_t most, Work work) {
    Ask([=] { Threads(1).CountBins(most, work); });
  }
  /// What comes from the host is read at once, for which a stream may have to wait.
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    if (OnDevice(from)) return Ask([=] { std::memcpy(to, from, bytes); });
    ++waits;
    const auto* const begin = static_cast<const std::byte*>(from);
    Ask([to, copy = Bytes(begin, begin + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
  }
  static inline bool fills = true;
  void Fill(void* to, int byte, size_t bytes) {
    if (!fills) throw std::bad_alloc();
    Ask([=] { Threads(1).Fill(to, byte, bytes); });
  }
  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
    Ask([=] { Threads(1).ExclusiveSum(in, out, n); });
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
    Ask([=] { Threads(1).SortPairs(keys, values, n, end_bit); });
  }
  static inline bool has_memory = true;  // for what lasts
  static void* Allocate(size_t bytes, kvjax::device::Use use = kvjax::device::Use::kRows) {
    if (!has_memory && use == kvjax::device::Use::kRows) throw std::bad_alloc();
    void* const memory = Threads::Allocate(bytes);
    ranges[memory] = static_cast<std::byte*>(memory) + bytes;
    return memory;
  }
  void Free(void* memory) const noexcept {
    Ask([=] { Release(memory); });
  }
  /// At once, whoever still wants to use it.
  static void Release(void* memory) noexcept {
    const auto it = ranges.find(memory);
    std::memset(memory, 0xDD,
                static_cast<size_t>(static_cast<const std::byte*>(it->second) -
                                    static_cast<const std::byte*>(it->first)));
    ranges.erase(it);
    Threads::Free(memory);
  }
  static void* AllocateShared(size_t bytes) { return Allocate(bytes); }
  static void FreeShared(void* memory) noexcept { Release(memory); }
  void Wait() const {
    ++waits;
    RunTo(stream_, lines[stream_].asked);
  }
  void Settle() const noexcept { Wait(); }
  bool Pause() const {
    ++waits;
    Line& line = lines[stream_];
    RunTo(stream_, line.done + 1);
    return !line.tasks.empty();
  }
  /// Something of the test's own, in the order of the stream.
  void Ask(std::function<void()> task) const {
    ++asked;
    Line& line = lines[stream_];
    line.tasks.push_back(std::move(task));
    ++line.asked;
    RunTo(stream_, line.asked - std::min<uint64_t>(lag, line.asked));
  }

 private:
  static constexpr uint64_t kAlone = 1 << 20;
  struct Line {
    std::deque<std::function<void()>> tasks;
    uint64_t asked = 0, done = 0;
  };
  /// Until so many of a stream's tasks are done.
  static void RunTo(uint64_t stream, uint64_t number) {
    Line& line = lines[stream];
    while (line.done < number && !line.tasks.empty()) {
      const auto task = std::move(line.tasks.front());
      line.tasks.pop_front();
      task();
      ++line.done;
      if (line.tasks.empty()) ++idle;
    }
  }
  static bool OnDevice(const void* address) {
    auto it = ranges.upper_bound(address);
    return it != ranges.begin() && (--it)->second > address;
  }

  uint64_t stream_;
  static inline std::map<uint64_t, Line> lines;
  static inline std::map<const void*, const void*> ranges;
};

/// A table whose calls are asked for one after the other, each with the handle that the last one will have
/// made.
template <class Q>
struct ChainOn {
  explicit ChainOn(const kvjax::TableSpec& spec, kvjax::device::Budget budget = {})
      : table(spec, 1, budget), handle(Word()) {
    q.Copy(handle, &kFirst, sizeof(kFirst));
  }
  ~ChainOn() {
    q.Wait();
    for (void* word : words) Later::Release(word);
  }

  template <class F>
  void Write(F f) {
    uint32_t* const next = Word();
    f(handle, next);
    handle = next;
  }
  uint32_t* Word() {
    words.push_back(static_cast<uint32_t*>(Later::Allocate(sizeof(uint32_t), kvjax::device::Use::kScratch)));
    return words.back();
  }
  /// An operand, which lives as long as the calls that read it.
  template <class T>
  T& Keep(T operand) {
    auto kept = std::make_shared<T>(std::move(operand));
    operands.push_back(kept);
    return *kept;
  }
  uint32_t Now() {
    q.Wait();
    operands.clear();
    table.Raise();
    return *handle;
  }

  static constexpr uint32_t kFirst = 1;
  Q q;
  kvjax::device::DeviceTable<Q> table;
  std::vector<uint32_t*> words;
  uint32_t* handle;
  std::list<std::shared_ptr<void>> operands;
};

using Chain = ChainOn<Later>;

}  // namespace later
