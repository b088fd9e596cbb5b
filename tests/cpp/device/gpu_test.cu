// The device table on a real GPU beside the CPU's, without JAX and Python: the launches of a stream, every
// call of a table to the bit, and that nothing waits for what is none of its business. Exits with 77 where
// there is no GPU.
//
// Tests on host threads hand out addresses of the host; these do so too (see support/pinned.h).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "kvjax/ffi/cuda/stream.cuh"
#include "kvjax/ffi/cuda/table.h"
#include "tests/cpp/support/deltas.h"
#include "tests/cpp/support/pair.h"
#include "tests/cpp/support/pinned.h"
#include "tests/cpp/support/trained.h"

namespace {

using namespace pairs;
using kvjax::device::Budget;
using kvjax::device::Stream;
using OnGpu = PairOn<Stream>;

/// A stream of this test.
struct Own {
  Own() { kvjax::device::Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream"); }
  ~Own() { cudaStreamDestroy(stream); }
  operator cudaStream_t() const { return stream; }  // NOLINT
  cudaStream_t stream = nullptr;
};

}  // namespace

// nvcc wants kernels' types outside of unnamed namespaces.
namespace gpu_test {

struct CountEach {
  uint32_t* counts;
  KVJAX_HD void operator()(size_t i) const { kvjax::device::Add(counts[i], 1u); }
};
struct CountTile {
  uint32_t *counts, *sums;
  size_t n;
  KVJAX_HD void operator()(Stream::Tile tile, size_t i) const {
    const auto mine = static_cast<uint32_t>(i);
    uint32_t sum = 0;
    for (int lane = 0; lane < tile.size(); ++lane) sum += tile.Shuffle(mine, lane);
    const int odd = tile.Count(i % 2 == 1);
    if (i >= n) return;
    kvjax::device::Add(counts[i], 1u);
    sums[i] = sum + 1000000u * static_cast<uint32_t>(odd) + static_cast<uint32_t>(tile.rank());
  }
};
struct CountOnce {
  uint32_t* count;
  KVJAX_HD void operator()() const { ++*count; }
};
/// Keeps a stream busy until the host says so, or for ten seconds.
struct Spin {
  volatile uint32_t* go;
  uint32_t* gave_up;
  KVJAX_HD void operator()() const {
#ifdef __CUDA_ARCH__
    for (int i = 0; *go == 0; ++i) {
      __nanosleep(1000000);
      if (i < 10000) continue;
      *gave_up = 1;
      return;
    }
#endif
  }
};

}  // namespace gpu_test

namespace {

TEST(LanesAreAsManyAsAskedFor) {
  const Own own;
  Stream q(own);
  for (const size_t n : {0u, 1u, 7u, 8u, 9u, 31u, 33u, 255u, 256u, 257u, 1000003u}) {
    std::vector<uint32_t> each(n), tiles(n), sums(n);
    uint32_t once = 0;
    q.Each(n, gpu_test::CountEach{each.data()});
    q.Tiles(n, gpu_test::CountTile{tiles.data(), sums.data(), n});
    q.Once(gpu_test::CountOnce{&once});
    q.Wait();
    const auto is_one = [](uint32_t count) { return count == 1; };
    CHECK(std::all_of(each.begin(), each.end(), is_one) && std::all_of(tiles.begin(), tiles.end(), is_one));
    CHECK_EQ(once, 1u);
    for (size_t i = 0; i < n; ++i) {
      const size_t base = i / 8 * 8;
      if (sums[i] == 8 * base + 28 + 4000000u + i % 8) continue;
      CHECK_EQ(sums[i], 8 * base + 28 + 4000000u + i % 8);
      break;
    }
  }
}

TEST(SumsAndSortsAreThoseOfHostThreads) {
  const Own own;
  Stream q(own);
  Threads host(1);
  data::Stream numbers(1);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{1000}, size_t{300001}}) {
    std::vector<uint32_t> x(n), sum(n), want(n), values(n);
    std::vector<uint64_t> keys(n);
    for (size_t i = 0; i < n; ++i) x[i] = static_cast<uint32_t>(numbers.Below(9)), keys[i] = numbers.Next();
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<uint32_t>(i);
    q.ExclusiveSum(x.data(), sum.data(), n);
    host.ExclusiveSum(x.data(), want.data(), n);
    q.Wait();
    CHECK(sum == want);
    for (const int end_bit : {1, 10, 64}) {
      auto k = keys, want_k = keys;
      auto v = values, want_v = values;
      q.SortPairs(k.data(), v.data(), n, end_bit);
      host.SortPairs(want_k.data(), want_v.data(), n, end_bit);
      q.Wait();
      CHECK(k == want_k && v == want_v);
    }
  }
}

TEST(RandomCalls) {
  const Own own;
  OnGpu(Spec(), own.stream, 1, 30).Run(60, 40);
  OnGpu(Spec(5), own.stream, 2, 4000).Run(40, 700);
  OnGpu(Spec(64), own.stream, 3, 60000).Run(12, 30000);
}

TEST(TrainingByProgram) {
  const Own own;
  TableSpec spec = Spec(20);
  spec.initializer = {};
  programs::TrainBesideTheCpu<Stream>(spec, 50000, own.stream);
  for (const int64_t dim : {3, 16, 64}) {  // enough for tiles of eight rows, also side by side
    spec.dim = dim;
    programs::TrainBesideTheCpu<Stream>(spec, 150000, own.stream);
  }
  spec.dim = 20;
  spec.admission.kind = AdmissionSpec::Kind::kMinCount;
  spec.admission.threshold = 2;
  spec.admission.unadmitted = AdmissionSpec::Unadmitted::kShared;
  spec.admission.shared_key = 7;
  programs::TrainBesideTheCpu<Stream>(spec, 20000, own.stream);
}

TEST(RowTypesAndInitialRows) {
  const Own own;
  auto pool = std::make_shared<std::vector<float>>(3 * 7, 0.37f);
  for (const RowType type : {RowType::kFloat32, RowType::kBFloat16, RowType::kFloat16}) {
    for (const Initializer& initializer : data::EachInitializer(pool, 9)) {
      TableSpec spec = Spec();
      spec.type = type;
      spec.initializer = initializer;
      OnGpu(spec, own.stream, 1, 60).Run(12, 40);
    }
  }
}

TEST(TablesThatAreFull) {
  const Own own;
  for (const OnFull on_full : {OnFull::kGrow, OnFull::kEvict, OnFull::kError}) {
    for (const char* policy : {"", "rare\nmin_frequency:3\nmost\nleast_frequent:needed:3.5"}) {
      TableSpec spec = Spec();
      spec.max_capacity = 45;
      spec.on_full = on_full;
      if (*policy != 0) spec.policy = kvjax::Policy::Parse(policy);
      OnGpu pair(spec, own.stream, 11, 80);
      pair.Sink();
      pair.Run(30, 30);
    }
  }
  TableSpec spec = Spec(8);  // so many rows that the blocks of a ranking wait for each other
  spec.max_capacity = 200000;
  spec.on_full = OnFull::kEvict;
  OnGpu(spec, own.stream, 12, 400000).Run(10, 150000);
}

TEST(Admissions) {
  const Own own;
  using Kind = AdmissionSpec::Kind;
  for (const auto kind : {Kind::kMinCount, Kind::kSketch, Kind::kProbability}) {
    TableSpec spec = Spec();
    spec.admission = {.kind = kind,
                      .unadmitted = AdmissionSpec::Unadmitted::kShared,
                      .shared_key = 1,
                      .threshold = 5,
                      .cells = kind == Kind::kSketch ? 8u : 0u,
                      .probability = 0.4};
    OnGpu pair(spec, own.stream, 13, 120);
    for (int step = 0; step < 10; ++step) pair.Write(14, 30), pair.Read(30);
  }
}

TEST(RowsInTwoMemories) {
  const Own own;
  OnGpu(Spec(), own.stream, 14, 130, Budget{.bytes = 1024, .slab_bytes = 256}).Run(40, 60);
  OnGpu(Spec(), own.stream, 15, 130, Budget{.bytes = 0, .slab_bytes = 256}).Run(20, 60);
}

TEST(DeltasOfAnyWrites) {
  const Own own;
  TableSpec spec = Spec(8);
  CHECK(deltas::CheckRandomWrites<Stream>(spec, own.stream, 1) > 10);
  spec = Spec(3);
  spec.type = RowType::kBFloat16;  // rows that end within a word
  CHECK(deltas::CheckRandomWrites<Stream>(spec, own.stream, 2) > 10);
  CHECK(deltas::CheckRandomWrites<Stream>(Spec(), own.stream, 5, {.bytes = 1024, .slab_bytes = 256}) > 10);
}

TEST(CallsOnTwoStreamsFollowEachOther) {
  const Own one, two;
  OnGpu pair(Spec(32), one.stream, 16, 20000);
  Stream a(one), b(two);
  uint32_t* const handles = new uint32_t[64];
  handles[0] = pair.gpu.handle;
  std::vector<Keys> batches;
  for (int i = 0; i < 63; ++i) batches.push_back(pair.Batch(5000));
  for (int i = 0; i < 63; ++i) {
    pair.gpu.Insert(i % 2 == 0 ? a : b, device::Of(kvjax::Op::kLookupOrInsert, handles + i, batches[i],
                                                   nullptr, {}, handles + i + 1));
  }
  a.Wait(), b.Wait();
  pair.gpu.Raise();
  for (const Keys& batch : batches) pair.cpu.Ensure(batch);
  pair.gpu.handle = handles[63];
  delete[] handles;
  pair.Compare();
}

TEST(NothingWaitsForAnotherStream) {
  if (std::getenv("KVJAX_TEST_SANITIZED") != nullptr) return;  // which runs one kernel at a time
  const Own own, other;
  volatile uint32_t go = 0;
  uint32_t gave_up = 0;
  Stream busy(other);
  busy.Once(gpu_test::Spin{&go, &gave_up});
  {
    OnGpu pair(Spec(), own.stream, 17, 100);  // made, grown, read, and dropped meanwhile
    pair.Run(10, 60);
    pair.gpu.Settle();
    (void)pair.gpu.Stats();
  }
  go = 1;
  busy.Wait();
  CHECK_EQ(gave_up, 0u);
}

TEST(ACaptureIsNotDisturbed) {
  const Own own, captured;
  OnGpu pair(Spec(), own.stream, 18, 100);
  pair.Run(5, 60);
  std::atomic<int> stage = 0;
  cudaGraph_t graph = nullptr;
  cudaError_t begun = cudaSuccess, ended = cudaSuccess;
  std::thread capturing([&] {
    begun = cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal);
    stage = 1;
    while (stage != 2) std::this_thread::yield();
    ended = cudaStreamEndCapture(captured, &graph);
  });
  while (stage != 1) std::this_thread::yield();
  try {
    pair.Run(5, 60);
    OnGpu(Spec(), own.stream, 19, 100).Run(3, 60);
  } catch (...) {
    stage = 2;
    capturing.join();
    throw;
  }
  stage = 2;
  capturing.join();
  CHECK_EQ(begun, cudaSuccess);
  CHECK_EQ(ended, cudaSuccess);
  if (graph != nullptr) cudaGraphDestroy(graph);
}

TEST(AMillionBadLanesAreOneRefusal) {
  const Own own;
  OnGpu pair(Spec(1), own.stream, 20, 100);
  const size_t n = 1000000;
  Gradients g{.keys = Keys(n, 5), .counts = std::vector<int32_t>(n, -1), .rows = Floats(n)};
  CHECK_THROWS(kInvalidArgument, pair.gpu.Train(g, {}, n));
}

}  // namespace

int main() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("no GPU: %s\n", kvjax::device::ErrorText(error).c_str());
    return 77;
  }
  return pinned::Run([] { return check::Run(); });
}
