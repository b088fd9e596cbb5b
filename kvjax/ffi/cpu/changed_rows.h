// The rows that the last training write has changed, so that what was read before it need not be read again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/call.h"
#include "kvjax/ffi/core/groups.h"
#include "kvjax/ffi/core/spec.h"
#include "kvjax/ffi/cpu/contents.h"

namespace kvjax {

class Recent {
 public:
  /// Takes all memory for a step that gives or updates the rows of `keys`, and removes those that leave.
  /// `unadmitted`: whether what keys without a row read may change; `shared`: the key whose row they share,
  /// or nullptr. It may be asked for by itself.
  static Recent Of(KeySpan keys, const Change& change, bool unadmitted, const uint64_t* shared) {
    Recent recent;
    recent.keys_.assign(keys.data, keys.data + keys.n);
    for (const auto& [reason, rows] : change.leaving) {
      for (const KeyRow& r : rows) recent.keys_.push_back(r.key);
    }
    if (shared != nullptr) recent.keys_.push_back(*shared);
    recent.unadmitted_ = unadmitted;
    return recent;
  }

  void Happened(uint32_t before, uint32_t after) {
    before_ = before;
    after_ = after;
    known_ = true;
  }

  /// Whether nothing but that step lies between the two versions.
  [[nodiscard]] bool Covers(uint32_t since, uint32_t now) const {
    return known_ && before_ == since && after_ == now;
  }

  /// Answers for many keys.
  class Set {
   public:
    explicit Set(const Recent& recent) : keys_(recent.keys_.size()), unadmitted_(recent.unadmitted_) {
      for (const uint64_t key : recent.keys_) keys_.Add(key);
    }
    [[nodiscard]] bool Changed(uint64_t key, bool has_row) const {
      return keys_.Has(key) || (unadmitted_ && !has_row);
    }

   private:
    KeyNumbering keys_;
    bool unadmitted_;
  };

 private:
  std::vector<uint64_t> keys_;
  bool unadmitted_ = false;
  bool known_ = false;
  uint32_t before_ = 0, after_ = 0;
};

}  // namespace kvjax
