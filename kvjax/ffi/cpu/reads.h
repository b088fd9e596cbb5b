// The reads of a table: rows, what is known of them, and which of them have changed.
#pragma once
#include "kvjax/ffi/cpu/table.h"

namespace kvjax {

inline void Table::Lookup(const ParallelFor& parallel, ReadVersion version, KeySpan keys, const bool* mask,
                          InitialRows initial, Missing missing, std::byte* out, bool* found,
                          bool own_rows) const {
  const auto lock = Read(version, "lookup", keys, Column::kValues);
  const auto unadmitted = missing == Missing::kTable && spec_.admission.decides()
                              ? spec_.admission.unadmitted
                              : AdmissionSpec::Unadmitted::kInitial;
  const bool given = spec_.initializer.kind == Initializer::Kind::kGiven;
  std::vector<std::byte> shared;
  if (unadmitted == AdmissionSpec::Unadmitted::kShared)
    shared = SharedRow(parallel, version, keys, mask, initial);
  const bool decides = unadmitted != AdmissionSpec::Unadmitted::kInitial;
  const auto initially = [&](size_t i) {  // of a key without a row
    return Valid(mask, i) && (!decides || in_.admission.ReadsInitial(keys.data[i]));
  };
  const auto known = last_batch_.Find(this->version(), keys);
  const auto kept = last_batch_.BeginLookup(this->version(), keys.n);
  const bool streams = keys.n * row_bytes() >= kStreamFrom && CanStream(out, row_bytes());
  const auto read = [&](size_t begin, size_t end, auto bytes) {
    uint64_t hits = 0, misses = 0;
    InitialRowWriter writer(spec_.initializer, spec_.type, spec_.dim);
    uint32_t* const keep = kept == nullptr ? nullptr : kept->rows.data() + begin;
    const auto fetch = [&](size_t j, uint32_t row) -> const std::byte* {
      if (keep != nullptr) keep[j] = row;
      if (row == kNoRow || !Valid(mask, begin + j)) return nullptr;
      const std::byte* const value = in_.store.Value(row);
      PrefetchRecord(value, bytes);
      return value;
    };
    const auto copy = [&](size_t j, const std::byte* value) {
      const size_t i = begin + j;
      std::byte* const target = out + i * bytes;
      found[i] = value != nullptr;
      if (value != nullptr) {
        ++hits;
        if (streams) {
          StreamLines(target, value, bytes);
        } else {
          AppendRecord(target, value, bytes);
        }
        return;
      }
      misses += Valid(mask, i);
      if (initially(i)) {
        if (!given) writer.Add(keys.data[i], target);
      } else if (!Valid(mask, i) || unadmitted == AdmissionSpec::Unadmitted::kZeros) {
        std::memset(target, 0, bytes);
      } else {
        std::memcpy(target, shared.data(), bytes);
      }
    };
    if (kept != nullptr) std::copy_n(keys.data + begin, end - begin, kept->keys.begin() + begin);
    const uint32_t* const rows = known == nullptr ? nullptr : known->rows.data() + begin;
    in_.store.index().FindEach(keys.data + begin, end - begin, fetch, copy, rows);
    if (streams) EndStreams();
    in_.counters.hits += hits;
    in_.counters.misses += misses;
  };
  WantHugePages(out, keys.n * row_bytes());
  WithSize(row_bytes(), [&](auto bytes) {
    parallel(keys.n, kGrain, [&](size_t begin, size_t end) { read(begin, end, bytes); });
  });
  if (kept != nullptr) last_batch_.Keep(kept);
  KeyNumbering fresh(given ? keys.n : 0);
  for (size_t i = 0; given && i < keys.n; ++i) {
    if (!Valid(mask, i) || (found[i] && version)) continue;
    const uint32_t number = fresh.Add(keys.data[i]);
    if (found[i] || !initially(i)) continue;
    Contents::StoreGiven(spec_, "lookup", number, initial, out + i * row_bytes());
  }
  for (size_t i = 0; own_rows && i < keys.n; ++i) found[i] = found[i] || initially(i);
}

inline size_t Table::FindMissing(const ParallelFor& parallel, ReadVersion version, KeySpan keys,
                                 const bool* mask, uint64_t* out) const {
  const auto lock = Read(version, "lookup", keys);
  KeyNumbering fresh = MissingKeys(parallel, version, keys, mask);
  const uint64_t shared_key = spec_.admission.shared_key;
  if (in_.admission.shares() && (!version || in_.store.index().Find(shared_key) == kNoRow)) {
    fresh.Add(shared_key);
  }
  std::copy(fresh.keys().begin(), fresh.keys().end(), out);
  return fresh.keys().size();
}

inline void Table::Inspect(const ParallelFor& parallel, std::string_view op, ReadVersion version,
                           KeySpan keys, bool* found, int64_t* frequency, int64_t* row_version,
                           bool* pinned) const {
  const auto lock = Read(version, op, keys);
  parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
    const auto fetch = [&](size_t, uint32_t row) {
      if (row != kNoRow) in_.store.PrefetchHeader(row);
      return row;
    };
    const auto tell = [&](size_t j, uint32_t row) {
      const size_t i = begin + j;
      found[i] = row != kNoRow;
      const RowHeader header = found[i] ? in_.store.Header(row)
                                        : RowHeader{.frequency = in_.admission.Count(keys.data[i]),
                                                    .pinned = 0,
                                                    .has_slots = 0,
                                                    .version = -1};
      frequency[i] = static_cast<int64_t>(header.frequency);
      row_version[i] = header.version;
      pinned[i] = header.pinned != 0;
    };
    in_.store.index().FindEach(keys.data + begin, end - begin, fetch, tell);
  });
}

inline void Table::ReadSlot(const ParallelFor& parallel, ReadVersion version, std::string_view name,
                            size_t bytes, KeySpan keys, std::byte* out) const {
  const auto lock = Read(version, "slot", keys, Column::kSlots);
  const size_t offset = SlotOffset(spec_.name, in_.store.layout(), name, bytes);
  parallel(keys.n, kGrain, [&](size_t begin, size_t end) {
    const auto fetch = [&](size_t, uint32_t row) {
      if (row == kNoRow) return row;
      in_.store.PrefetchHeader(row);
      PrefetchRecord(in_.store.Slots(row) + offset, bytes);
      return row;
    };
    const auto copy = [&](size_t j, uint32_t row) {
      std::byte* const target = out + (begin + j) * bytes;
      const bool has = row != kNoRow && in_.store.Header(row).has_slots != 0;
      if (name.empty()) {
        std::memset(target, has ? 1 : 0, bytes);
      } else if (has) {
        std::memcpy(target, in_.store.Slots(row) + offset, bytes);
      } else {
        std::memset(target, 0, bytes);
      }
    };
    in_.store.index().FindEach(keys.data + begin, end - begin, fetch, copy);
  });
}

inline void Table::Changed(uint32_t version, uint32_t since, KeySpan keys, bool* changed) const {
  const auto lock = Read(version, "prefetch", keys);
  if (since == version || !recent_.Covers(since, version)) {
    std::fill_n(changed, keys.n, since != version);
    return;
  }
  const Recent::Set recent(recent_);
  for (size_t i = 0; i < keys.n; ++i) {
    changed[i] = recent.Changed(keys.data[i], in_.store.index().Find(keys.data[i]) != kNoRow);
  }
}

inline KeyNumbering Table::MissingKeys(const ParallelFor& parallel, ReadVersion version, KeySpan keys,
                                       const bool* mask) const {
  std::vector<uint32_t> rows(keys.n, kNoRow);
  parallel(version ? keys.n : 0, kGrain, [&](size_t begin, size_t end) {
    in_.store.index().Find(keys.data + begin, end - begin, rows.data() + begin);
  });
  KeyNumbering missing(keys.n + 1);
  for (size_t i = 0; i < keys.n; ++i) {
    if (Valid(mask, i) && rows[i] == kNoRow) missing.Add(keys.data[i]);
  }
  return missing;
}

inline std::vector<std::byte> Table::SharedRow(const ParallelFor& parallel, ReadVersion version, KeySpan keys,
                                               const bool* mask, InitialRows initial) const {
  std::vector<std::byte> row(row_bytes());
  const uint64_t key = spec_.admission.shared_key;
  if (const uint32_t id = in_.store.index().Find(key); id != kNoRow) {
    std::memcpy(row.data(), in_.store.Value(id), row.size());
  } else if (spec_.initializer.kind != Initializer::Kind::kGiven) {
    InitialRowWriter(spec_.initializer, spec_.type, spec_.dim).Add(key, row.data());
  } else {
    const uint32_t number = MissingKeys(parallel, version, keys, mask).Add(key);
    Contents::StoreGiven(spec_, "lookup", number, initial, row.data());
  }
  return row;
}

}  // namespace kvjax
