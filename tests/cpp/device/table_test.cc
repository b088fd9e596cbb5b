// The device table on host threads against the CPU's: the same after every call, to the bit.
#include "tests/cpp/support/pair.h"

namespace device_table {

using namespace pairs;

TEST(RandomCallsOnFewKeys) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    Pair pair(Spec(), Threads(4, 1), seed, 30);
    pair.Sink();
    pair.Run(50, 40);
    CHECK_EQ(pair.refusals, 0);
  }
}

TEST(RandomCallsOnManyKeys) {
  Pair pair(Spec(5), Threads(4, 16), 5, 4000);
  pair.Run(30, 700);
  CHECK_EQ(pair.refusals, 0);
}

TEST(RowTypesAndInitialRows) {
  auto pool = std::make_shared<std::vector<float>>();
  for (int i = 0; i < 3 * 7; ++i) pool->push_back(static_cast<float>(i) * 0.37f);
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (const Initializer& initializer : data::EachInitializer(pool, 9)) {
      TableSpec spec = Spec();
      spec.type = type;
      spec.initializer = initializer;
      Pair pair(spec, Threads(4, 8), 1, 60);
      pair.Run(12, 40);
      CHECK_EQ(pair.refusals, 0);
    }
  }
}

TEST(TablesThatAreFull) {
  for (const OnFull on_full : {OnFull::kGrow, OnFull::kEvict, OnFull::kError}) {
    for (const char* policy : {"", "rare\nmin_frequency:3\nmost\nleast_frequent:needed:3.5"}) {
      TableSpec spec = Spec();
      spec.max_capacity = 45;
      spec.on_full = on_full;
      if (*policy != 0) spec.policy = kvjax::Policy::Parse(policy);
      Pair pair(spec, Threads(4, 4), 11, 80);
      pair.Sink();
      pair.Run(30, 30);
      CHECK_EQ(pair.refusals > 0, on_full == OnFull::kError);
    }
  }
}

TEST(PoliciesThatRunBySteps) {
  TableSpec spec = Spec();
  spec.evict_every = 3;
  spec.policy = kvjax::Policy::Parse("old\nmax_age:2");
  spec.count_batches = true;
  Pair pair(spec, Threads(4, 2), 12, 100);
  pair.Sink();
  pair.Run(60, 30);
  CHECK(!pair.sunk[0].empty());
}

TEST(Admissions) {
  using Unadmitted = AdmissionSpec::Unadmitted;
  using Kind = AdmissionSpec::Kind;
  for (const auto kind : {Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    for (const auto unadmitted : {Unadmitted::kInitial, Unadmitted::kZeros, Unadmitted::kShared}) {
      for (const bool given : {false, true}) {
        TableSpec spec = Spec();
        spec.admission = {.kind = kind,
                          .unadmitted = unadmitted,
                          .shared_key = given ? 1u : 1ull << 50,  // a key of the calls, or another
                          .threshold = 5,
                          .cells = kind == Kind::kSketch ? 8u : 0u,
                          .halve_every = kind == Kind::kSketch ? 5 : 0,
                          .probability = 0.4};
        if (given) spec.initializer.kind = Initializer::Kind::kGiven;
        if (given) spec.max_capacity = 70, spec.on_full = OnFull::kEvict;
        Pair pair(spec, Threads(4, 8), 13, 120);
        for (int step = 0; step < 5; ++step) pair.Write(14, 30), pair.Read(30);
        pair.Run(kind == Kind::kSketch ? 4 : 8, 30);
        CHECK_EQ(pair.refusals, 0);
      }
    }
  }
}

TEST(AdmissionsThatForget) {
  for (const bool by_age : {true, false}) {
    TableSpec spec = Spec();
    spec.admission = {.kind = AdmissionSpec::Kind::kMinCount,
                      .threshold = 4,
                      .max_age = by_age ? 3 : 0,
                      .max_waiting = by_age ? 0u : 25u};
    Pair pair(spec, Threads(4, 8), 14, 80);
    for (const uint64_t op : {14, 14, 14, 0, 14, 7, 14, 9, 14, 14, 14, 14, 14, 14, 11, 14})
      pair.Write(op, 16);
    CHECK_EQ(pair.refusals, 0);
  }
}

TEST(KeysThatShareCellsOfASketch) {
  TableSpec spec = Spec();
  spec.admission = {.kind = AdmissionSpec::Kind::kSketch, .threshold = 9, .cells = 16};
  Pair pair(spec, Threads(4, 8), 15, 0);
  for (uint64_t key = 0; pair.keys.size() < 30; ++key) {  // they are those of one bucket
    if (kvjax::BucketOf(key) == 0) pair.keys.push_back(key);
  }
  for (int step = 0; step < 6; ++step) pair.Write(14, 8), pair.Read(8);
  CHECK_EQ(pair.refusals, 0);
}

TEST(RowsOfSeveralSlabs) {
  // Rows of 128 KiB, sixteen to a slab: row ids and planes cover many slabs, and freed ones are used again.
  Pair pair(Spec(32768), Threads(4, 2), 24, 40);
  for (const uint64_t op : {0, 7, 0, 14, 7, 7, 14, 9, 0, 3, 11, 0}) pair.Write(op, 12);
}

TEST(LoadsAreWhole) {
  Pair pair(Spec(), Threads(4, 64), 25, 3000);
  for (int i = 0; i < 5; ++i) pair.Write(14, 900);
  const Snapshot saved = pair.gpu.Copy();
  pair.Write(11, 0);
  pair.Both([&] { pair.cpu.Restore(data::View(saved)); }, [&] { pair.gpu.Restore(data::View(saved)); });
  CHECK_EQ(pair.gpu.Size(pair.gpu.handle), saved.keys.size());
  for (const auto spoil : {0, 1, 2, 3, 4}) {
    Snapshot bad = saved;
    if (spoil == 0) bad.keys[5] = bad.keys[700];
    if (spoil == 1) bad.frequencies[3] = -1;
    if (spoil == 2) bad.last_step = -1;
    if (spoil == 3) bad.versions[3] = -1;
    if (spoil == 4) bad.versions[3] = bad.last_step + 1;
    pair.Both([&] { pair.cpu.Restore(data::View(bad)); }, [&] { pair.gpu.Restore(data::View(bad)); });
  }
  CHECK_EQ(pair.refusals, 5);
  pair.Run(10, 900);
}

TEST(ReadsCountWhileRowsAreLoaded) {
  Pair pair(Spec(), Threads(4, 64), 26, 300);
  pair.Write(0, 100);
  const Snapshot saved = pair.gpu.Copy();
  pair.Write(14, 100);
  auto on_cpu = data::Ready<kvjax::Table>(pair.cpu, pair.cpu.version(), data::View(saved));
  auto on_gpu = data::Ready(pair.gpu, pair.gpu.handle, data::View(saved));
  const uint64_t before = Counted(pair.gpu)["hits"];
  pair.Read(200);
  CHECK(Counted(pair.gpu)["hits"] > before);
  pair.Both([&] { pair.cpu.CommitLoad(std::move(on_cpu)); },
            [&] { pair.gpu.handle = pair.gpu.CommitLoad(std::move(on_gpu)); });
  pair.Run(10, 100);
}

}  // namespace device_table
