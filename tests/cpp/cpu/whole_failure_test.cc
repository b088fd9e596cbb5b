// Every allocation of loads, reserves and saves, and of writes beside a save, fails once.
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include "tests/cpp/support/guarantee.h"

namespace {

TEST(LoadWithAdmission) {
  TableSpec spec = Spec();
  spec.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 3};
  static const State state = [&] {
    Live source(spec);
    source.Begin(Range(10, 44), std::vector<int32_t>(34, 3), Layout());
    source.Begin(Range(50, 99), std::vector<int32_t>(49, 1));
    source.Pin({12});
    return State(source);
  }();
  CHECK_EQ(state.admission.keys.size(), 49u);
  const Op load = [](Live& t) { t.Restore(data::View(state.rows), state.admission); };
  CheckStrongGuarantee({load, 12, spec, Trained});
  CheckStrongGuarantee({load, 12, spec, Nothing});
}

/// A save of the rows of Trained, which goes on beside what follows.
struct Save {
  std::shared_ptr<kvjax::Frozen> rows;
  std::unique_ptr<const State> want;
} save;

void Begin(Live& table) {
  Trained(table);
  save = {table.Freeze(table.version(), true).first, std::make_unique<State>(table)};
}

void End(Live& table) {
  Snapshot copied;
  copied.layout = save.rows->layout();
  copied.Resize(save.rows->size(), 4 * kDim);
  copied.offsets = save.rows->offsets();
  copied.last_step = save.rows->last_step();
  const kvjax::SnapshotSpace space = data::SpaceOf(copied);
  CHECK_EQ(table.NextOf(*save.rows, space), copied.keys.size());
  CHECK(data::Same(copied, save.want->rows));
}

TEST(WritesBesideASave) {
  const auto check = [](const Op& op, int at_least) {
    CheckStrongGuarantee({op, at_least, Spec(), Begin, 1, End});
  };
  check([](Live& t) { t.Put(kMany, Values()); }, 12);
  check([](Live& t) { t.Assign(Serial, t.version(), data::Span(kMany), data::Bytes(Values())); }, 6);
  check(Train, 20);
  check([](Live& t) { t.Drop(Range(0, 40)); }, 5);
  check([](Live& t) { t.Unpin(t.version(), data::Span(kMany)); }, 5);
  check([](Live& t) { t.Evict("why\nleast_recent:10"); }, 10);
  check([](Live& t) { t.Clear(t.version()); }, 0);
  check([](Live& t) { t.ClearSlots(t.version()); }, 3);
}

TEST(ASaveThatLacksMemoryGoesOn) {
  const Op freeze = [](Live& t) { save.rows = t.Freeze(t.version(), true).first; };
  CheckStrongGuarantee({freeze, 8, Spec(), Begin, 0, End});
  const auto written = [](Live& t) { Begin(t), Train(t); };
  CheckStrongGuarantee({End, 3, Spec(), written, 0});
}

TEST(Reserve) {
  CheckStrongGuarantee(
      {.op = [](Live& t) { t.Reserve(t.version(), 1500); }, .at_least = 10, .fill = Trained, .versions = 0});
}

TEST(AFailedReserveGivesBackWhatItGained) {
  Live table(Spec(), std::make_shared<FailingSlabs>());
  Trained(table);
  const auto bytes = [&] {
    return table.Observe([](const kvjax::Contents& c) {
      return c.store.value_bytes() + c.store.header_bytes() + c.store.slot_bytes() + c.store.index().bytes();
    });
  };
  const size_t before = bytes();
  int fail_at = 1;
  for (bool failed = true; failed; ++fail_at) {
    failed = false;
    faults = {true, false, 0, fail_at};
    try {
      table.Reserve(table.version(), 3000);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    faults.armed = false;
    CHECK_EQ(bytes() == before, failed);
  }
  CHECK(fail_at > 15);
}

}  // namespace
