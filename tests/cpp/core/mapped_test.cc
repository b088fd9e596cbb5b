// Slabs in a file: what they hold, what they give back, and what a failing disk does.
#include "kvjax/ffi/core/mapped.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kvjax/ffi/core/failures.h"
#include "kvjax/ffi/core/registry.h"
#include "kvjax/ffi/cpu/storage.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace {

/// What fallocate is to fail with from now on, by kind of call.
struct {
  std::atomic<int> reserve = 0;
  std::atomic<int> punch = 0;
} disk;

}  // namespace

// Instead of the C library's.
extern "C" int fallocate(int file, int mode, off_t offset, off_t bytes) {
  if (const int error = mode == 0 ? disk.reserve : disk.punch; error != 0) {
    errno = error;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fallocate, file, mode, offset, bytes));
}

namespace {

using kvjax::ErrorCode;
using kvjax::MappedSlabs;
using kvjax::Plane;

constexpr size_t kSlab = size_t{1} << 21;

const std::string& Folder() {
  static const std::string folder = [] {
    std::string path = (std::filesystem::temp_directory_path() / "kvjax-test-XXXXXX").string();
    CHECK(mkdtemp(path.data()) != nullptr);
    return path;
  }();
  return folder;
}

/// Bytes on disk of all files that this process has open in the folder.
size_t DiskBytes() {
  size_t sum = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    const std::string target = std::filesystem::read_symlink(entry.path(), none).string();
    struct stat status;
    if (target.starts_with(Folder()) && stat(entry.path().c_str(), &status) == 0) {
      sum += static_cast<size_t>(status.st_blocks) * 512;
    }
  }
  return sum;
}

/// What the disk does not give, as the error of a write.
template <class F>
std::string Refused(F f) {
  try {
    f();
  } catch (const kvjax::NoDisk&) {
    const kvjax::Error error = kvjax::Caught("user", "upsert");
    return (error.code() == ErrorCode::kResourceExhausted ? "full: " : "broken: ") +
           std::string(error.what());
  }
  return "not refused";
}
bool Full(const std::string& refused) { return refused.starts_with("full: kvjax: table 'user', upsert: "); }

bool IsZero(const std::byte* slab, size_t bytes) {
  return std::all_of(slab, slab + bytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST(TheFileHasNoName) {
  MappedSlabs slabs(Folder(), "t");
  slabs.Allocate(kSlab);
  CHECK(std::filesystem::is_empty(Folder()));
  CHECK(DiskBytes() >= kSlab);
}

/// What body(), in a fork of this process, returns.
template <class Body>
int InFork(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

TEST(AForkOfTheProcessChangesNothing) {
  auto slabs = std::make_unique<MappedSlabs>(Folder(), "t");
  std::byte* const slab = slabs->Allocate(kSlab);
  std::fill_n(slab, kSlab, std::byte{7});
  const int code = InFork([&] {
    unsigned char there;
    const bool mapped = mincore(slab, kvjax::PageBytes(), &there) == 0;  // fails where nothing is
    slabs->Free(slab, kSlab);
    try {
      slabs->Allocate(kSlab);
    } catch (const kvjax::Error& error) {
      slabs.reset();
      return error.code() == ErrorCode::kFailedPrecondition && !mapped ? 5 : 1;
    }
    return 2;
  });
  CHECK_EQ(code, 5);
  CHECK(DiskBytes() >= kSlab);
  CHECK(std::all_of(slab, slab + kSlab, [](std::byte b) { return b == std::byte{7}; }));
  slabs->Free(slab, kSlab);
  CHECK(IsZero(slabs->Allocate(kSlab), kSlab));  // and here all goes on
}

TEST(TablesStayBehindInTheParent) {
  using Tables = kvjax::Registry<kvjax::Table>;
  const auto make = [](size_t) { return std::make_shared<data::Live>(2); };
  const auto create = [&](const char* name) { Tables::Get().Create(name, {Tables::kEveryDevice}, make); };
  const auto fails = [](auto call) {
    try {
      call();
    } catch (const kvjax::Error& error) {
      return error.code() == ErrorCode::kFailedPrecondition ? 1 : 100;
    }
    return 10;
  };
  // One that comes from a process without tables may make its own.
  CHECK_EQ(InFork([&] { return create("own"), Tables::Get().Find("own", "lookup", 0) != nullptr ? 5 : 1; }),
           5);
  create("t");
  CHECK_EQ(InFork([&] {
             return fails([&] { Tables::Get().Find("t", "lookup", 0); }) +
                    fails([&] { Tables::Get().All("t", "export"); }) +
                    fails([&] { Tables::Get().Drop("t", "drop_table", {}); }) +
                    fails([&] { Tables::Get().CheckProcess("t", "load"); }) + fails([&] { create("u"); });
           }),
           5);
  CHECK(Tables::Get().Find("t", "lookup", 0) != nullptr);
  Tables::Get().Drop("t", "drop_table", {});
}

TEST(SlabsAreZeroedDisjointAndUsedAgain) {
  MappedSlabs slabs(Folder(), "t");
  data::Stream random(1);
  const std::vector<size_t> sizes = {kSlab, kSlab + kvjax::PageBytes(), 3 * kSlab};
  struct Slab {
    std::byte* start;
    size_t bytes;
    std::byte mark;
  };
  std::vector<Slab> live;
  size_t most = 0;
  for (int i = 0; i < 200; ++i) {
    if (live.size() < 2 || (live.size() < 30 && random.Below(2) == 0)) {
      const size_t bytes = sizes[random.Below(sizes.size())];
      std::byte* const start = slabs.Allocate(bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(start) % kvjax::PageBytes(), 0u);
      CHECK(IsZero(start, bytes));
      live.push_back({start, bytes, static_cast<std::byte>(i + 1)});
      std::fill_n(start, bytes, live.back().mark);
    } else {
      std::swap(live[random.Below(live.size())], live.back());
      const Slab slab = live.back();
      CHECK(std::all_of(slab.start, slab.start + slab.bytes, [&](std::byte b) { return b == slab.mark; }));
      slabs.Free(slab.start, slab.bytes);
      live.pop_back();
    }
    size_t bytes = 0;
    for (const Slab& slab : live) bytes += slab.bytes;
    most = std::max(most, bytes);
    CHECK(DiskBytes() >= bytes);
    CHECK(DiskBytes() <= bytes + 65536);  // the file system's own
  }
  CHECK(most > 20 * kSlab);
  for (const Slab& slab : live) slabs.Free(slab.start, slab.bytes);
  CHECK(DiskBytes() <= 65536);
}

TEST(ManyWindowsAndSlabsLargerThanOne) {
  MappedSlabs slabs(Folder(), "t");
  const size_t kLarge = (size_t{1} << 28) + kvjax::PageBytes();
  std::byte* const first = slabs.Allocate(kSlab);
  *first = std::byte{1};
  std::byte* const large = slabs.Allocate(kLarge);
  large[0] = large[kLarge - 1] = std::byte{2};
  std::vector<std::byte*> others;
  for (int i = 0; i < 140; ++i) others.push_back(slabs.Allocate(kSlab));
  for (std::byte* slab : others) *slab = slab[kSlab - 1] = std::byte{3};
  CHECK(*first == std::byte{1});
  CHECK(large[0] == std::byte{2} && large[kLarge - 1] == std::byte{2});
}

TEST(APlaneShrinks) {
  const auto slabs = std::make_shared<MappedSlabs>(Folder(), "t");
  Plane plane(slabs, 4096);  // 512 records to a slab
  plane.Reserve(512 * 5);
  for (uint32_t row = 0; row < 512 * 5; ++row) *plane.At(row) = std::byte{7};
  plane.Shrink(512 * 9);
  CHECK_EQ(plane.bytes(), 5 * kSlab);
  plane.Shrink(512 * 2 + 1);
  CHECK_EQ(plane.bytes(), 3 * kSlab);
  CHECK(DiskBytes() <= 3 * kSlab + 65536);
  CHECK(*plane.At(512 * 3 - 1) == std::byte{7});
  plane.Reserve(512 * 4);
  CHECK(IsZero(plane.At(512 * 3), kSlab));
  plane.Shrink(0);
  CHECK_EQ(plane.bytes(), 0u);
  CHECK(DiskBytes() <= 65536);
}

TEST(AFullDiskIsAnErrorThatChangesNothing) {
  MappedSlabs slabs(Folder(), "user");
  std::byte* const first = slabs.Allocate(kSlab);
  *first = std::byte{1};
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const size_t before = DiskBytes();
    disk.reserve = error;
    CHECK(Full(Refused([&] { slabs.Allocate(kSlab); })));
    disk.reserve = 0;
    CHECK_EQ(DiskBytes(), before);
  }
  disk.reserve = EIO;
  const std::string text = Refused([&] { slabs.Allocate(kSlab); });
  for (const std::string& part :
       {std::string("broken: kvjax: table 'user', upsert: "), Folder(), std::string("Input/output")})
    CHECK(text.find(part) != std::string::npos);
  disk.reserve = 0;
  CHECK(IsZero(slabs.Allocate(kSlab), kSlab));
  CHECK(*first == std::byte{1});
}

TEST(AFileSystemWithoutFallocateWorks) {
  MappedSlabs slabs(Folder(), "t");
  disk.reserve = disk.punch = EOPNOTSUPP;
  std::byte* const slab = slabs.Allocate(kSlab);
  CHECK(IsZero(slab, kSlab));
  CHECK(DiskBytes() >= kSlab);
  std::fill_n(slab, kSlab, std::byte{5});
  slabs.Free(slab, kSlab);
  CHECK_EQ(slabs.Allocate(kSlab), slab);
  CHECK(IsZero(slab, kSlab));
  // Blocks can be reserved, but not given back one by one.
  disk.reserve = 0;
  std::fill_n(slab, kSlab, std::byte{5});
  slabs.Free(slab, kSlab);
  CHECK(IsZero(slabs.Allocate(kSlab), kSlab));
  disk.punch = 0;
}

TEST(AbsurdSizesAreRefused) {
  const auto refuses = [](kvjax::SlabAllocator& slabs, size_t bytes) {
    try {
      slabs.Allocate(bytes);
    } catch (const std::bad_alloc&) {
      return true;
    }
    return false;
  };
  MappedSlabs mapped(Folder(), "t");
  kvjax::HostSlabs small(SIZE_MAX), huge(0);
  for (const size_t bytes : {size_t{1} << 60, SIZE_MAX - 4095}) {
    CHECK(refuses(mapped, bytes));
    CHECK(refuses(small, bytes));
    CHECK(refuses(huge, bytes));
  }
  CHECK(IsZero(mapped.Allocate(kSlab), kSlab));
}

TEST(AFolderThatIsNoneIsAnError) {
  for (const std::string& folder : {Folder() + "/none", std::string("/dev/null")}) {
    CHECK_THROWS(kInvalidArgument, MappedSlabs(folder, "t"));
  }
  CHECK_THROWS(kInvalidArgument, kvjax::MakeSlabs("mmap:/no/such/folder", "t"));
  CHECK_THROWS(kInvalidArgument, kvjax::MakeSlabs("tape", "t"));
  for (const char* text : {"host", "host:huge", "host:small"}) {
    CHECK(IsZero(kvjax::MakeSlabs(text, "t")->Allocate(kSlab), kSlab));
  }
}

TEST(ThreadsShareAnAllocator) {
  // Loading makes a second set of rows, beside which the first may grow and shrink.
  const auto slabs = kvjax::MakeSlabs("mmap:" + Folder(), "t");
  std::vector<std::thread> threads;
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&, mark = static_cast<std::byte>(t)] {
      for (int i = 0; i < 20; ++i) {
        std::byte* const slab = slabs->Allocate(kSlab);
        CHECK(IsZero(slab, kSlab));
        std::fill_n(slab, kSlab, mark);
        CHECK(std::all_of(slab, slab + kSlab, [&](std::byte b) { return b == mark; }));
        slabs->Free(slab, kSlab);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ATableInAFileIsUnchangedByAFullDisk) {
  const auto slabs = kvjax::MakeSlabs("mmap:" + Folder(), "t");
  data::Live table(data::Spec(16384), slabs);  // 32 rows to a slab
  data::Keys few, many;
  for (uint64_t key = 0; key < 40; ++key) few.push_back(key);
  for (uint64_t key = 30; key < 200; ++key) many.push_back(key);
  kvjax::SlotLayout layout;
  layout.Add("m", "float32[16384]", 65536);
  table.Ensure(few);
  const auto before = table.Copy();
  disk.reserve = ENOSPC;
  CHECK(Full(Refused([&] { table.Ensure(many); })));
  CHECK(Full(Refused([&] { table.Begin(many, std::vector<int32_t>(many.size(), 1), layout); })));
  CHECK(Full(Refused([&] { table.Restore(data::View(before)); })));
  disk.reserve = 0;
  CHECK(data::Same(before, table.Copy()));
  table.Ensure(many);
  CHECK_EQ(table.Size(table.version()), 200u);
  table.Clear(table.version());
  CHECK(DiskBytes() <= 65536);
  std::filesystem::remove(Folder());
}

}  // namespace
