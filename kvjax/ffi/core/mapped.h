// Slabs in a file: a table may be as large as the disk, and the system keeps in memory what is used.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/error_texts.h"
#include "kvjax/ffi/core/process.h"
#include "kvjax/ffi/core/slab.h"

namespace kvjax {

/// Slabs in one file of a folder. The file loses its name as soon as it is made: it is memory that happens to
/// be on disk, and disappears with the process however that ends.
///
/// A write through a mapping that finds the disk full is SIGBUS. So the blocks of a slab are reserved before
/// it is handed out, when a full disk is still an ordinary error.
///
/// The file is one for all forks of the process. So a fork does not get the mapping, and what it does with
/// its copy of this object is nothing.
class MappedSlabs final : public SlabAllocator {
 public:
  /// Throws kvjax::Error, in the name of `table`.
  MappedSlabs(std::string folder, std::string table) : folder_(std::move(folder)), table_(std::move(table)) {
    std::string path = folder_ + "/kvjax-XXXXXX";
    file_ = mkostemp(path.data(), O_CLOEXEC);
    if (file_ < 0) throw FolderError(table_, folder_, errno);
    unlink(path.c_str());
  }
  ~MappedSlabs() override {
    if (!process_.here()) return;
    for (const auto& [start, bytes] : windows_) munmap(start, bytes);
    close(file_);
  }
  MappedSlabs(const MappedSlabs&) = delete;
  MappedSlabs& operator=(const MappedSlabs&) = delete;

  std::byte* Allocate(size_t bytes) override {
    if (!process_.here()) throw ForkedError(table_, "allocate");
    const std::lock_guard lock(mutex_);
    Pieces& free = free_[bytes];
    if (free.empty()) AddPiece(free, bytes);
    const auto piece = free.begin();
    ReserveDisk(piece->second, bytes);
    std::byte* const slab = piece->first;
    live_.insert(free.extract(piece));
    return slab;
  }

  void Free(std::byte* slab, size_t bytes) noexcept override {
    if (!process_.here()) return;
    const std::lock_guard lock(mutex_);
    const auto piece = live_.find(slab);
    // Pages that are mapped, cached or on disk are all freed with the hole, and it reads as zeros.
    if (!PunchHole(piece->second, bytes)) std::memset(slab, 0, bytes);
    free_.find(bytes)->second.insert(live_.extract(piece));  // moves the node: nothing here allocates
  }

  [[nodiscard]] ReadAhead* read_ahead() override { return &read_ahead_; }

 private:
  /// Slabs by address, with their offsets in the file.
  using Pieces = std::map<std::byte*, off_t>;

  /// The file is mapped in windows, because the system allows a process only some 65,000 mappings.
  static constexpr size_t kWindow = size_t{1} << 28;

  /// Adds the next piece of the file to `pieces`.
  void AddPiece(Pieces& pieces, size_t bytes) {
    if (bytes > left_) AddWindow(bytes);
    pieces.emplace(next_, offset_);
    next_ += bytes;
    offset_ += static_cast<off_t>(bytes);
    left_ -= bytes;
  }

  void AddWindow(size_t bytes) {
    if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
    const size_t size = (bytes + kWindow - 1) / kWindow * kWindow;
    const off_t offset = offset_ + static_cast<off_t>(left_);  // whole windows: aligned to any page
    windows_.reserve(windows_.size() + 1);
    void* const window = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, offset);
    if (window == MAP_FAILED) throw std::bad_alloc();
    if (madvise(window, size, MADV_DONTFORK) != 0) {
      munmap(window, size);
      throw std::bad_alloc();
    }
    madvise(window, size, MADV_RANDOM);  // what lies beside a row is no likelier to be wanted
    next_ = static_cast<std::byte*>(window);
    windows_.emplace_back(next_, size);
    offset_ = offset;
    left_ = size;
  }

  void ReserveDisk(off_t offset, size_t bytes) {
    int error = 0;
    do {
      error = fallocate(file_, 0, offset, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP || error == ENOSYS) error = WriteZeros(offset, bytes);
    if (error == 0) return;
    PunchHole(offset, bytes);  // what there was space for
    throw NoDisk(folder_, bytes, error);
  }

  /// Takes blocks on a file system that cannot reserve them. Returns errno.
  [[nodiscard]] int WriteZeros(off_t offset, size_t bytes) const {
    static constexpr std::array<std::byte, 1 << 16> kZeros{};
    while (bytes > 0) {
      const ssize_t n = pwrite(file_, kZeros.data(), std::min(bytes, kZeros.size()), offset);
      if (n < 0 && errno != EINTR) return errno;
      if (n == 0) return ENOSPC;
      if (n < 0) continue;
      offset += n;
      bytes -= static_cast<size_t>(n);
    }
    return 0;
  }

  bool PunchHole(off_t offset, size_t bytes) const noexcept {
    int result = 0;
    do {
      result =
          fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    return result == 0;
  }

  const std::string folder_;
  const std::string table_;
  const OwnProcess process_;
  int file_ = -1;
  ReadAhead read_ahead_;
  std::mutex mutex_;
  std::vector<std::pair<std::byte*, size_t>> windows_;
  std::byte* next_ = nullptr;  // of the last window, the part that has no pieces yet
  size_t left_ = 0;
  off_t offset_ = 0;
  Pieces live_;
  std::map<size_t, Pieces> free_;  // by the size of the slab
};

}  // namespace kvjax
