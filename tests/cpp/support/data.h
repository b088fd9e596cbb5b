// What several tests share: a deterministic stream of numbers, awkward keys and a way to call a table.
#pragma once
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/hash.h"
#include "kvjax/ffi/core/secret.h"
#include "kvjax/ffi/core/snapshot.h"
#include "kvjax/ffi/cpu/table.h"

namespace data {

/// The n-th number is Mix(n * odd constant): splitmix64, the same on every machine.
class Stream {
 public:
  explicit Stream(uint64_t seed) : state_(seed) {}
  uint64_t Next() { return kvjax::Mix(state_ += 0x9E3779B97F4A7C15ull); }
  /// A number below n; its bias does not matter here.
  uint64_t Below(uint64_t n) { return Next() % n; }

 private:
  uint64_t state_;
};

/// Keys that other tables reserve for themselves, among them HierarchicalKV's markers for empty, reclaimed
/// and locked places, and the ends of the integer types.
inline const std::vector<uint64_t> kAwkward = {
    0,
    1,
    static_cast<uint64_t>(-1),
    static_cast<uint64_t>(-2),
    static_cast<uint64_t>(-3),
    static_cast<uint64_t>(-4),
    0x8000000000000000ull,  // INT64_MIN
    0x8000000000000001ull,
    0x7FFFFFFFFFFFFFFFull,  // INT64_MAX
    0x7FFFFFFFFFFFFFFEull,
    0x7FFFFFFFull,
    0x80000000ull,
    0xFFFFFFFFull,  // kNoRow, if it were a key
    0x100000000ull,
    0xFFFFFFFF00000000ull,
    0xFFFFFFFF80000000ull,  // INT32_MIN
    0xFFFFFFFF7FFFFFFFull,
};

using Keys = std::vector<uint64_t>;

/// n keys whose hashes by Mix, which is public, differ in the low bits or in the 16 high ones alone: whoever
/// chooses ids can choose such as these.
inline Keys Colliding(size_t n, bool low) {
  Keys keys;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t x = low ? (uint64_t{0x9E37} << 48) + i : i << 48;
    x ^= x >> 31 ^ x >> 62;
    x *= 0x319642b2d24d8ec3ull;  // the inverses of Mix's factors
    x ^= x >> 27 ^ x >> 54;
    x *= 0x96de1b173f119089ull;
    keys.push_back(x ^ x >> 30 ^ x >> 60);
  }
  return keys;
}

/// Processor seconds of run(), at best of three: what others do on the machine is not in it.
template <class F>
double Seconds(F run) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double start = now();
    run();
    best = std::min(best, now() - start);
  }
  return best;
}

/// The same for keys that collide by the hash of the format: with the secret of the process, and with none.
template <class F>
std::pair<double, double> SecondsBySecret(F run) {
  const double spread = Seconds(run);
  const uint64_t secret = std::exchange(kvjax::Secret(), 0);
  const double together = Seconds(run);
  kvjax::Secret() = secret;
  return {spread, together};
}

using Floats = std::vector<float>;

inline kvjax::KeySpan Span(const Keys& keys, bool narrow = false) {
  return {keys.data(), keys.size(), narrow};
}

inline const std::byte* Bytes(const Floats& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

/// An initializer whose elements are all distributed alike.
inline kvjax::Initializer Elements(kvjax::Distribution::Kind kind, double a, double b = 0,
                                   uint64_t seed = 0) {
  kvjax::Initializer made;
  made.Set(0, {.of = {kind, a, b}});
  made.seed = seed;
  return made;
}

/// One of each kind, that of two segments with the first columns apart; the pool has whole rows.
inline std::vector<kvjax::Initializer> EachInitializer(std::shared_ptr<const std::vector<float>> pool,
                                                       uint64_t seed) {
  using Kind = kvjax::Distribution::Kind;
  std::vector<kvjax::Initializer> each;
  for (const Kind kind : {Kind::kConstant, Kind::kUniform, Kind::kNormal, Kind::kTruncatedNormal}) {
    each.push_back(Elements(kind, -0.75, 1.5, seed));
  }
  each.push_back(each.front());
  each.back().Set(0, {2, {Kind::kConstant, 0.5}});
  each.back().Set(1, {.of = {Kind::kNormal, 0.0, 2.0}});
  each.emplace_back();
  each.back().kind = kvjax::Initializer::Kind::kPool;
  each.back().pool = std::move(pool);
  each.emplace_back();
  each.back().kind = kvjax::Initializer::Kind::kGiven;
  return each;
}

inline kvjax::TableSpec Spec(int64_t dim) {
  return {.name = "t", .dim = dim, .initializer = Elements(kvjax::Distribution::Kind::kNormal, 0.0, 1.0, 7)};
}

inline constexpr size_t kMostKeys = 10'000;

using Targets = std::vector<kvjax::Table::Target>;

/// A mask for n keys of which all are valid.
inline const bool* AllOf(size_t n) {
  static const std::unique_ptr<bool[]> ones = [] {
    auto mask = std::make_unique<bool[]>(kMostKeys);
    std::fill_n(mask.get(), kMostKeys, true);
    return mask;
  }();
  return n <= kMostKeys ? ones.get() : nullptr;
}

/// The rows begin..end of a view of a table with rows of so many bytes.
inline kvjax::SnapshotView Part(kvjax::SnapshotView view, size_t row_bytes, size_t begin, size_t end) {
  view.n = end - begin;
  kvjax::EachColumn(
      row_bytes,
      [&](const char*, size_t width, auto& column) {
        if (column != nullptr) column += begin * width;
      },
      view);
  for (size_t s = 0; s < view.slots.size(); ++s) view.slots[s] += begin * view.layout.slots()[s].bytes;
  return view;
}

/// Contents that are ready for a table, which were added in two parts.
template <class T>
typename T::Loaded Ready(T& table, uint32_t version, const kvjax::SnapshotView& rows,
                         const kvjax::AdmissionState& admission = {}) {
  auto loaded = table.BeginLoad(version, {rows.n, rows.layout, rows.last_step, admission});
  for (const auto& [begin, end] : {std::pair(size_t{0}, rows.n / 3), std::pair(rows.n / 3, rows.n)}) {
    table.AddLoaded(loaded, Part(rows, table.row_bytes(), begin, end));
  }
  table.EndLoad(loaded);
  return loaded;
}

/// A float32 table that is always called through its live version, on this thread.
struct Live : kvjax::Table {
  explicit Live(kvjax::TableSpec spec,
                std::shared_ptr<kvjax::SlabAllocator> slabs = std::make_shared<kvjax::HostSlabs>(),
                uint32_t first_version = 0)
      : Table(std::move(spec), std::move(slabs), first_version) {}
  explicit Live(int64_t dim) : Live(Spec(dim)) {}

  void Ensure(const Keys& keys) { Insert(kvjax::Serial, version(), Span(keys), {}); }
  void Put(const Keys& keys, const Floats& values) {
    Upsert(kvjax::Serial, version(), Span(keys), Bytes(values));
  }
  void Drop(const Keys& keys) { Remove(version(), Span(keys)); }
  void Evict(const std::string& policy, int64_t step = -1) {
    Table::Evict(kvjax::Serial, "evict", version(), kvjax::Policy::Parse(policy), step);
  }
  std::vector<uint32_t> Victims(const std::string& policy, int64_t step = -1) {
    const kvjax::Policy parsed = kvjax::Policy::Parse(policy);
    std::vector<uint32_t> counts(parsed.size());
    CountVictims(kvjax::Serial, version(), parsed, step, counts);
    return counts;
  }
  void Pin(const Keys& keys) { Table::Pin(kvjax::Serial, version(), Span(keys), {}); }
  void Restore(const kvjax::SnapshotView& rows, const kvjax::AdmissionState& admission = {}) {
    CommitLoad(Ready<kvjax::Table>(*this, version(), rows, admission));
  }
  [[nodiscard]] kvjax::Snapshot Copy(bool with_slots = true) const { return Export(version(), with_slots); }

  /// Rows that a step touches, which is to be gone on with. gradients: (n, dim), zeros if there are none.
  /// Sets `token`, `shared_gradient` and `step`.
  Targets Open(const Keys& keys, const std::vector<int32_t>& counts, const kvjax::SlotLayout& layout = {},
               int64_t at_step = -1, Floats gradients = {}, kvjax::InitialRows initial = {}) {
    Targets targets(keys.size() + 1);  // with nothing written behind the keys
    targets.back() = {123, 456};
    gradients.resize(keys.size() * static_cast<size_t>(spec().dim));
    shared_gradient.assign(static_cast<size_t>(spec().dim), 1e30f);
    int32_t active = 0;
    token = BeginApply(kvjax::Serial, version(), Span(keys), counts.data(), gradients.data(), at_step, layout,
                       initial, {targets.data(), &active, &step, shared_gradient.data()});
    if (targets.back().row != 123 || targets.back().gradient != 456)
      throw std::logic_error("too many targets");
    targets.resize(static_cast<size_t>(active));
    return targets;
  }
  /// A whole step that makes and counts its rows, and leaves their values and slots as they are.
  Targets Begin(const Keys& keys, const std::vector<int32_t>& counts, const kvjax::SlotLayout& layout = {},
                int64_t at_step = -1, Floats gradients = {}, kvjax::InitialRows initial = {}) {
    Targets targets = Open(keys, counts, layout, at_step, std::move(gradients), initial);
    End(layout);
    return targets;
  }
  void End(const kvjax::SlotLayout& layout = {}) {
    const std::vector<const std::byte*> none(layout.slots().size());
    Scatter(kvjax::Serial, token, nullptr, 0, nullptr, none, /*last=*/true);
  }
  /// One occurrence of each key.
  Targets Train(const Keys& keys, int64_t at_step = -1) {
    return Begin(keys, std::vector<int32_t>(keys.size(), 1), {}, at_step);
  }
  Floats shared_gradient;
  int64_t step = 0;
  uint32_t token = 0;

  [[nodiscard]] Floats Rows(const Keys& keys, std::vector<uint8_t>* found = nullptr,
                            kvjax::Missing missing = kvjax::Missing::kTable) const {
    Floats rows(keys.size() * static_cast<size_t>(spec().dim));
    const auto flags = std::make_unique<bool[]>(keys.size());
    Lookup(kvjax::Serial, version(), Span(keys), AllOf(keys.size()), {}, missing,
           reinterpret_cast<std::byte*>(rows.data()), flags.get());
    if (found != nullptr) found->assign(flags.get(), flags.get() + keys.size());
    return rows;
  }

  struct Info {
    bool found = false;
    int64_t frequency = 0;
    int64_t version = 0;
    bool pinned = false;
    bool operator==(const Info&) const = default;
  };
  [[nodiscard]] Info Of(uint64_t key) const {
    Info info;
    Inspect(kvjax::Serial, "inspect", version(), {&key, 1}, &info.found, &info.frequency, &info.version,
            &info.pinned);
    return info;
  }
  /// The keys that have rows, in order.
  [[nodiscard]] std::set<uint64_t> KeySet() const {
    const auto keys = Copy(false).keys;
    return {keys.begin(), keys.end()};
  }
};

/// The arrays of a snapshot as space for other rows.
inline kvjax::SnapshotSpace SpaceOf(kvjax::Snapshot& s) {
  kvjax::SnapshotSpace space;
  space.n = s.keys.size();
  kvjax::EachColumn(0, [](const char*, size_t, auto& array, auto& to) { to = array; }, s, space);
  for (auto& slot : s.slots) space.slots.emplace_back(slot);
  return space;
}

inline kvjax::SnapshotView View(const kvjax::Snapshot& s) {
  kvjax::SnapshotView view;
  view.n = s.keys.size();
  const auto borrow = [](const char*, size_t, auto& to, const auto& from) { to = from.data(); };
  kvjax::EachColumn(0, borrow, view, s);
  for (const auto& slot : s.slots) view.slots.push_back(slot.data());
  view.layout = s.layout;
  view.last_step = s.last_step;
  return view;
}

/// Also what operator== says, but not byte by byte in a sanitizer's hands.
template <class A, class B>
bool SameBytes(const A& a, const B& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
}

inline bool Same(const kvjax::Snapshot& a, const kvjax::Snapshot& b) {
  bool same = a.offsets == b.offsets && a.layout == b.layout && a.last_step == b.last_step &&
              a.slots.size() == b.slots.size();
  const auto compare = [&](const char*, size_t, const auto& x, const auto& y) { same &= SameBytes(x, y); };
  kvjax::EachColumn(0, compare, a, b);
  for (size_t s = 0; same && s < a.slots.size(); ++s) same = SameBytes(a.slots[s], b.slots[s]);
  return same;
}

/// All that a table knows and that is not a statistic.
struct State {
  kvjax::Snapshot rows;
  kvjax::AdmissionState admission;
  explicit State(const Live& table) : rows(table.Copy()), admission(table.ExportAdmission(table.version())) {}
};
inline bool Same(const State& a, const State& b) {
  return Same(a.rows, b.rows) && a.admission.keys == b.admission.keys &&
         a.admission.counts == b.admission.counts && a.admission.cells == b.admission.cells;
}

}  // namespace data
