// Calls that a device table does not let in, or that fail: nothing changes, and the CPU's table says the
// same.
#include "tests/cpp/support/pair.h"

namespace device_refusal {

using namespace pairs;
using device::Of;

/// A table with some of everything, full to the last row.
struct Refusing : Pair {
  explicit Refusing(TableSpec spec = Full()) : Pair(spec, Threads(4, 2), 21, 60) {
    Sink();
    Score();
    for (int i = 0; i < 6; ++i) Write(14, 20);
    Write(1, 5);
    if (spec.max_capacity > 0) CHECK_EQ(gpu.Size(gpu.handle), spec.max_capacity);
    before = gpu.Copy();
    counted = Counted(gpu);
    shown = sunk[1].size();
  }
  static TableSpec Full() {
    TableSpec spec = Spec();
    spec.max_capacity = 40;
    spec.on_full = OnFull::kEvict;
    return spec;
  }
  void Unchanged() {
    CHECK(data::Same(gpu.Copy(), before));
    CHECK_EQ(gpu.version(), cpu.version());
    CHECK(Counted(gpu) == counted);
    CHECK_EQ(sunk[1].size(), shown);
  }
  Snapshot before;
  std::map<std::string, uint64_t> counted;
  size_t shown = 0;
};

TEST(StaleHandlesChangeNothing) {
  for (const bool full : {true, false}) {
    Refusing r(full ? Refusing::Full() : Spec());
    Device& t = r.gpu;
    const Keys keys = r.Batch(12);
    const Mask exists(new bool[12]{});
    const Bytes values(12 * t.row_bytes());
    const Floats rows(12 * 3, 1.0f);
    const Gradients g{.keys = {1000, 1001}, .counts = {1, 1}, .rows = Floats(6)};
    const std::vector<std::function<void()>> calls = {
        [&] { t.Ensure(keys); },
        [&] { t.Pinned(kvjax::Op::kPin, keys); },
        [&] { t.Pinned(kvjax::Op::kUnpin, keys); },
        [&] { t.Put(keys, values); },
        [&] { t.Set(keys, values); },
        [&] { t.Plus(keys, rows); },
        [&] { t.Accumulate(keys, rows, rows, exists.get()); },
        [&] { t.Drop(keys); },
        [&] { t.Prune("all\nleast_recent:99"); },
        [&] { t.Empty(); },
        [&] { t.ForgetSlots(); },
        [&] { t.Restore(data::View(r.before)); },
        [&] { t.Reserve(t.handle, 1000); },
        [&] { t.Train(g, device::Momentum(3), 2); },
        [&] { t.Train(g, {}, 2); },
        [&] { (void)t.Copy(); },
        [&] { (void)t.Size(t.handle); },
        [&] {  // nothing at all is stale too
          t.Ensure({});
        },
        [&] {
          t.Lookup(t.q, {.version = &t.handle});
          t.Raise();
        },
        [&] {
          t.Inspect(t.q, {.version = &t.handle});
          t.Raise();
        },
        [&] {
          t.ReadSlot(t.q, {.version = &t.handle, .slot = "m", .bytes = 12});
          t.Raise();
        },
    };
    for (size_t i = 0; i < calls.size(); ++i) {
      for (const uint32_t wrong : {1u, 0xFFFFFFFFu}) {
        const uint32_t live = t.handle;
        t.handle += wrong;
        const auto code = CodeOf(calls[i]);
        if (code != kvjax::ErrorCode::kFailedPrecondition) std::cerr << "call " << i << ": ";
        CHECK(code == kvjax::ErrorCode::kFailedPrecondition);
        t.handle = live;
        r.Unchanged();
      }
    }
    Bytes out(12 * t.row_bytes());
    const Mask found(new bool[12]);
    const uint32_t stale = t.handle - 1;
    t.Lookup(t.q, {.version = &stale, .keys = data::Span(keys), .rows = out.data(), .found = found.get()});
    for (size_t i = 0; i < 12; ++i) CHECK(!found[i]);
    for (size_t j = 0; j < 36; ++j)
      CHECK(std::isnan(LoadElement(RowType::kFloat32, out.data(), static_cast<long>(j))));
    CHECK_THROWS(kFailedPrecondition, t.Raise());
    r.Unchanged();
    r.Write(0, 12);
  }
}

TEST(TheRefusalOfAnotherCallLeavesAStepToBeDone) {
  Pair pair(Spec(), Threads(4, 2), 23, 40);
  Device& t = pair.gpu;
  const uint32_t stale = t.handle - 1;
  const Bytes values(t.row_bytes(), std::byte{7});
  const Gradients g{.keys = {5}, .counts = {1}, .rows = Floats(3, 1.0f), .canaries = {}};
  const auto write = [&](auto* version, auto* next) {
    t.WriteStep(t.q, {.step = Of(g, version, {}), .values = values.data(), .next = next});
  };
  t.Lookup(t.q, {.version = &stale});
  uint32_t next = 0;
  CHECK_THROWS(kFailedPrecondition, write(&t.handle, &next));
  CHECK_EQ(t.Size(t.handle), 0u);
  t.Write(write);
  const Snapshot rows = t.Copy();
  CHECK_EQ(rows.keys.size(), 1u);
  CHECK(data::SameBytes(rows.values, values));
}

TEST(GradientsThatMergingHasNotMadeChangeNothing) {
  for (const bool full : {true, false}) {
    Refusing r(full ? Refusing::Full() : Spec());
    const auto refused = [&](Gradients g, const kvjax::SlotLayout& layout) {
      g.rows.resize(g.keys.size() * 3);
      CHECK_THROWS(kInvalidArgument, r.gpu.Train(g, layout, 4));
      r.Unchanged();
    };
    const auto momentum = device::Momentum(3);
    Keys fresh;
    for (uint64_t key = 9000; key < 9020; ++key) fresh.push_back(key);
    std::vector<int32_t> ones(20, 1);
    refused({.keys = fresh, .counts = ones, .canaries = {kvjax::kCanary, 7}}, momentum);
    refused({.keys = fresh, .counts = ones, .canaries = {0}}, momentum);
    refused({.keys = {}, .counts = {}, .canaries = {0}}, momentum);
    for (const size_t at : {0, 7, 18}) {
      std::vector<int32_t> counts = ones;
      counts[at] = 0;  // padding in between
      refused({.keys = fresh, .counts = counts}, momentum);
      counts[at] = -1;
      refused({.keys = fresh, .counts = counts}, momentum);
      Keys twice = fresh;
      twice[at] = twice[19];
      refused({.keys = twice, .counts = ones}, momentum);
    }
    r.Write(14, 20);
  }
  // The first step of an optimizer: if it is refused, another one may come.
  Pair pair(Spec(), Threads(4, 2), 22, 40);
  pair.Write(0, 20);
  Gradients g{.keys = {1, 2}, .counts = {1, 1}, .rows = Floats(6), .canaries = {7}};
  const auto code = CodeOf([&] { pair.gpu.Train(g, device::Momentum(3), 2); });
  CHECK(code == kvjax::ErrorCode::kInvalidArgument);
  CHECK(pair.gpu.Layout().empty());
  pair.Compare();
  pair.Write(14, 20);
  kvjax::SlotLayout other;
  other.Add("v", "float32[3]", 12);
  g.canaries = {kvjax::kCanary};
  pair.Both([&] { device::Train(pair.cpu, g, other, {}); }, [&] { pair.gpu.Train(g, other, 2); });
  CHECK_EQ(pair.refusals, 1);
}

TEST(TooFewInitialRowsChangeNothing) {
  for (const bool full : {true, false}) {
    TableSpec spec = full ? Refusing::Full() : Spec();
    spec.initializer.kind = Initializer::Kind::kGiven;
    Refusing r(spec);
    Keys fresh;
    for (uint64_t key = 9000; key < 9010; ++key) fresh.push_back(key);
    const Bytes given = device::RowsFor(fresh, r.gpu.row_bytes());
    CHECK_THROWS(kInvalidArgument, r.gpu.Write([&](auto* version, auto* next) {
      r.gpu.Insert(r.gpu.q, Of(kvjax::Op::kLookupOrInsert, version, fresh, nullptr, {given.data(), 9}, next));
    }));
    r.Unchanged();
    Bytes out(10 * r.gpu.row_bytes());
    const Mask found(new bool[10]);
    r.gpu.Lookup(r.gpu.q, {.version = &r.gpu.handle,
                           .keys = data::Span(fresh),
                           .initial = {given.data(), 9},
                           .rows = out.data(),
                           .found = found.get()});
    CHECK_THROWS(kInvalidArgument, r.gpu.Raise());
    const kvjax::InitialRows few = {given.data(), 9};
    CHECK_THROWS(kInvalidArgument, r.cpu.Lookup(kvjax::Serial, r.cpu.version(), data::Span(fresh), nullptr,
                                                few, kvjax::Missing::kTable, out.data(), found.get()));
    r.Write(0, 10);
  }
}

TEST(LongKeysAreNotReadAsShortOnes) {
  for (const bool wide : {true, false}) {
    for (const bool loaded : {true, false}) {
      Device t(Spec(), Threads(4, 1)), source(Spec(), Threads(4, 1));
      Device& first = loaded ? source : t;
      first.Ensure(wide ? Keys{1, 2, 1ull << 32} : Keys{1, 0xFFFFFFFFull, 0xFFFFFFFF80000000ull});
      if (loaded) t.Restore(data::View(source.Copy()));
      const Keys keys = {1, 3};
      const auto narrow = [&] {
        t.Write([&](auto* version, auto* next) {
          t.Insert(t.q, {.version = version, .keys = data::Span(keys, /*narrow=*/true), .next = next});
        });
      };
      CHECK(CodeOf(narrow) == (wide ? std::optional(kvjax::ErrorCode::kInvalidArgument) : std::nullopt));
      CHECK_EQ(t.Size(t.handle), wide ? 3u : 4u);
      t.Empty();
      CHECK(CodeOf(narrow) == std::nullopt);
    }
  }
}

TEST(AnotherOptimizerMustAsk) {
  Pair pair(Spec(), Threads(4, 2), 23, 40);
  for (int i = 0; i < 3; ++i) pair.Write(14, 20);
  kvjax::SlotLayout other;
  other.Add("v", "float32[3]", 12);
  const Gradients g{.keys = {1, 2}, .counts = {1, 1}, .rows = Floats(6)};
  pair.Both([&] { device::Train(pair.cpu, g, other, {}); }, [&] { pair.gpu.Train(g, other, 2); });
  CHECK_EQ(pair.refusals, 1);
  pair.Write(12, 0);
  pair.Both([&] { device::Train(pair.cpu, g, other, {}); }, [&] { pair.gpu.Train(g, other, 2); });
  CHECK_EQ(pair.refusals, 1);
  CHECK_EQ(pair.gpu.Layout().slots()[0].name, std::string("v"));
}

}  // namespace device_refusal
