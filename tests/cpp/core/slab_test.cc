// Plane: records of fixed size at addresses that never change.
#include "kvjax/ffi/core/slab.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace core_slab {

using kvjax::HostSlabs;
using kvjax::Plane;

/// Remembers which slabs are out, and gives out at most `limit`.
class CountingSlabs final : public kvjax::SlabAllocator {
 public:
  explicit CountingSlabs(size_t limit = SIZE_MAX) : limit_(limit) {}
  ~CountingSlabs() override { CHECK(live_.empty()); }

  std::byte* Allocate(size_t bytes) override {
    if (live_.size() == limit_) throw std::bad_alloc();
    std::byte* slab = host_.Allocate(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(slab) % kvjax::PageBytes(), 0u);
    CHECK(live_.emplace(slab, bytes).second);
    return slab;
  }
  void Free(std::byte* slab, size_t bytes) noexcept override {
    const auto found = live_.find(slab);
    CHECK(found != live_.end());  // freed once
    CHECK_EQ(found->second, bytes);
    live_.erase(found);
    host_.Free(slab, bytes);
  }

  [[nodiscard]] size_t live() const { return live_.size(); }
  [[nodiscard]] size_t live_bytes() const {
    size_t sum = 0;
    for (const auto& [slab, bytes] : live_) sum += bytes;
    return sum;
  }

 private:
  HostSlabs host_;
  size_t limit_;
  std::map<std::byte*, size_t> live_;
};

bool IsZero(const std::byte* record, size_t bytes) {
  return std::all_of(record, record + bytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST(RecordsAreZeroedDisjointAndNeverMove) {
  constexpr size_t kMega = size_t{1} << 20;
  for (size_t stride : {size_t{4}, size_t{8}, size_t{12}, size_t{260}, size_t{4096}, size_t{10'000},
                        4 * size_t{16384}, 2 * kMega, 2 * kMega + 4, 3 * kMega}) {
    const auto slabs = std::make_shared<CountingSlabs>();
    Plane plane(slabs, stride);
    CHECK_EQ(plane.stride(), stride);
    CHECK_EQ(plane.bytes(), 0u);
    const auto rows = static_cast<uint32_t>(std::max<size_t>(5 * kMega / stride, 7));  // several slabs
    std::vector<std::byte*> at;
    for (uint32_t row = 0; row < rows; ++row) {
      plane.Reserve(row + 1);
      at.push_back(plane.At(row));
      // The ends of a record show whether it overlaps another or leaves its slab.
      CHECK(IsZero(at[row], 4) && IsZero(at[row] + stride - 4, 4));
      std::memcpy(at[row], &row, 4);
      std::memcpy(at[row] + stride - 4, &row, 4);
    }
    for (uint32_t row = 0; row < rows; ++row) {
      CHECK_EQ(plane.At(row), at[row]);
      CHECK_EQ(std::memcmp(at[row], &row, 4), 0);
      CHECK_EQ(std::memcmp(at[row] + stride - 4, &row, 4), 0);
      plane.Prefetch(row);
    }
    CHECK_EQ(plane.bytes(), slabs->live_bytes());
    CHECK(plane.bytes() >= rows * stride);
    if (stride <= kMega / 16) CHECK(plane.bytes() <= rows * stride * 33 / 32 + 2 * kMega);
  }
}

/// Gives out addresses that nobody may touch.
class NumberedSlabs final : public kvjax::SlabAllocator {
 public:
  std::byte* Allocate(size_t) override { return reinterpret_cast<std::byte*>(++count_ << 24); }
  void Free(std::byte*, size_t) noexcept override {}

 private:
  uintptr_t count_ = 0;
};

TEST(EveryRowIdHasItsPlace) {
  data::Stream random(1);
  for (size_t stride :
       {size_t{4}, size_t{12}, size_t{24}, size_t{516}, size_t{8196}, size_t{700'000}, size_t{1} << 21}) {
    const size_t per_slab = (size_t{1} << 21) / stride;
    const uint64_t rows = std::min<uint64_t>(0xFFFFFFFF, per_slab << 20);
    Plane plane(std::make_shared<NumberedSlabs>(), stride);
    plane.Reserve(rows);
    const auto check = [&](uint64_t row) {
      const uintptr_t want = ((row / per_slab + 1) << 24) + row % per_slab * stride;
      CHECK_EQ(reinterpret_cast<uintptr_t>(plane.At(static_cast<uint32_t>(row))), want);
    };
    for (int i = 0; i < 20'000; ++i) {
      check(random.Below(rows));
      const uint64_t first = random.Below(rows) / per_slab * per_slab;  // of a slab
      check(first);
      if (first > 0) check(first - 1);
    }
    check(rows - 1);
  }
}

TEST(RecordsBetweenTheEndsAreZeroToo) {
  Plane plane(std::make_shared<HostSlabs>(), 10'000);
  plane.Reserve(300);
  for (uint32_t row = 0; row < 300; ++row) CHECK(IsZero(plane.At(row), 10'000));
}

TEST(StrideZeroHoldsNothing) {
  const auto slabs = std::make_shared<CountingSlabs>();
  Plane plane(slabs, 0);
  plane.Reserve(1'000'000);
  CHECK_EQ(plane.bytes(), 0u);
  CHECK_EQ(slabs->live(), 0u);
}

TEST(ReserveTakesOnlyWhatItNeeds) {
  const auto slabs = std::make_shared<CountingSlabs>();
  Plane plane(slabs, 4096);  // 512 records to a slab
  plane.Reserve(0);
  CHECK_EQ(slabs->live(), 0u);
  plane.Reserve(1);
  plane.Reserve(512);
  CHECK_EQ(slabs->live(), 1u);
  plane.Reserve(513);
  CHECK_EQ(slabs->live(), 2u);
  plane.Reserve(5);
  CHECK_EQ(slabs->live(), 2u);
  plane.Reserve(512 * 9);
  CHECK_EQ(slabs->live(), 9u);
}

TEST(ShrinkFreesWhatIsBeyond) {
  const auto slabs = std::make_shared<CountingSlabs>();
  Plane plane(slabs, 4096);  // 512 records to a slab
  plane.Reserve(512 * 9);
  plane.Shrink(SIZE_MAX);
  CHECK_EQ(slabs->live(), 9u);
  plane.Shrink(512 * 7 + 1);
  CHECK_EQ(slabs->live(), 8u);
  plane.Shrink(512 * 7);
  CHECK_EQ(slabs->live(), 7u);
  plane.Shrink(1);
  CHECK_EQ(slabs->live(), 1u);
  plane.Shrink(0);
  CHECK_EQ(slabs->live(), 0u);
  Plane nothing(slabs, 0);
  nothing.Shrink(0);
}

TEST(HugePagesComeOnceATableIsLarge) {
  constexpr size_t kSlab = size_t{1} << 21;
  kvjax::HostSlabs slabs(4 * kSlab);
  std::vector<std::byte*> live;
  for (int i = 0; i < 12; ++i) live.push_back(slabs.Allocate(kSlab));
  for (size_t i = 4; i < live.size(); ++i) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(live[i]) % kSlab, 0u);
    CHECK(IsZero(live[i], kSlab));
    std::memset(live[i], static_cast<int>(i), kSlab);
  }
  for (size_t i = 4; i < live.size(); ++i) CHECK(live[i][kSlab - 1] == static_cast<std::byte>(i));
  for (std::byte* slab : live) slabs.Free(slab, kSlab);
}

TEST(SlabsThatWillBeFullAreSaidToBe) {
  class Listing final : public kvjax::SlabAllocator {
   public:
    std::byte* Allocate(size_t bytes) override { return Add(false, host.Allocate(bytes)); }
    std::byte* AllocateFull(size_t bytes) override { return Add(true, host.AllocateFull(bytes)); }
    void Free(std::byte* slab, size_t bytes) noexcept override { host.Free(slab, bytes); }
    std::byte* Add(bool is_full, std::byte* slab) {
      full.push_back(is_full);
      CHECK(!is_full || reinterpret_cast<uintptr_t>(slab) % kvjax::kHugePage == 0);
      return slab;
    }
    HostSlabs host;
    std::vector<bool> full;
  };
  const auto slabs = std::make_shared<Listing>();
  Plane plane(slabs, 4096);  // 512 to a slab
  plane.Reserve(600);
  plane.Reserve(2600, 2600);
  plane.Reserve(3584, 3584);
  CHECK(slabs->full == std::vector<bool>({false, false, true, true, true, false, true}));
}

TEST(MovesFreeEachSlabOnce) {
  const auto first = std::make_shared<CountingSlabs>(), second = std::make_shared<CountingSlabs>();
  {
    Plane a(first, 8), b(second, 4096);
    a.Reserve(1);
    b.Reserve(2000);
    std::byte* const record = b.At(1999);
    a = std::move(b);
    CHECK_EQ(first->live(), 0u);  // what `a` had is freed at once
    CHECK_EQ(second->live(), 4u);
    CHECK_EQ(a.At(1999), record);
    CHECK_EQ(a.stride(), 4096u);
    Plane c(std::move(a));
    CHECK_EQ(c.At(1999), record);
    a = Plane(first, 16);  // a moved-from plane can be given a new value
    a.Reserve(1);
    CHECK_EQ(first->live(), 1u);
    c = std::move(c);
    CHECK_EQ(c.At(1999), record);
  }
  CHECK_EQ(first->live(), 0u);
  CHECK_EQ(second->live(), 0u);
}

TEST(FailedReserveKeepsWhatThereWas) {
  const auto slabs = std::make_shared<CountingSlabs>(3);
  Plane plane(slabs, 4096);
  plane.Reserve(512);
  std::byte* const record = plane.At(511);
  *record = std::byte{9};
  bool thrown = false;
  try {
    plane.Reserve(512 * 10);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown);
  CHECK_EQ(plane.At(511), record);
  CHECK(*record == std::byte{9});
  CHECK_EQ(slabs->live(), 1u);  // what the failed call gained is given back
  CHECK_EQ(plane.bytes(), slabs->live_bytes());
}

TEST(TablesGiveEverySlabBack) {
  const auto slabs = std::make_shared<CountingSlabs>();
  {
    data::Live table(data::Spec(16384), slabs);
    kvjax::SlotLayout layout;
    layout.Add("m", "float32[16384]", 65536);
    table.Begin(data::kAwkward, std::vector<int32_t>(data::kAwkward.size(), 1), layout);
    CHECK_EQ(slabs->live(), 3u);  // values, headers, slots
    table.ClearSlots(table.version());
    CHECK_EQ(slabs->live(), 2u);
    table.Clear(table.version());
    CHECK_EQ(slabs->live(), 0u);
    table.Ensure(data::kAwkward);
  }
  CHECK_EQ(slabs->live(), 0u);
}

/// Bytes of address space that the process has.
size_t AddressSpace() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * kvjax::PageBytes();
}

TEST(PagesOfAnyNumberOfBytesAreGivenBackWhole) {
  const size_t before = AddressSpace();
  for (int i = 0; i < 200; ++i) {
    const size_t bytes = (size_t{5} << 20) + 64;
    std::byte* const start = kvjax::MapPages(bytes, true);
    CHECK_EQ(reinterpret_cast<uintptr_t>(start) % kvjax::kHugePage, 0u);
    CHECK(start[0] == std::byte{0} && start[bytes - 1] == std::byte{0});
    kvjax::UnmapPages(start, bytes);
  }
  CHECK(AddressSpace() < before + (size_t{100} << 20));
}

TEST(MemoryIsTakenInPagesOfTheSystem) {
  const size_t own = std::exchange(kvjax::PageBytes(), size_t{1} << 16), bytes = (size_t{5} << 20) + 64;
  std::byte* const start = kvjax::MapPages(bytes, true);
  std::byte* const last = start + kvjax::InPages(bytes, false) - own;
  std::array<unsigned char, 16> there{};
  CHECK_EQ(mincore(last, own, there.data()), 0);  // fails where nothing is
  kvjax::UnmapPages(start, kvjax::InPages(bytes, false));
  {
    Plane plane(std::make_shared<HostSlabs>(), (size_t{2} << 20) + 4);
    plane.Reserve(1);
    CHECK_EQ(plane.bytes() % kvjax::PageBytes(), 0u);
  }
  kvjax::PageBytes() = own;
}

}  // namespace core_slab
