// A queue whose tiles have eight lanes, as those of a GPU, and so the only way without one by which a lane
// sees what another has. The lanes take turns on one thread: each runs up to where all of them meet.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "kvjax/ffi/threads/threads.h"

namespace device {

class Lanes : public kvjax::device::Threads {
 public:
  static constexpr int kTile = 8;
  static Lanes Alone(int /*device*/ = 0) { return Lanes(); }

  /// Where the lanes meet. At every other meeting they use the same words: when a lane gets there, all others
  /// have read what it overwrites.
  struct Meeting {
    static constexpr size_t kStack = 1 << 18;
    struct Lane {
      ucontext_t context;
      std::unique_ptr<std::byte[]> stack{new std::byte[kStack]};
      uint64_t met = 0;
      bool done = false;
    };
    ucontext_t turns;
    Lane lanes[kTile];
    uint64_t words[2][kTile];
    void (*run)(void*, int);
    void* of;

    [[gnu::noinline]] void Prepare(Lane& lane, void (*begin)()) {
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.get();
      lane.context.uc_stack.ss_size = kStack;
      lane.context.uc_link = &turns;
      makecontext(&lane.context, begin, 0);
    }
    /// Runs run(of, lane) for all lanes.
    void Run() {
      static thread_local Meeting* meeting;
      static thread_local int who;
      meeting = this;
      const auto begin = [] {
        Lane& me = meeting->lanes[who];
        meeting->run(meeting->of, who);
        me.done = true;
      };
      for (Lane& lane : lanes) Prepare(lane, begin);
      for (int done = 0; done < kTile;) {
        done = 0;
        for (who = 0; who < kTile; ++who) {
          if (!lanes[who].done) swapcontext(&turns, &lanes[who].context);
          if (lanes[who].done) ++done;
        }
        if (done > 0 && done < kTile)
          throw std::logic_error("some lanes of a tile are done, and others wait");
      }
    }
    /// Gives a word to the others, and gets all.
    const uint64_t* Meet(int lane, uint64_t word) {
      Lane& me = lanes[lane];
      uint64_t* const all = words[me.met++ % 2];
      all[lane] = word;
      swapcontext(&me.context, &turns);
      return all;
    }
  };

  struct Tile {
    static constexpr int size() { return kTile; }
    [[nodiscard]] int rank() const { return lane; }
    template <class T>
    T Shuffle(T x, int from) const {
      static_assert(sizeof(T) <= sizeof(uint64_t));
      uint64_t word = 0;
      std::memcpy(&word, &x, sizeof(T));
      std::memcpy(&x, &meeting->Meet(lane, word)[from], sizeof(T));
      return x;
    }
    void Sync() const { meeting->Meet(lane, 0); }
    [[nodiscard]] int Count(bool yes) const {
      const uint64_t* const all = meeting->Meet(lane, yes ? 1 : 0);
      int sum = 0;
      for (int l = 0; l < kTile; ++l) sum += static_cast<int>(all[l]);
      return sum;
    }
    Meeting* meeting;
    int lane;
  };

  template <class F>
  void Tiles(size_t n, F f) {
    TilesOf(n, [&](Tile tile, size_t i) { f(tile, i); });
  }
  /// The lanes of the one tile that runs share it.
  static kvjax::device::Sharing SharingOf(size_t, size_t) { return {kTile, 1}; }
  static inline size_t most_bytes = SIZE_MAX;  // that keep it busy
  static bool KeepBusy(size_t, size_t bytes) { return bytes <= most_bytes; }
  template <class F>
  void Tiles(size_t n, kvjax::device::TileMemoryView memory, F f) {
    TilesOf(n, [&](Tile tile, size_t i) {
      f(tile, i, kvjax::device::LaneMemory{memory.scratch, kTile, static_cast<uint32_t>(tile.rank())});
    });
  }

 private:
  template <class F>
  void TilesOf(size_t n, F f) {
    const auto meeting = std::make_unique<Meeting>();
    struct Kernel {
      Meeting* meeting;
      F& f;
      size_t n;
    } kernel{meeting.get(), f, n};
    meeting->of = &kernel;
    meeting->run = [](void* of, int lane) {
      const auto& k = *static_cast<Kernel*>(of);
      for (size_t base = 0; base < k.n; base += kTile)
        k.f(Tile{k.meeting, lane}, base + static_cast<size_t>(lane));
    };
    meeting->Run();
  }
};

}  // namespace device
