// The strong guarantee of a CPU table: whatever allocation of an operation fails, the table is as it was, and
// the operation can be done again. For one file of a program, or all that are compiled as one.
#pragma once
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/faults.h"

namespace {

using data::Keys;
using data::Live;
using data::State;
using kvjax::Serial;
using kvjax::Snapshot;
using kvjax::TableSpec;

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

constexpr size_t kDim = 2048;  // 256 rows to a slab

/// Constant initial rows: random ones would take most of the test's time.
TableSpec Spec() {
  return {.name = "a table whose name does not fit into a std::string",
          .dim = kDim,
          .initializer = data::Elements(kvjax::Distribution::Kind::kConstant, 2.0)};
}

kvjax::SlotLayout Layout() {
  kvjax::SlotLayout layout;
  layout.Add("a slot whose name does not fit into a std::string", "float32[2048]", 4 * kDim);
  return layout;
}

Keys Range(uint64_t begin, uint64_t end) {
  Keys keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

using Op = std::function<void(Live&)>;

void Nothing(Live& /*table*/) {}

/// Some rows with holes among them; one more key grows the index.
void Some(Live& table) {
  table.Begin(Range(0, 20), std::vector<int32_t>(20, 3));
  table.Drop({3, 4, 5});
  table.Pin({7, 8});
}

/// As Some, with slots, and keys that wait to be admitted where there is an admission.
void Trained(Live& table) {
  table.Begin(Range(0, 20), std::vector<int32_t>(20, 3), Layout());
  table.Begin(Range(20, 40), std::vector<int32_t>(20, 1), Layout(), 1);
  table.Drop({3, 4, 5});
}

struct Case {
  Op op;
  int at_least;  // fewer allocations than that, and the test has lost its grip
  TableSpec spec = Spec();
  Op fill = Some;    // what `op` starts from
  int versions = 1;  // that `op` makes
  Op end = Nothing;  // what must hold after it
};

/// Runs the operation, which leads to `after`, with its `fail_at`-th allocation failing; returns whether it
/// had so many. An index grown before a failure stays so, and each run needs a table of its own: a second try
/// allocates less.
bool FailsAt(const Case& c, int fail_at, const State& after, bool for_good) {
  Live table(c.spec, std::make_shared<FailingSlabs>());
  c.fill(table);
  const uint32_t version = table.version();
  const State before(table);
  bool failed = false;
  faults = {true, for_good, 0, fail_at};
  try {
    c.op(table);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  faults.armed = false;
  if (failed) {
    CHECK_EQ(table.version(), version);
    CHECK(data::Same(before, State(table)));
    c.op(table);  // now there is memory
  }
  CHECK_EQ(table.version(), version + static_cast<uint32_t>(c.versions));
  CHECK(data::Same(after, State(table)));
  c.end(table);
  return failed;
}

/// Fails each allocation in turn.
void CheckStrongGuarantee(const Case& c) {
  Live twin(c.spec);  // where nothing fails
  c.fill(twin);
  c.op(twin);
  const State after(twin);
  for (const bool for_good : {false, true}) {
    int fail_at = 1;
    while (FailsAt(c, fail_at, after, for_good)) ++fail_at;
    CHECK(fail_at > c.at_least);
  }
}

const Keys kMany = [] {  // old keys, new ones, and some of both twice
  Keys keys = Range(15, 30);
  keys.insert(keys.end(), data::kAwkward.begin(), data::kAwkward.end());
  return keys;
}();

const data::Floats& Values() {
  static const data::Floats values(kMany.size() * kDim, 0.25f);
  return values;
}

void Train(Live& t) {
  static const std::vector<int32_t> counts(45, 2);
  t.Begin(Range(15, 60), counts, Layout());
}

}  // namespace
