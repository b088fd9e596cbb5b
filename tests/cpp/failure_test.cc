// Every allocation of every write fails once: the table must then be as it was, and work on.
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "tests/cpp/check.h"
#include "tests/cpp/data.h"

namespace {

/// Counts allocations while armed. The one that brings the count to `fail_at` fails, and with `for_good` all
/// behind it too, as on a machine that is out of memory.
struct Faults {
  bool armed = false;
  bool for_good = false;
  int count = 0;
  int fail_at = 0;

  void Hit() {
    if (!armed) return;
    ++count;
    if (count == fail_at || (for_good && count > fail_at)) throw std::bad_alloc();
  }
} faults;

}  // namespace

// Not inlined, or GCC takes the pair of malloc and delete in its callers for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  faults.Hit();
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using data::Keys;
using data::Live;
using kvjax::Serial;
using kvjax::Snapshot;

class FailingSlabs final : public kvjax::SlabAllocator {
 public:
  std::byte* Allocate(size_t bytes) override {
    faults.Hit();
    return host_.Allocate(bytes);
  }
  void Free(std::byte* slab, size_t bytes) noexcept override { host_.Free(slab, bytes); }

 private:
  kvjax::HostSlabs host_;
};

constexpr size_t kDim = 16384;  // 32 rows to a slab, so that few keys need many

/// Constant initial rows: random ones would take most of the test's time.
kvjax::TableSpec Spec() {
  return {"a table whose name does not fit into a std::string",
          kDim,
          kvjax::RowType::kFloat32,
          {kvjax::Initializer::Kind::kConstant, 2.0, 0.0, 0}};
}

kvjax::SlotLayout Layout() {
  kvjax::SlotLayout layout;
  layout.Add("a slot whose name does not fit into a std::string", "float32[16384]", 4 * kDim);
  return layout;
}

Keys Range(uint64_t begin, uint64_t end) {
  Keys keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

/// What everything starts from: nothing, or some rows with holes among them.
void Fill(Live& table, bool filled) {
  if (!filled) return;
  table.Begin(Range(0, 20), std::vector<int32_t>(20, 2));  // one more key grows the index
  table.Drop({3, 4, 5});
}

using Op = std::function<void(Live&)>;

/// Runs `op`, which leads to `after`, with its `fail_at`-th allocation failing; returns whether it had so
/// many. An index grown before a failure stays so, and each run needs a table of its own: a second try
/// allocates less.
bool FailsAt(int fail_at, const Op& op, const Snapshot& after, bool filled, bool for_good) {
  Live table(Spec(), std::make_shared<FailingSlabs>());
  Fill(table, filled);
  const uint32_t version = table.version();
  const Snapshot before = kvjax::Export(table, table.version(), true);
  bool failed = false;
  faults = {true, for_good, 0, fail_at};
  try {
    op(table);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  faults.armed = false;
  if (failed) {
    CHECK_EQ(table.version(), version);
    CHECK(data::Same(before, kvjax::Export(table, table.version(), true)));
    op(table);  // now there is memory
  }
  CHECK_EQ(table.version(), version + 1);
  CHECK(data::Same(after, kvjax::Export(table, table.version(), true)));
  return failed;
}

/// Fails each allocation of `op` in turn. There must be more than `at_least`, or the test has lost its grip.
void CheckStrongGuarantee(const Op& op, int at_least) {
  for (const bool filled : {true, false}) {
    Live twin(Spec());  // where nothing fails
    Fill(twin, filled);
    op(twin);
    const Snapshot after = kvjax::Export(twin, twin.version(), true);
    for (const bool for_good : {false, true}) {
      int fail_at = 1;
      while (FailsAt(fail_at, op, after, filled, for_good)) ++fail_at;
      if (filled) CHECK(fail_at > at_least);
    }
  }
}

const Keys kMany = [] {  // old keys, new ones, and some of both twice
  Keys keys = Range(15, 30);
  keys.insert(keys.end(), data::kAwkward.begin(), data::kAwkward.end());
  return keys;
}();

TEST(Insert) {
  CheckStrongGuarantee([](Live& t) { t.Insert(Serial, t.version(), data::Span(kMany)); }, 10);
}

TEST(Upsert) {
  static const data::Floats values(kMany.size() * kDim, 0.25f);
  CheckStrongGuarantee([](Live& t) { t.Upsert(Serial, t.version(), data::Span(kMany), data::Bytes(values)); },
                       10);
}

TEST(BeginApply) {
  static const Keys keys = Range(15, 30);
  static const std::vector<int32_t> counts(keys.size(), 3);
  static const kvjax::SlotLayout layout = Layout();
  static std::vector<uint32_t> ids(keys.size());
  CheckStrongGuarantee(
      [](Live& t) {
        int32_t active = 0;
        t.BeginApply(Serial, t.version(), data::Span(keys), counts.data(), -1, layout, ids.data(), &active);
      },
      12);
}

TEST(Remove) {
  static const Keys keys = Range(0, 40);
  CheckStrongGuarantee([](Live& t) { t.Remove(t.version(), data::Span(keys)); }, 1);
}

TEST(RemovalOneByOneSeldomAllocates) {
  // Else each would copy the list of free rows.
  Live table(1);
  table.Add(Range(0, 5000));
  faults = {.armed = true};
  for (uint64_t key = 0; key < 5000; ++key) {
    const uint64_t removed = key;
    table.Remove(table.version(), {&removed, 1});
  }
  faults.armed = false;
  CHECK(faults.count < 30);
}

TEST(ClearAndClearSlots) {
  CheckStrongGuarantee([](Live& t) { t.Clear(t.version()); }, 1);
  CheckStrongGuarantee([](Live& t) { t.ClearSlots(t.version()); }, 0);
}

TEST(Replace) {
  static const Snapshot snapshot = [] {
    Live source(Spec());
    source.Begin(Range(10, 44), std::vector<int32_t>(34, 1), Layout());
    return kvjax::Export(source, source.version(), true);
  }();
  static const kvjax::SnapshotView view = data::View(snapshot);
  CheckStrongGuarantee([](Live& t) { kvjax::Load(t, t.version(), view); }, 15);
}

}  // namespace
