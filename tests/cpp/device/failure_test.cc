// Every allocation of every write of the device table fails once, the device's and the host's: the table must
// then be as it was, and work on.
#include <cstdlib>
#include <functional>
#include <new>
#include <thread>

#include "tests/cpp/support/device.h"

namespace {

/// Counts allocations while armed; the one that brings the count to `fail_at` fails.
struct Faults {
  bool armed = false;
  int count = 0;
  int fail_at = 0;

  void Hit() {
    if (armed && ++count == fail_at) throw std::bad_alloc();
  }
} faults;

}  // namespace

// Not inlined, or GCC takes the pair of malloc and delete in its callers for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  faults.Hit();
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using data::Keys;
using kvjax::Snapshot;
using kvjax::TableSpec;
using kvjax::device::Budget;

/// One thread, whose allocations may fail.
class Failing : public kvjax::device::Threads {
 public:
  Failing() : Threads(1) {}
  static Failing Alone(int /*device*/) { return {}; }
  static void* Allocate(size_t bytes, kvjax::device::Use /*use*/ = kvjax::device::Use::kRows) {
    faults.Hit();
    return Threads::Allocate(bytes);
  }
  static void* AllocateShared(size_t bytes) { return Allocate(bytes); }
};

struct Table : device::Device<Failing> {
  explicit Table(const TableSpec& spec, Budget budget = {}) : Device(spec, Failing(), budget) {
    SetSink([this](const Snapshot& rows, std::string_view) { shown += rows.keys.size(); });
  }
  size_t shown = 0;
};

constexpr size_t kDim = 4096;  // 128 rows to a slab

TableSpec Spec() {
  return {.name = "a table whose name does not fit into a std::string",
          .dim = kDim,
          .initializer = data::Elements(kvjax::Distribution::Kind::kConstant, 2.0)};
}

Keys Range(uint64_t begin, uint64_t end) {
  Keys keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

using Op = std::function<void(Table&)>;

/// A step that leaves zeros.
void Begin(Table& t, const Keys& keys, int32_t count, bool slots, int64_t step = -1) {
  const size_t n = keys.size();
  const device::Gradients g{.keys = keys,
                            .counts = std::vector<int32_t>(n, count),
                            .rows = data::Floats(n * kDim),
                            .step = step,
                            .canaries = {kvjax::kCanary}};
  const auto layout = slots ? device::Momentum(kDim) : kvjax::SlotLayout();
  const device::Bytes zeros(n * t.row_bytes());
  std::vector<const std::byte*> written;
  if (slots) written.push_back(zeros.data());
  t.Write([&](auto* version, auto* next) {
    t.WriteStep(t.q,
                {.step = Of(g, version, layout), .values = zeros.data(), .slots = written, .next = next});
  });
}

void Nothing(Table& /*table*/) {}
/// Some rows with holes among them.
void Some(Table& t) {
  Begin(t, Range(0, 20), 3, false);
  t.Drop({3, 4, 5});
  t.Pinned(kvjax::Op::kPin, {7, 8});
}
void Trained(Table& t) {
  Begin(t, Range(0, 20), 3, true);
  Begin(t, Range(20, 40), 1, true);
  t.Drop({3, 4, 5});
}

struct Case {
  Op op;
  int at_least;  // fewer allocations than that, and the test has lost its grip
  TableSpec spec = Spec();
  Op fill = Some;    // what `op` starts from
  int versions = 1;  // that `op` makes
  Budget budget = {};
};

/// Runs the operation, which leads to `after`, with its `fail_at`-th allocation failing; returns whether it
/// had so many.
bool FailsAt(const Case& c, int fail_at, const Snapshot& after, size_t shown) {
  Table table(c.spec, c.budget);
  c.fill(table);
  const uint32_t version = table.handle;
  const Snapshot before = table.Copy();
  const auto counted = device::Counted(table);
  const size_t shown_before = table.shown;
  bool failed = false;
  faults = {true, 0, fail_at};
  try {
    c.op(table);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  faults.armed = false;
  const bool had_so_many =
      faults.count >= fail_at;  // one that is made ahead of need may fail, and the call not
  if (failed) {
    table.handle = version;
    CHECK_EQ(table.version(), version);
    CHECK_EQ(table.SettledVersion(), version);
    CHECK(data::Same(before, table.Copy()));
    CHECK(device::Counted(table) == counted);
    // Only if showing them has failed may rows have been shown that have not been evicted.
    CHECK(table.shown - shown_before <= shown);
    c.op(table);  // now there is memory
  }
  CHECK_EQ(table.handle, version + static_cast<uint32_t>(c.versions));
  CHECK_EQ(table.version(), table.handle);
  CHECK(data::Same(after, table.Copy()));
  return had_so_many;
}

void CheckStrongGuarantee(const Case& c) {
  Table twin(c.spec, c.budget);  // where nothing fails
  c.fill(twin);
  const size_t shown = twin.shown;
  c.op(twin);
  const Snapshot after = twin.Copy();
  int fail_at = 1;
  while (FailsAt(c, fail_at, after, twin.shown - shown)) ++fail_at;
  if (fail_at <= c.at_least) std::cerr << fail_at << " of " << c.at_least << "\n";
  CHECK(fail_at > c.at_least);
}

/// From rows and from none: memory for the first rows is asked for elsewhere.
void CheckKeys(const Op& op, int at_least) {
  CheckStrongGuarantee({op, at_least});
  CheckStrongGuarantee({.op = op, .at_least = at_least, .fill = Nothing});
}

const Keys kMany = [] {  // old keys, new ones, and some of both twice
  Keys keys = Range(15, 30);
  keys.insert(keys.end(), data::kAwkward.begin(), data::kAwkward.end());
  keys.push_back(16);
  return keys;
}();
const data::Floats& Values() {
  static const data::Floats values(kMany.size() * kDim, 0.25f);
  return values;
}
device::Bytes ValueBytes() { return {data::Bytes(Values()), data::Bytes(Values()) + 4 * Values().size()}; }

TEST(InsertUpsertAndPin) {
  const device::Bytes values = ValueBytes();
  CheckKeys([](Table& t) { t.Ensure(kMany); }, 8);
  CheckStrongGuarantee({[&](Table& t) { t.Put(kMany, values); }, 7});
  CheckStrongGuarantee({[](Table& t) { t.Pinned(kvjax::Op::kPin, kMany); }, 7});
}

TEST(AssignAddAndAccum) {
  const device::Bytes values = ValueBytes();
  const device::Mask exists(new bool[kMany.size()]);
  for (size_t i = 0; i < kMany.size(); ++i) exists[i] = i % 3 == 0;
  CheckStrongGuarantee({[&](Table& t) { t.Set(kMany, values); }, 4});
  CheckStrongGuarantee({[&](Table& t) { t.Pinned(kvjax::Op::kUnpin, kMany); }, 4});
  CheckStrongGuarantee({[](Table& t) { t.Plus(kMany, Values()); }, 14});
  CheckKeys([&](Table& t) { t.Accumulate(kMany, Values(), Values(), exists.get()); }, 14);
}

TEST(BeginApply) {
  CheckKeys([](Table& t) { Begin(t, Range(15, 30), 3, true); }, 10);
  TableSpec spec = Spec();
  for (const auto kind : {kvjax::AdmissionSpec::Kind::kMinCount, kvjax::AdmissionSpec::Kind::kProbability}) {
    spec.admission = {.kind = kind, .threshold = 3, .probability = 0.5};
    CheckStrongGuarantee({[](Table& t) { Begin(t, Range(15, 80), 2, true); }, 10, spec, Trained});
  }
}

TEST(PlanApply) {
  const Op plan = [](Table& t) {
    const Keys keys = Range(15, 60);
    const device::Gradients g{
        .keys = keys, .counts = std::vector<int32_t>(keys.size(), 3), .canaries = {kvjax::kCanary}};
    uint32_t status = 7;
    t.PlanApply(t.q, {.step = Of(g, &t.handle, device::Momentum(kDim)), .status = &status});
    CHECK_EQ(status, 0u);
  };
  TableSpec spec = Spec();
  spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 3};
  CheckStrongGuarantee({.op = plan, .at_least = 10, .spec = spec, .versions = 0});
  spec.max_capacity = 50;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy =
      kvjax::Policy::Parse("a reason that does not fit into a std::string\nleast_frequent:needed:3.5");
  CheckStrongGuarantee({.op = plan, .at_least = 14, .spec = spec, .fill = Trained, .versions = 0});
}

TEST(BeginApplyWithEviction) {
  TableSpec spec = Spec();
  spec.max_capacity = 50;
  spec.on_full = kvjax::OnFull::kEvict;
  spec.policy = kvjax::Policy::Parse(
      "a reason that does not fit into a std::string\nmax_age:0 min_frequency:2 and\n"
      "another such reason, as long as the first\nleast_frequent:needed:3.5");
  const Op train = [](Table& t) { Begin(t, Range(15, 60), 2, true); };
  CheckStrongGuarantee({train, 14, spec, Trained});  // too many rows
  spec.max_capacity = 0;
  spec.evict_every = 2;
  CheckStrongGuarantee({train, 14, spec, Trained});  // the second step
  spec.max_capacity = 48;
  CheckStrongGuarantee({train, 14, spec, Some});  // and slots come with it
}

TEST(EvictAndRemove) {
  CheckStrongGuarantee(
      {[](Table& t) { t.Prune("a reason that does not fit into a std::string\nleast_recent:10"); }, 25,
       Spec(), Trained});
  CheckStrongGuarantee({[](Table& t) { t.Drop(Range(0, 40)); }, 0});
}

TEST(ClearAndClearSlots) {
  const auto reserved = [](Table& t) {
    Trained(t);
    t.Reserve(t.handle, 300);
  };
  CheckStrongGuarantee({[](Table& t) { t.Empty(); }, 2});
  CheckStrongGuarantee({[](Table& t) { t.Empty(); }, 8, Spec(), reserved});
  CheckStrongGuarantee({[](Table& t) { t.ForgetSlots(); }, 0, Spec(), Trained});
}

TEST(LoadAndReserve) {
  Table source(Spec());
  Trained(source);
  source.Pinned(kvjax::Op::kPin, Range(35, 60));
  const Snapshot saved = source.Copy();
  const Op load = [&](Table& t) { t.Restore(data::View(saved)); };
  CheckStrongGuarantee({load, 14, Spec(), Trained});
  CheckStrongGuarantee({load, 14, Spec(), Nothing});
  const Op reserve = [](Table& t) { t.Reserve(t.handle, 300); };
  CheckStrongGuarantee({.op = reserve, .at_least = 8, .fill = Trained, .versions = 0});
}

TEST(CursorsAndDeltas) {
  kvjax::CursorToken token = 0;
  const Op change = [&](Table& t) {
    Trained(t);
    token = t.OpenCursor(t.handle);
    t.Drop({7, 8});
    t.Put(Range(30, 50), device::Bytes(20 * t.row_bytes(), std::byte{1}));
  };
  const Op save = [&](Table& t) {
    const kvjax::Delta delta = t.ExportSince(t.handle, token, true);
    CHECK(delta.rows.keys.size() == 20 && delta.removed.size() == 2);
    t.CloseCursor(t.OpenCursor(t.handle));
  };
  CheckStrongGuarantee({.op = save, .at_least = 20, .fill = change, .versions = 0});
}

TEST(RowsInPinnedMemory) {
  // Five slabs of four rows or their slots. Slots are attached and detached, and slabs of values with them.
  const auto check = [](Op op, int at_least, Op fill) {
    CheckStrongGuarantee({std::move(op), at_least, Spec(), std::move(fill), 1, {5 << 16, 1 << 16}});
  };
  check([](Table& t) { t.Ensure(kMany); }, 12, Nothing);
  check([](Table& t) { Begin(t, Range(15, 40), 2, true); }, 20, Some);
  check([](Table& t) { Begin(t, Range(15, 60), 2, true); }, 20, Trained);
  check([](Table& t) { t.ForgetSlots(); }, 0, Trained);
  check([](Table& t) { t.Empty(); }, 2, Trained);
  Table source(Spec());
  Trained(source);
  const Snapshot saved = source.Copy();
  check([&](Table& t) { t.Restore(data::View(saved)); }, 30, Trained);
}

TEST(RowsOfAStepThatCannotBeReadAreAsTheyWere) {
  const Keys keys = Range(15, 30);
  const size_t n = keys.size();
  const device::Gradients g{.keys = keys,
                            .counts = std::vector<int32_t>(n, 1),
                            .rows = data::Floats(n * kDim),
                            .canaries = {kvjax::kCanary}};
  device::Bytes values(n * kDim * 4), slot(n * kDim * 4);
  Keys row_keys(n);
  const device::Mask fresh(new bool[n]);
  int64_t used = 0;
  CheckStrongGuarantee({.op =
                            [&](Table& t) {
                              t.ReadStep(t.q, {.step = Of(g, &t.handle, device::Momentum(kDim)),
                                               .size = n,
                                               .used_step = &used,
                                               .values = values.data(),
                                               .fresh = fresh.get(),
                                               .row_keys = row_keys.data(),
                                               .slots = {slot.data()}});
                            },
                        .at_least = 5,
                        .fill = Trained,
                        .versions = 0});
}

TEST(APassOverTheRowsThatFindsNoMemoryIsLeftOut) {
  // What a step writes it has written, whether rows can be swapped at its end or not; or nothing, where there
  // is not even memory to begin.
  const Keys keys = Range(0, 40);
  const device::Gradients g{.keys = keys,
                            .counts = std::vector<int32_t>(keys.size(), 1),
                            .rows = data::Floats(keys.size() * kDim),
                            .canaries = {kvjax::kCanary}};
  const device::Bytes zeros(keys.size() * kDim * 4), before(zeros.size(), std::byte{1});
  int fail_at = 1, left_out = 0;
  for (bool failed = true; failed; ++fail_at) {
    Table t(Spec(), {5 << 16, 1 << 16});
    t.Put(keys, before);
    uint32_t next = 0;
    faults = {true, 0, fail_at};
    bool begun = true;
    try {
      t.WriteStep(t.q, {.step = Of(g, &t.handle, {}), .values = zeros.data(), .next = &next});
      t.handle = next;
    } catch (const std::bad_alloc&) {
      begun = false;
    }
    faults.armed = false;
    failed = faults.count == fail_at;
    left_out += failed && begun;
    CHECK(data::SameBytes(t.Copy().values, begun ? zeros : before));
  }
  CHECK(left_out > 1);
}

TEST(TheIndexGrows) {
  // Small rows, so that the index is what is made anew; with some erased and marked in it.
  TableSpec spec = Spec();
  spec.dim = 1;
  const Op fill = [](Table& t) {
    t.Ensure(Range(0, 50));
    t.Drop(Range(0, 30));
  };
  CheckStrongGuarantee({[](Table& t) { t.Ensure(Range(100, 300)); }, 8, spec, fill});
  CheckStrongGuarantee({.op = [](Table& t) { t.Reserve(t.handle, 900); },
                        .at_least = 3,
                        .spec = spec,
                        .fill = fill,
                        .versions = 0});
}

TEST(ReadsFailAlone) {
  TableSpec spec = Spec();
  spec.initializer.kind = kvjax::Initializer::Kind::kGiven;
  Table t(spec);
  for (int fail_at = 1, failed = true; failed; ++fail_at) {
    failed = false;
    faults = {true, 0, fail_at};
    try {
      (void)t.Missing(kMany, nullptr);
      (void)t.Copy();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    faults.armed = false;
    CHECK_EQ(t.Size(t.handle), 0u);
  }
}

}  // namespace
