// What calls on a device table cost apart from the work of their kernels: kernels, allocations, and waits of
// the host. docs/cuda.md has the table that this prints, and must have it as it is.
#include <fstream>
#include <iomanip>
#include <sstream>

#include "tests/cpp/support/later.h"
#include "tests/cpp/support/program.h"

namespace device_calls {

using data::Keys;
using device::Of;
using kvjax::Op;
using kvjax::TableSpec;
using later::Chain;
using later::Later;

struct Counts {
  size_t kernels = 0, fills = 0, sums = 0, sorts = 0, allocations = 0;
};
/// Counts what it is asked for, and does it later. What has no lanes or no bytes starts nothing.
struct Counting : Later {
  static inline Counts counts;

  using Later::Later;
  static Counting Alone(int /*device*/ = 0) { return Counting(2); }
  template <class F>
  void Each(size_t n, F f) {
    counts.kernels += n > 0;
    Later::Each(n, f);
  }
  template <class F>
  void Tiles(size_t n, F f) {
    counts.kernels += n > 0;
    Later::Tiles(n, f);
  }
  template <class F>
  void Tiles(size_t n, kvjax::device::TileMemoryView memory, F f) {
    counts.kernels += n > 0;
    Later::Tiles(n, memory, f);
  }
  template <class F>
  void Once(F f) {
    ++counts.kernels;
    Later::Once(f);
  }
  template <class Work>
  void CountBins(size_t most, Work work) {
    ++counts.kernels;
    Later::CountBins(most, work);
  }
  void Copy(void* to, const void* from, size_t bytes) {
    counts.fills += bytes > 0;
    Later::Copy(to, from, bytes);
  }
  void Fill(void* to, int byte, size_t bytes) {
    counts.fills += bytes > 0;
    Later::Fill(to, byte, bytes);
  }
  void ExclusiveSum(const uint32_t* in, uint32_t* out, size_t n) {
    counts.sums += n > 0;
    Later::ExclusiveSum(in, out, n);
  }
  template <class Key>
  void SortPairs(Key* keys, uint32_t* values, size_t n, int end_bit) {
    counts.sorts += n > 0;
    Later::SortPairs(keys, values, n, end_bit);
  }
  static void* Allocate(size_t bytes, kvjax::device::Use use = kvjax::device::Use::kRows) {
    ++counts.allocations;
    return Later::Allocate(bytes, use);
  }
};

constexpr size_t kBatch = 64, kDim = 4;

/// A table that has all keys of the calls, and operands for these.
struct Calls : later::ChainOn<Counting> {
  explicit Calls(const TableSpec& spec, const kvjax::SlotLayout& layout = device::Momentum(kDim))
      : ChainOn(spec), layout(layout) {
    for (size_t i = 0; i < kBatch; ++i) keys.push_back(7 * i);
    counts.assign(kBatch, 1);
    rows.assign(kBatch * kDim, 0.5f);
    out.resize(kBatch * kDim);
    slots.assign(kBatch * kDim, 0.5f);
    for (int i = 0; i < 2; ++i) WriteStep(), Now();
  }
  void Lookup() {
    table.Lookup(q, {.version = handle,
                     .keys = data::Span(keys),
                     .rows = reinterpret_cast<std::byte*>(out.data()),
                     .found = found.get()});
  }
  void Insert() {
    Write(
        [&](auto* by, auto* next) { table.Insert(q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next)); });
  }
  void Remove() {
    Write([&](auto* by, auto* next) { table.Remove(q, Of(Op::kRemove, by, Absent(), nullptr, {}, next)); });
  }
  void Upsert() {
    Write([&](auto* by, auto* next) {
      table.Upsert(q, Of(Op::kUpsert, by, keys, nullptr, data::Bytes(rows), {}, next));
    });
  }
  void Merge() {
    kvjax::device::MergeGradients(q, keys.data(), rows.data(), counts.data(), kBatch, kDim, merged.data(),
                                  out.data(), merged_counts.data());
  }
  [[nodiscard]] kvjax::StepSpan Step(const uint32_t* version) const {
    return {.version = version,
            .keys = data::Span(keys),
            .gradients = {counts.data(), rows.data()},
            .step = &at,
            .layout = layout};
  }
  void ReadStep() {
    table.ReadStep(q, {.step = Step(handle),
                       .size = kBatch,
                       .used_step = &used,
                       .values = reinterpret_cast<std::byte*>(out.data()),
                       .fresh = found.get(),
                       .row_keys = merged.data(),
                       .slots = {reinterpret_cast<std::byte*>(slots.data())}});
  }
  void WriteStep() {
    Write([&](auto* by, auto* next) {
      table.WriteStep(
          q, {.step = Step(by), .values = data::Bytes(rows), .slots = {data::Bytes(slots)}, .next = next});
    });
  }
  void Apply() {
    Write([&](auto* by, auto* next) {
      table.Apply(q, {.step = Step(by), .program = program, .shared = shared, .next = next});
    });
  }
  static const Keys& Absent() {
    static const Keys keys(kBatch, 123456);
    return keys;
  }

  kvjax::SlotLayout layout;
  Keys keys, merged = Keys(kBatch);
  std::vector<int32_t> counts, merged_counts = std::vector<int32_t>(kBatch);
  data::Floats rows, out, slots;
  device::Mask found = device::Mask(new bool[kBatch]);
  kvjax::Program program =
      kvjax::Program::Parse("t", programs::Descent(kDim), kDim, kvjax::RowType::kFloat32, layout);
  uint64_t shared[1] = {};
  int64_t at = -1, used = 0;
};

TEST(TheTableInTheDocumentationIsTrue) {
  std::ifstream file(KVJAX_ROOT "/docs/cuda.md");
  std::stringstream text;
  text << file.rdbuf();
  TableSpec full = data::Spec(kDim), admits = data::Spec(kDim);
  full.max_capacity = kBatch;
  full.on_full = kvjax::OnFull::kEvict;
  admits.admission = {.kind = kvjax::AdmissionSpec::Kind::kMinCount, .threshold = 1};
  const auto row = [&](const char* name, const TableSpec& spec, auto call) {
    Later::lag = 0;
    Calls calls(spec);
    Later::lag = 1000;
    for (int i = 0; i < 3; ++i) call(calls);  // the second and third before the device has done the first
    calls.Now();
    const size_t waits = Later::waits;
    Counting::counts = {};
    call(calls);
    const auto [kernels, fills, sums, sorts, allocations] = Counting::counts;
    std::stringstream line;
    line << "| " << name << " | " << kernels << " | " << fills << " | " << sums << " | " << sorts << " | "
         << allocations << " | " << Later::waits - waits << " |";
    calls.Now();
    const bool there = text.str().find("\n" + line.str() + "\n") != std::string::npos;
    CHECK(there);
    if (!there) std::cerr << "docs/cuda.md has no line\n" << line.str() << "\n";
  };
  const TableSpec plain = data::Spec(kDim);
  row("`lookup`", plain, [](Calls& c) { c.Lookup(); });
  row("`lookup_or_insert`", plain, [](Calls& c) { c.Insert(); });
  row("`upsert`", plain, [](Calls& c) { c.Upsert(); });
  row("`remove`", plain, [](Calls& c) { c.Remove(); });
  row("`apply` of a row program", plain, [](Calls& c) { c.Apply(); });
  row("`merge` of gradients", plain, [](Calls& c) { c.Merge(); });
  row("`apply`, reading", plain, [](Calls& c) { c.ReadStep(); });
  row("`apply`, writing", plain, [](Calls& c) { c.WriteStep(); });
  row("`apply`, writing, `admit=min_count`", admits, [](Calls& c) { c.WriteStep(); });
  row("`apply`, writing, at `max_capacity`", full, [](Calls& c) { c.WriteStep(); });
}

/// A table of `rows` keys, made for just as many, that gets calls of n keys which it has, so many of them
/// queued before the device has done the first; returns how often the host waits in `calls` of them.
size_t Waits(size_t rows, size_t n, size_t queued, size_t calls, bool new_keys) {
  Later::lag = 0;
  Chain gpu(data::Spec(1));
  gpu.table.Reserve(gpu.Now(), rows);
  uint64_t next_key = 0;
  const auto insert = [&](uint64_t begin, size_t count) {
    Keys batch;
    for (uint64_t key = begin; key < begin + count; ++key) batch.push_back(key);
    const Keys& keys = gpu.Keep(std::move(batch));
    gpu.Write([&](auto* by, auto* next) {
      gpu.table.Insert(gpu.q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next));
    });
  };
  for (; next_key < rows; next_key += n) insert(next_key, n);
  insert(0, n);
  const size_t asked = Later::asked;
  insert(0, n);  // which is so many tasks
  Later::lag = queued * (Later::asked - asked);
  const size_t waits = Later::waits;
  for (size_t i = 0; i < calls; ++i) {
    insert(new_keys ? next_key : (i % (rows / n)) * n, n);
    next_key += new_keys ? n : 0;
  }
  const size_t waited = Later::waits - waits;
  CHECK_EQ(gpu.table.Size(gpu.Now()), next_key);
  return waited;
}

TEST(ASteadyStateNeverWaits) {
  // 3/4 of 2**14 cells, a sixteenth of them a call: three calls ahead of the device.
  CHECK_EQ(Waits(12 * 1024, 1024, 3, 100, false), 0u);
  CHECK_EQ(Waits(12 * 1024, 1024, 3, 60, true), 0u);   // new keys: the table grows all the time
  CHECK_EQ(Waits(12 * 1024, 32, 31, 200, false), 0u);  // small calls: as many as JAX has under way
  CHECK_EQ(Waits(12 * 1024, 32, 31, 200, true), 0u);
  // Further ahead than there is space for, a call waits for the first of those before it, and no more.
  const size_t waits = Waits(12 * 1024, 1024, 40, 100, false);
  CHECK(waits > 0 && waits < 100 * 20);
}

TEST(WithoutMemoryToGrowAheadCallsGoOn) {
  Later::lag = 0;
  Chain gpu(data::Spec(1));
  const auto insert = [&](uint64_t begin) {
    Keys batch;
    for (uint64_t key = begin; key < begin + 40; ++key) batch.push_back(key);
    const Keys& keys = gpu.Keep(std::move(batch));
    gpu.Write([&](auto* by, auto* next) {
      gpu.table.Insert(gpu.q, Of(Op::kLookupOrInsert, by, keys, nullptr, {}, next));
    });
  };
  for (uint64_t key = 0; key < 2000; key += 40) insert(key);
  Later::lag = 300;
  Later::has_memory = false;
  uint64_t key = 2000;
  bool ended = false;
  try {  // as long as it lasts, to the last row
    while (key < 100000) insert(key), key += 40, insert(0);
  } catch (const std::bad_alloc&) {
    ended = true;
  }
  CHECK(ended);
  CHECK_EQ(gpu.table.Size(gpu.Now()), key);
  CHECK(key > 2000);  // what had been made ahead of need is used
  Later::has_memory = true;
  insert(key);
  CHECK_EQ(gpu.table.Size(gpu.Now()), key + 40);
}

}  // namespace device_calls
