// The rows found for the last batch: the next call mostly has the same keys.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/cpu/change.h"

namespace kvjax {

/// A step that trains what it has looked up, and a lookup of what has been inserted, need not search again.
/// It costs a copy of the keys, so it is kept only where such a call is to be expected: of the first lookup
/// after a training write, and of an insertion. Any thread may call at any time.
class LastBatch {
 public:
  struct Batch {
    uint32_t version;  // of the table
    UnfilledResult<uint64_t> keys;
    RowIds rows;
  };

  /// The rows of these keys at this version, or nullptr.
  [[nodiscard]] std::shared_ptr<const Batch> Find(uint32_t version, KeySpan keys) const {
    if (keys.n < kFewest) return nullptr;
    const std::shared_ptr<const Batch> last = Last();
    if (last == nullptr || last->version != version || last->keys.size() != keys.n) return nullptr;
    return std::memcmp(last->keys.data(), keys.data, keys.n * sizeof(uint64_t)) == 0 ? last : nullptr;
  }

  /// A batch to be filled and kept, or nullptr if that is not worth while.
  [[nodiscard]] std::shared_ptr<Batch> Begin(uint32_t version, size_t n) const {
    if (n < kFewest) return nullptr;
    try {
      return std::make_shared<Batch>(Batch{version, UnfilledResult<uint64_t>(n), RowIds(n)});
    } catch (const std::bad_alloc&) {
      return nullptr;  // then the next call searches
    }
  }
  /// The same for a lookup.
  [[nodiscard]] std::shared_ptr<Batch> BeginLookup(uint32_t version, size_t n) const {
    if (n < kFewest || !trained_ || version != version_) return nullptr;
    const std::shared_ptr<const Batch> last = Last();
    return last == nullptr || last->version != version ? Begin(version, n) : nullptr;
  }
  void Keep(std::shared_ptr<const Batch> batch) {
    const std::lock_guard lock(mutex_);
    last_.swap(batch);
  }

  /// A training write has made this version. Only a writer may call.
  void Trained(uint32_t version) { trained_ = true, version_ = version; }

 private:
  static constexpr size_t kFewest = 2048;  // keys: fewer are found as soon as compared

  [[nodiscard]] std::shared_ptr<const Batch> Last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Batch> last_;
  bool trained_ = false;
  uint32_t version_ = 0;
};

}  // namespace kvjax
