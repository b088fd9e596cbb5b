// The distinct keys of a batch: numbered one after the other, or grouped by all threads.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/pages.h"
#include "kvjax/ffi/core/parallel.h"
#include "kvjax/ffi/core/portable.h"
#include "kvjax/ffi/core/secret.h"

namespace kvjax {

/// Distinct keys numbered in the order of their first occurrence, by a small hash set that lives as
/// long as one batch.
class KeyNumbering {
 public:
  explicit KeyNumbering(size_t max_keys)
      : cells_(std::bit_ceil(std::max<size_t>(2 * max_keys, 2)), kFree),
        shift_(64 - std::countr_zero(cells_.size())) {
    keys_.reserve(max_keys);
  }

  /// Number of `key`, which becomes the next free one if the key is new.
  uint32_t Add(uint64_t key) {
    for (size_t i = PlaceHash(key, secret_) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) {
        cells_[i] = static_cast<uint32_t>(keys_.size());
        keys_.push_back(key);
        return cells_[i];
      }
      if (keys_[cells_[i]] == key) return cells_[i];
    }
  }
  [[nodiscard]] bool Has(uint64_t key) const {
    for (size_t i = PlaceHash(key, secret_) >> shift_;; i = (i + 1) & (cells_.size() - 1)) {
      if (cells_[i] == kFree) return false;
      if (keys_[cells_[i]] == key) return true;
    }
  }
  [[nodiscard]] const std::vector<uint64_t>& keys() const& { return keys_; }
  [[nodiscard]] std::vector<uint64_t> keys() && { return std::move(keys_); }

 private:
  static constexpr uint32_t kFree = 0xFFFFFFFFu;
  std::vector<uint32_t> cells_;
  int shift_;
  uint64_t secret_ = Secret();
  std::vector<uint64_t> keys_;
};

/// The distinct keys of a batch in order of first occurrence, and which of its rows belong to each.
///
/// Keys are dealt out by their hash to parts that stay in the cache, and each part is numbered by itself, in
/// memory of its own. What comes out depends neither on the parts nor on who does them, and it is the same
/// where keys are told by their row ids, which takes a third of the time and one thread.
class KeyGroups {
 public:
  /// counts: (n,) how often each key occurred; 0 marks padding, which is skipped.
  KeyGroups(const ParallelFor& parallel, const uint64_t* keys, const int32_t* counts, size_t n)
      : n_(n),
        blocks_((n + kBlock - 1) / kBlock),
        parts_(blocks_ <= 1 ? 1 : std::clamp<size_t>(n / kPart, 1, kMostParts)),
        begins_(blocks_ * parts_ + 1),
        found_(begins_.size()),
        items_(n),
        numbered_(n),
        rows_(n) {
    if (parts_ == 1) {
      begins_.back() = static_cast<uint32_t>(n);
      std::vector<uint32_t> cells;
      const uint64_t secret = Secret();
      Number(0, counts, cells, [&](uint32_t i) {
        return Item{keys[i], i, {static_cast<uint32_t>(PlaceHash(keys[i], secret))}};
      });
    } else {
      Deal(parallel, keys, counts);
      parallel(parts_, 1, [&](size_t begin, size_t end) {
        std::vector<uint32_t> cells;
        for (size_t part = begin; part < end; ++part)
          Number(part, counts, cells, [&](uint32_t j) { return items_[j]; });
      });
    }
    List(parallel);
    UnfilledResult<Item>().swap(items_);
    UnfilledResult<Numbered>().swap(numbered_);
  }

  /// Whether row ids, all below `end_row`, are the better way to tell n keys. It has a number for each row to
  /// clear, and of more keys threads would be faster together.
  [[nodiscard]] static bool PrefersIds(size_t n, size_t end_row) {
    constexpr size_t kMostKeys = 65'536, kRowsOfKey = 8;
    return n <= kMostKeys && end_row <= kRowsOfKey * n;
  }

  /// The groups of keys that all have rows: ids (n,), below `end_row`.
  KeyGroups(const uint64_t* keys, const int32_t* counts, size_t n, const uint32_t* ids, size_t end_row)
      : n_(n), blocks_(0), parts_(0), rows_(n), keys_(n), counts_(n), groups_(n) {
    constexpr uint32_t kNone = 0xFFFFFFFFu;
    std::vector<uint32_t> numbers(end_row, kNone);  // of the groups, by id
    UnfilledResult<uint32_t> number_of(n);
    uint32_t size = 0;
    for (uint32_t i = 0; i < n; ++i) {
      if (counts[i] <= 0) continue;
      // Without a branch: nobody could foresee whether a key is there again.
      uint32_t& number = numbers[ids[i]];
      const bool first = number == kNone;
      number = first ? size : number, number_of[i] = number;
      keys_[size] = keys[i], counts_[size] = 0, groups_[size] = {.first = i, .end = 0, .size = 0};
      size += first;
      counts_[number] = Sum(counts_[number], counts[i]), ++groups_[number].size;
    }
    keys_.resize(size), counts_.resize(size), groups_.resize(size);
    uint32_t end = 0;
    for (Group& group : groups_) group.end = std::exchange(end, end + group.size);
    for (uint32_t i = 0; i < n; ++i) {
      if (counts[i] > 0) rows_[groups_[number_of[i]].end++] = i;
    }
  }

  [[nodiscard]] size_t size() const { return keys_.size(); }
  [[nodiscard]] const UnfilledResult<uint64_t>& keys() const { return keys_; }
  /// How often each key occurred, INT32_MAX for more.
  [[nodiscard]] const UnfilledResult<int32_t>& counts() const { return counts_; }
  /// Where a group stands first.
  [[nodiscard]] uint32_t first(size_t group) const { return groups_[group].first; }
  /// The rows of a group, in the order in which they stand.
  [[nodiscard]] std::span<const uint32_t> rows(size_t group) const {
    const Group& g = groups_[group];
    return {g.size == 1 ? &g.first : rows_.data() + g.end - g.size, g.size};
  }

  // See PrefetchRecord.
  [[gnu::always_inline]] void Prefetch(size_t group) const {
    if (groups_[group].size > 1) __builtin_prefetch(rows(group).data());
  }

 private:
  static constexpr size_t kBlock = 8192, kPart = 4096;  // keys
  static constexpr size_t kMostParts = 256;

  struct Item {
    uint64_t key;
    uint32_t at;  // its place in the batch
    union {
      uint32_t hash;    // its low bits
      uint32_t number;  // of its key in the part, once that is known
    };
  };
  struct Group {
    uint32_t first;      // where it stands first
    uint32_t end, size;  // of its rows, if there are more
  };
  /// A key of a part.
  struct Numbered {
    uint64_t key;
    Group group;
    int32_t count;
  };

  template <class F>
  void EachBlock(const ParallelFor& parallel, F f) {
    parallel(blocks_, 1, [&](size_t begin, size_t end) {
      for (size_t b = begin; b < end; ++b) f(b, b * kBlock, std::min(n_, (b + 1) * kBlock));
    });
  }
  [[nodiscard]] static int32_t Sum(int32_t count, int32_t more) {
    return static_cast<int32_t>(std::min<int64_t>(int64_t{count} + more, INT32_MAX));
  }
  [[nodiscard]] size_t PartOf(uint64_t hash) const { return MulHigh(hash, parts_); }

  /// Deals the keys out to parts, in each in the order of the batch.
  void Deal(const ParallelFor& parallel, const uint64_t* keys, const int32_t* counts) {
    const uint64_t secret = Secret();
    EachBlock(parallel, [&](size_t b, size_t begin, size_t end) {
      std::array<uint32_t, kMostParts> sizes{};
      for (size_t i = begin; i < end; ++i) sizes[PartOf(PlaceHash(keys[i], secret))] += counts[i] > 0;
      for (size_t p = 0; p < parts_; ++p) begins_[p * blocks_ + b] = sizes[p];
    });
    uint32_t begin = 0;
    for (uint32_t& size : begins_) begin += std::exchange(size, begin);
    EachBlock(parallel, [&](size_t b, size_t from, size_t to) {
      std::array<uint32_t, kMostParts> next;
      for (size_t p = 0; p < parts_; ++p) next[p] = begins_[p * blocks_ + b];
      for (size_t i = from; i < to; ++i) {
        if (counts[i] <= 0) continue;
        const uint64_t hash = PlaceHash(keys[i], secret);
        items_[next[PartOf(hash)]++] = {keys[i], static_cast<uint32_t>(i), {static_cast<uint32_t>(hash)}};
      }
    });
  }

  /// Numbers the keys of a part, which item(j) gives one after the other, and puts the rows of each together.
  template <class ItemAt>
  void Number(size_t part, const int32_t* counts, std::vector<uint32_t>& cells, ItemAt item_at) {
    const uint32_t begin = begins_[part * blocks_], end = begins_[(part + 1) * blocks_];
    const size_t mask = std::bit_ceil(std::max<size_t>(size_t{2} * (end - begin), 2)) - 1;
    constexpr uint32_t kFree = 0xFFFFFFFFu;
    cells.assign(mask + 1, kFree);
    uint32_t* const found = &found_[part * blocks_];
    Numbered* const keys = numbered_.data() + begin;
    uint32_t size = 0, again = begin;
    for (uint32_t j = begin; j < end; ++j) {
      const Item item = item_at(j);
      if (counts[item.at] <= 0) continue;
      size_t c = item.hash & mask;
      while (cells[c] != kFree && keys[cells[c]].key != item.key) c = (c + 1) & mask;
      if (cells[c] == kFree) {
        ++found[item.at / kBlock];
        cells[c] = size;
        keys[size++] = {item.key, {.first = item.at, .end = kFree, .size = 1}, counts[item.at]};
        continue;
      }
      Numbered& key = keys[cells[c]];
      ++key.group.size;
      key.count = Sum(key.count, counts[item.at]);
      items_[again++] = {item.key, item.at, {.number = cells[c]}};
    }
    uint32_t next = begin;
    for (uint32_t j = begin; j < again; ++j) {  // what is left of the items: keys that are there again
      Group& group = keys[items_[j].number].group;
      if (group.end == kFree) {
        group.end = next, next += group.size;
        rows_[group.end++] = group.first;
      }
      rows_[group.end++] = items_[j].at;
    }
  }

  /// Lists the groups in the order of their first keys.
  void List(const ParallelFor& parallel) {
    std::vector<uint32_t> before(blocks_ + 1);
    for (size_t p = 0; p < parts_; ++p) {
      uint32_t end = begins_[p * blocks_];  // of the keys of a part that stand first in a block
      for (size_t b = 0; b < blocks_; ++b) {
        before[b + 1] += found_[p * blocks_ + b];
        found_[p * blocks_ + b] = end += found_[p * blocks_ + b];
      }
    }
    std::partial_sum(before.begin(), before.end(), before.begin());
    keys_.resize(before[blocks_]), counts_.resize(before[blocks_]), groups_.resize(before[blocks_]);
    const auto put = [&](size_t g, const Numbered& key) {
      keys_[g] = key.key, counts_[g] = key.count, groups_[g] = key.group;
    };
    if (parts_ == 1) {  // whose keys stand in this order
      for (size_t g = 0; g < keys_.size(); ++g) put(g, numbered_[g]);
      return;
    }
    EachBlock(parallel, [&](size_t b, size_t from, size_t to) {
      constexpr uint32_t kNone = 0xFFFFFFFFu;
      std::array<uint32_t, kBlock> numbers;
      std::fill_n(numbers.begin(), to - from, kNone);
      for (size_t p = 0; p < parts_; ++p) {
        uint32_t k = b == 0 ? begins_[p * blocks_] : found_[p * blocks_ + b - 1];
        for (; k < found_[p * blocks_ + b]; ++k) numbers[numbered_[k].group.first - from] = k;
      }
      uint32_t g = before[b];
      for (size_t i = 0; i < to - from; ++i) {
        if (numbers[i] != kNone) put(g++, numbered_[numbers[i]]);
      }
    });
  }

  size_t n_, blocks_, parts_;
  std::vector<uint32_t> begins_,  // (parts, blocks): where the items of a block begin in a part
      found_;                     // its distinct keys that stand there first; once listed, where these end
  UnfilledResult<Item> items_;    // by part, as what follows
  UnfilledResult<Numbered> numbered_;
  UnfilledResult<uint32_t> rows_;
  UnfilledResult<uint64_t> keys_;  // of the groups, as what follows
  UnfilledResult<int32_t> counts_;
  UnfilledResult<Group> groups_;
};

}  // namespace kvjax
