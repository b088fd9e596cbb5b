// The device table on a queue that does what it is asked for later, as a GPU does: the host must neither read
// what is not there yet, nor give back memory that is still to be used, nor let more rows come than there is
// room for.
#include <deque>
#include <functional>
#include <list>
#include <memory>

#include "tests/cpp/device.h"

namespace {

using data::Keys;
using device::Bytes;
using kvjax::TableSpec;
using kvjax::device::Threads;

/// All queues of this kind are one, which lags behind by up to `lag` tasks.
class Later : public Threads {
 public:
  static constexpr bool kSynchronous = false;
  static inline size_t lag = 0;

  Later() : Threads(1) {}
  static Later Alone() {
    Run(0);
    return {};
  }
  template <class F>
  void Each(size_t n, F f) {
    Ask([=] { Threads(1).Each(n, f); });
  }
  template <class F>
  void Tiles(size_t n, F f) {
    Ask([=] { Threads(1).Tiles(n, f); });
  }
  template <class F>
  void Once(F f) {
    Ask(f);
  }
  /// What comes from the host is read at once.
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    if (OnDevice(from)) return Ask([=] { std::memcpy(to, from, bytes); });
    const auto* const begin = static_cast<const std::byte*>(from);
    Ask([to, copy = Bytes(begin, begin + bytes)] { std::memcpy(to, copy.data(), copy.size()); });
  }
  void Fill(void* to, int byte, size_t bytes) {
    Ask([=] { Threads(1).Fill(to, byte, bytes); });
  }
  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
    Ask([=] { Threads(1).ExclusiveSum(in, out, n); });
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
    Ask([=] { Threads(1).SortPairs(keys, values, n, end_bit); });
  }
  static void* Allocate(size_t bytes) {
    void* const memory = Threads::Allocate(bytes);
    ranges[memory] = static_cast<std::byte*>(memory) + bytes;
    return memory;
  }
  static void Free(void* memory) noexcept {
    Ask([=] { FreeNow(memory); });
  }
  static void Release(void* memory) noexcept {
    Run(0);
    FreeNow(memory);
  }
  static void Wait() { Run(0); }
  template <class Known>
  static void WaitUntil(Known known) {
    while (!tasks.empty() && !known()) Run(tasks.size() - 1);
  }
  /// How often the device has had nothing to do.
  static inline size_t idle = 0;

 private:
  static void Ask(std::function<void()> task) {
    tasks.push_back(std::move(task));
    Run(lag);
  }
  /// Until no more than so many tasks are left.
  static void Run(size_t left) {
    while (tasks.size() > left) {
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      task();
      if (tasks.empty()) ++idle;
    }
  }
  static void FreeNow(void* memory) noexcept {
    ranges.erase(memory);
    Threads::Free(memory);
  }
  static bool OnDevice(const void* address) {
    auto it = ranges.upper_bound(address);
    return it != ranges.begin() && (--it)->second > address;
  }

  static inline std::deque<std::function<void()>> tasks;
  static inline std::map<const void*, const void*> ranges;
};

/// A table whose calls are asked for one after the other, each with the handle that the last one will have
/// made.
struct Chain {
  explicit Chain(const TableSpec& spec) : table(spec, 1), handle(Word()) {
    q.Copy(handle, &kFirst, sizeof(kFirst));
  }
  ~Chain() {
    q.Wait();
    for (void* word : words) q.Free(word);
  }

  template <class F>
  void Write(F f) {
    uint32_t* const next = Word();
    f(handle, next);
    handle = next;
  }
  uint32_t* Word() {
    words.push_back(static_cast<uint32_t*>(Later::Allocate(sizeof(uint32_t))));
    return words.back();
  }
  /// An operand, which lives as long as the calls that read it.
  template <class T>
  const T& Keep(T operand) {
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
  Later q;
  kvjax::device::DeviceTable<Later> table;
  std::vector<uint32_t*> words;
  uint32_t* handle;
  std::list<std::shared_ptr<void>> operands;
};

/// Writes that make rows come and go, the same on the CPU.
void Churn(const TableSpec& spec, uint64_t seed, int steps, uint64_t universe, size_t most, size_t reserve) {
  data::Live cpu(spec, std::make_shared<kvjax::HostSlabs>(), 1);
  Chain gpu(spec);
  auto& t = gpu.table;
  data::Stream stream(seed);
  const auto dim = static_cast<size_t>(spec.dim);
  const auto compare = [&] {
    const uint32_t live = gpu.Now();
    CHECK_EQ(live, cpu.version());
    CHECK(data::Same(t.Export(live, true), cpu.Copy()));
    const auto counted = device::Counted(t);
    CHECK(counted == device::Counted(cpu));
    size_t room = 0;
    for (const auto& [name, number] : t.Stats().numbers) {
      if (std::string(name) == "capacity") room = number;
    }
    CHECK(counted.at("size") <= room);
  };
  for (int step = 0; step < steps; ++step) {
    Later::lag = stream.Below(3) == 0 ? stream.Below(400) : 40;
    Keys batch;
    for (size_t i = stream.Below(most + 1); i > 0; --i) batch.push_back(1 + stream.Below(universe));
    const Keys& keys = gpu.Keep(batch);
    const uint32_t v = cpu.version();
    switch (stream.Below(12)) {
      case 0:
      case 1:
      case 2:
        cpu.Ensure(keys);
        gpu.Write([&](auto* by, auto* next) { t.Insert(gpu.q, by, data::Span(keys), nullptr, {}, next); });
        break;
      case 3:
      case 4:
        cpu.Drop(keys);
        gpu.Write([&](auto* by, auto* next) { t.Remove(gpu.q, by, data::Span(keys), nullptr, next); });
        break;
      case 5: {
        const auto& values = gpu.Keep(data::Floats(keys.size() * dim, static_cast<float>(step)));
        cpu.Put(keys, values);
        gpu.Write([&](auto* by, auto* next) {
          t.Upsert(gpu.q, by, data::Span(keys), nullptr, data::Bytes(values), next);
        });
        break;
      }
      case 6: {
        const auto& deltas = gpu.Keep(data::Floats(keys.size() * dim, 0.5f));
        cpu.Add(kvjax::Serial, v, data::Span(keys), deltas.data(), {});
        gpu.Write([&](auto* by, auto* next) {
          t.Add(gpu.q, by, data::Span(keys), nullptr, deltas.data(), {}, next);
        });
        break;
      }
      case 7: {
        const auto& rows = gpu.Keep(data::Floats(keys.size() * dim, 1.5f));
        const auto& exists = gpu.Keep(device::Mask(new bool[keys.size()]));
        for (size_t i = 0; i < keys.size(); ++i) exists[i] = stream.Below(2) == 0;
        cpu.Accum(kvjax::Serial, v, data::Span(keys), rows.data(), rows.data(), exists.get());
        gpu.Write([&](auto* by, auto* next) {
          t.Accum(gpu.q, by, data::Span(keys), nullptr, rows.data(), rows.data(), exists.get(), next);
        });
        break;
      }
      case 8:
        if (stream.Below(4) != 0) break;
        cpu.Evict("few\nleast_recent:9");
        gpu.Write([&](auto* by, auto* next) {
          const auto& at = gpu.Keep(int64_t{-1});
          t.Evict(gpu.q, "evict", by, kvjax::Policy::Parse("few\nleast_recent:9"),
                  reinterpret_cast<const uint32_t*>(&at), next);
        });
        break;
      case 9:
        if (stream.Below(6) != 0) break;
        cpu.Clear(v);
        gpu.Write([&](auto* by, auto* next) { t.Clear(gpu.q, by, next); });
        break;
      case 10:
        if (stream.Below(4) == 0) t.Reserve(gpu.Now(), stream.Below(reserve));
        break;
      default:
        if (stream.Below(4) == 0) compare();
    }
  }
  compare();
}

TEST(RoomIsEnoughHoweverFarTheDeviceIsBehind) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Churn(data::Spec(1), seed, 250, 60, 8, 60);        // about the smallest index, of room for 56
    Churn(data::Spec(1), seed, 150, 130, 30, 113);     // and the next one
    Churn(data::Spec(1), seed, 120, 100000, 60, 300);  // ever new keys
  }
}

TEST(TheHostStaysAheadOfKeysThatAreKnown) {
  Chain gpu(data::Spec(1));
  const Keys& keys = gpu.Keep(Keys{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  Later::lag = 10000;
  for (int step = 0; step < 30; ++step) {
    const size_t idle = Later::idle;
    gpu.Write(
        [&](auto* by, auto* next) { gpu.table.Insert(gpu.q, by, data::Span(keys), nullptr, {}, next); });
    if (step > 10) CHECK_EQ(Later::idle, idle);
  }
  CHECK_EQ(gpu.table.Size(gpu.Now()), 10u);
}

TEST(RowsOfManySlabs) {
  // Four rows to a slab: one row too many is beyond the memory.
  TableSpec spec = data::Spec(1 << 17);
  spec.initializer = {{kvjax::Initializer::Kind::kConstant, 0.25}};
  Churn(spec, 9, 60, 14, 4, 10);
}

TEST(TablesThatAreFullSettleFirst) {
  TableSpec spec = data::Spec(2);
  spec.max_capacity = 40;
  spec.on_full = kvjax::OnFull::kEvict;
  for (uint64_t seed = 1; seed <= 3; ++seed) Churn(spec, seed, 150, 90, 20, 60);
}

TEST(WhatFollowsARefusedWriteIsRefusedToo) {
  Chain gpu(data::Spec(1));
  auto& t = gpu.table;
  Later::lag = 100000;
  const Keys a = {1, 2}, b = {3, 4}, c = {5};
  const auto insert = [&](const Keys& keys) {
    gpu.Write([&](auto* by, auto* next) { t.Insert(gpu.q, by, data::Span(keys), nullptr, {}, next); });
  };
  uint32_t* const old = gpu.handle;
  insert(a);
  uint32_t* const live = gpu.handle;
  gpu.handle = old;
  insert(b);
  t.Remove(gpu.q, gpu.handle, data::Span(a), nullptr, gpu.Word());
  insert(c);
  CHECK_THROWS(kFailedPrecondition, gpu.Now());
  CHECK_EQ(*live, 2u);
  CHECK_EQ(*gpu.handle, 1u);  // as stale as what it was made from
  CHECK_EQ(t.Size(2), 2u);
  gpu.handle = live;
  insert(c);
  CHECK_EQ(t.Size(gpu.Now()), 3u);
}

}  // namespace
