// Row programs: every kernel of every instruction set, programs that are none, and training by program.
#include "tests/cpp/support/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/merge.h"
#include "kvjax/ffi/cpu/program/machine.h"
#include "kvjax/ffi/cpu/program/subnormal.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"

namespace cpu_program {

using data::Floats;
using data::Keys;
using data::Live;
using kvjax::Field;
using kvjax::InstructionForm;
using kvjax::Opcode;
using kvjax::Program;
using kvjax::Register;
using kvjax::RowType;
using kvjax::Serial;
using kvjax::SlotLayout;
using kvjax::program::Cell;
using kvjax::program::Kernels;
using kvjax::program::Shape;
using kvjax::program::Step;
using programs::AllKernels;
using programs::Awkward;
using programs::kField;
using programs::kScalar;
using programs::kShared;
using programs::kVector;
using programs::Sgd;

/// What one instruction makes of awkward operands, as bits.
std::vector<uint32_t> Run(const Kernels& kernels, Opcode op, Shape shape, int32_t dim, bool flushes) {
  constexpr int32_t kRows = 5;
  const InstructionForm& form = kvjax::kInstructionForms[static_cast<size_t>(op)];
  data::Stream stream(static_cast<uint64_t>(op) * 64 + static_cast<uint64_t>(shape.vectors));
  const bool integers = form.name.ends_with("_i") || form.name.starts_with("i_to") || form.name == "u_to_f";
  const bool doubles = form.doubles && form.name != "f_to_d" && form.name != "i_to_d";
  std::vector<std::vector<float>> memory(6, std::vector<float>(static_cast<size_t>(kRows * dim)));
  std::vector<std::vector<float*>> rows(6);
  std::vector<std::vector<Cell>> cells(6, std::vector<Cell>(kRows));
  for (size_t j = 0; j < 6; ++j) {
    for (int32_t r = 0; r < kRows; ++r) rows[j].push_back(memory[j].data() + r * dim);
    for (float& x : memory[j]) {
      x = Awkward(stream);
      if (integers || (form.name == "select" && j == 0)) {
        const auto whole = static_cast<int32_t>(stream.Below(7)) - 3;
        std::memcpy(&x, &whole, 4);
      }
    }
    for (Cell& cell : cells[j]) {
      const double number = static_cast<double>(Awkward(stream));
      const float single = static_cast<float>(number);
      const auto whole = static_cast<int32_t>(stream.Below(7)) - 3;
      cell = {};
      if (doubles) {
        std::memcpy(&cell, &number, 8);
      } else if (integers || (form.name == "select" && j == 0)) {
        std::memcpy(&cell, &whole, 4);
      } else {
        std::memcpy(&cell, &single, 4);
      }
    }
  }
  Step step;
  for (int32_t j = 0; j < form.arity; ++j) {
    const auto i = static_cast<size_t>(j);
    if ((shape.vectors & 1 << j) != 0) {
      step.arg[j].rows = rows[i].data();
    } else {
      step.arg[j].cells = cells[i].data(), step.arg[j].stride = 1;
    }
  }
  if (shape.vector) {
    step.out_rows = rows[5].data();
  } else {
    step.out = cells[5].data();
  }
  const uint64_t keys[kRows] = {0, 1, 2, 3, UINT64_MAX};
  const uint64_t* const of[kRows] = {&keys[0], &keys[1], &keys[2], &keys[3], &keys[4]};
  const kvjax::program::Random random{7, 3, of};
  step.random = &random, step.width = dim;
  kernels.find(op, shape, step);
  {
    std::optional<kvjax::program::NoSubnormals> flush;
    if (flushes) flush.emplace();
    step.kernel(step, kRows, dim);
  }
  std::vector<uint32_t> out(shape.vector ? memory[5].size() : 2 * kRows);
  std::memcpy(out.data(), shape.vector ? static_cast<void*>(memory[5].data()) : cells[5].data(),
              4 * out.size());
  const bool floats = !form.doubles && !form.name.ends_with("_i");
  for (uint32_t& word : out) {  // one NaN is as good as another
    if (floats && (word & 0x7FFFFFFFu) > 0x7F800000u) word = 0x7FC00000u;
  }
  return out;
}

TEST(EveryInstructionSetGivesTheSameBits) {
  size_t ran = 0;
  for (const Kernels& kernels : AllKernels()) {
    const auto check = [&](Opcode op, Shape shape, int32_t dim) {
      for (const bool flushes : {false, true}) {
        const bool same =
            Run(kernels, op, shape, dim, flushes) == Run(AllKernels()[0], op, shape, dim, flushes);
        if (!same) {
          std::cerr << kernels.name << " " << kvjax::kInstructionForms[static_cast<size_t>(op)].name << " "
                    << shape.vectors << " " << shape.type << " " << flushes << "\n";
        }
        CHECK(same);
        ++ran;
      }
    };
    for (const int32_t dim : {2, 16, 37}) {
      for (int32_t i = 0; i < static_cast<int32_t>(Opcode::kCount); ++i) {
        const InstructionForm& form = kvjax::kInstructionForms[i];
        const auto op = static_cast<Opcode>(i);
        if (form.kind == InstructionForm::Kind::kMove) continue;
        for (int32_t vectors = 0; vectors < 1 << form.arity; ++vectors) {
          const bool reduces = form.kind == InstructionForm::Kind::kReduce;
          if (reduces && vectors == 0) continue;
          if (form.doubles && vectors != 0) continue;
          if (form.kind == InstructionForm::Kind::kFused && vectors != form.vectors()) continue;
          check(op, {.vector = vectors != 0 && !reduces, .vectors = vectors}, dim);
        }
      }
      for (int32_t type = 0; type <= static_cast<int32_t>(Field::Type::kBool); ++type) {
        for (const Opcode op : {Opcode::k_load, Opcode::k_store})
          check(op, {.vector = true, .vectors = 1, .type = type}, dim);
      }
      for (const Opcode op : {Opcode::k_stochastic_bfloat16, Opcode::k_stochastic_float16})
        check(op, {.vector = true, .vectors = 1}, dim);
      check(Opcode::k_pick, {.vectors = 1}, dim);
    }
  }
  CHECK(ran > 500);
}

TEST(SumsOfRowsAreThoseOneAfterTheOther) {
  data::Stream stream(8);
  for (const size_t dim : {1u, 4u, 15u, 16u, 17u, 33u, 64u, 65u, 128u, 130u}) {
    Floats rows(20 * dim), want(dim), got(dim);
    for (float& x : rows) x = Awkward(stream);
    for (size_t count = 1; count < 30; count += 4) {
      std::vector<uint32_t> which(count);
      for (uint32_t& r : which) r = static_cast<uint32_t>(stream.Below(20));
      kvjax::SumInOrder()(want.data(), rows.data(), which, dim);
      for (const Kernels& kernels : AllKernels()) {
        kernels.sum(got.data(), rows.data(), which.data(), count, dim);
        for (size_t d = 0; d < dim; ++d) CHECK(got[d] == want[d] || (got[d] != got[d] && want[d] != want[d]));
      }
    }
  }
}

TEST(ProgramsThatAreNoneAreRefused) {
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4");
  const std::vector<int32_t> words = Sgd(4);
  const auto parse = [&](std::span<const int32_t> some, int64_t dim = 4, RowType type = RowType::kFloat32) {
    return Program::Parse("t", some, dim, type, layout);
  };
  CHECK_EQ(parse(words).update.size(), 5u);
  for (size_t n = 0; n < words.size(); ++n) CHECK_THROWS(kInvalidArgument, parse(std::span(words).first(n)));
  CHECK_THROWS(kInvalidArgument, parse(words, 5));
  CHECK_THROWS(kInvalidArgument, parse(words, 4, RowType::kBFloat16));
  CHECK_THROWS(kInvalidArgument, Program::Parse("t", words, 4, RowType::kFloat32, {}));
  // Whatever is let in, runs: on rows with guards around them, which the sanitizers watch.
  data::Stream stream(3);
  size_t let_in = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    std::vector<int32_t> changed = words;
    const int32_t numbers[] = {
        -3,      -2,        -1,          0,       1,           2,      3,          4,          5,
        16,      kScalar,   kScalar + 1, kShared, kShared + 2, kField, kField + 1, kField + 2, kField + 3,
        1 << 30, INT32_MIN, INT32_MAX,   -11,     -12,         -16,    -17,        1 << 16};
    for (uint64_t n = 1 + stream.Below(3); n > 0; --n)
      changed[stream.Below(changed.size())] = stream.Below(3) == 0
                                                  ? static_cast<int32_t>(stream.Below(80))
                                                  : numbers[stream.Below(std::size(numbers))];
    try {
      const Program program = parse(changed);
      ++let_in;
      std::vector<Cell> shared(static_cast<size_t>(program.shared));
      const kvjax::program::Kind kind{program, layout, 16};
      kvjax::program::Machine machine(kind, kvjax::program::BestKernels());
      machine.Begin({shared.data(), 1, 2});
      auto value = std::make_unique<float[]>(4), gradient = std::make_unique<float[]>(4);
      auto slot = std::make_unique<std::byte[]>(layout.stride());
      const uint64_t key = 7;
      const auto facts = std::make_unique<kvjax::RowFacts>();
      machine.tile(0).Add(
          {reinterpret_cast<std::byte*>(value.get()), slot.get(), gradient.get(), &key, true, facts.get()});
      machine.Run(0);
    } catch (const kvjax::Error&) {
    }
  }
  CHECK(let_in > 100);
}

/// Steps of random keys, some of them often, on several threads.
struct Trained {
  Floats rows;
  std::vector<int64_t> frequencies;
};
Trained Train(size_t threads, bool split) {
  constexpr int64_t kDim = 20;
  auto spec = data::Spec(kDim);
  spec.initializer = {};  // zeros
  Live table(spec);
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4");
  kvjax::ApplyOperands o;
  o.step.layout = layout, o.program = Program::Parse("t", Sgd(kDim), kDim, RowType::kFloat32, layout);
  const float rate = 0.25f;
  uint64_t shared[2] = {0, 1};
  std::memcpy(shared, &rate, 4);
  const kvjax::ParallelFor parallel = [&](size_t n, size_t, const std::function<void(size_t, size_t)>& body) {
    std::vector<std::thread> all;
    for (size_t t = 0; t < threads; ++t)
      all.emplace_back([&, t] { body(n * t / threads, n * (t + 1) / threads); });
    for (std::thread& t : all) t.join();
  };
  data::Stream stream(5);
  Keys seen;
  for (int64_t step = 1; step < 20; ++step) {
    Keys keys;
    Floats gradients;
    std::vector<int32_t> counts;
    for (size_t i = 0; i < 1500; ++i) {
      keys.push_back(stream.Below(3) == 0 ? 5 : stream.Below(700));
      counts.push_back(stream.Below(20) == 0 ? 0 : 1);
      for (int64_t d = 0; d < kDim; ++d) gradients.push_back(static_cast<float>(stream.Below(64)) - 31);
      if (counts.back() > 0) seen.push_back(keys.back());
    }
    // With small whole numbers all is exact, so a batch may be given in two parts.
    const size_t half = split ? 700 : 0;
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, half}, {half, keys.size()}}) {
      if (begin == end) continue;
      const uint32_t version = table.version();
      uint32_t next;
      const uint32_t canary = kvjax::kCanary;
      o.step.version = &version, o.next = &next, o.step.step = &step, o.shared = shared;
      o.step.keys = {keys.data() + begin, end - begin};
      o.step.gradients = {counts.data() + begin, gradients.data() + begin * kDim, &canary, 1};
      next = table.Apply(parallel, o);
      CHECK_EQ(next, version + 1);
      CHECK_EQ(table.SettledVersion(), next);
    }
  }
  Trained out{table.Rows(seen), {}};
  for (const uint64_t key : table.KeySet()) out.frequencies.push_back(table.Of(key).frequency);
  return out;
}

TEST(ThreadsAndPartsOfABatchChangeNothing) {
  const Trained want = Train(1, false);
  for (const size_t threads : {2u, 5u}) {
    const Trained got = Train(threads, false);
    CHECK(got.rows == want.rows);
    CHECK(got.frequencies == want.frequencies);
  }
  const Trained parts = Train(2, true);
  CHECK(parts.rows == want.rows);
  CHECK(parts.frequencies == want.frequencies);
}

/// What steps of `trained` do to a table, after lookups of `looked_up` and perhaps more. In the second some
/// keys are new.
template <class Between>
kvjax::Snapshot LookUpAndTrain(const Keys& looked_up, const Keys& trained, Between between) {
  constexpr int64_t kDim = 4;
  Live table(kDim);
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4");
  kvjax::ApplyOperands o;
  o.step.layout = layout, o.program = Program::Parse("t", Sgd(kDim), kDim, RowType::kFloat32, layout);
  const uint64_t shared[2] = {0x3E800000, 1};  // a rate of 0.25
  std::vector<int32_t> counts(trained.size(), 1);
  for (size_t i = 0; i < counts.size(); i += 5) counts[i] = 0;
  const uint32_t canary = kvjax::kCanary;
  for (int64_t step = 1; step < 4; ++step) {
    const auto now = [&](Keys keys) {
      for (size_t i = 1; step == 2 && i < keys.size(); i += 300) keys[i] += 10'000;
      return keys;
    };
    static_cast<void>(table.Rows(now(looked_up)));
    const Keys keys = now(trained);
    if (step == 3) between(table);
    Floats gradients;
    for (size_t i = 0; i < trained.size() * kDim; ++i) gradients.push_back(static_cast<float>(i % 61));
    const uint32_t version = table.version();
    uint32_t next;
    o.step.version = &version, o.next = &next, o.step.step = &step, o.shared = shared;
    o.step.keys = data::Span(keys), o.step.gradients = {counts.data(), gradients.data(), &canary, 1};
    table.Apply(Serial, o);
  }
  return table.Export(table.version(), true);
}

TEST(WhatALookupHasFoundIsTrainedWhereItIs) {
  data::Stream stream(8);
  Keys keys, others;
  for (size_t i = 0; i < 3000; ++i) keys.push_back(stream.Below(2000)), others.push_back(stream.Below(2000));
  const auto nothing = [](Live&) {};
  // The keys of the lookup are those of the step, others, or the same ones with one that differs at the end.
  const kvjax::Snapshot want = LookUpAndTrain({}, keys, nothing);
  Keys almost = keys;
  almost.back() += 5000;
  for (const Keys& looked_up : {keys, others, almost}) {
    CHECK(data::Same(LookUpAndTrain(looked_up, keys, nothing), want));
  }
  // Writes come between the two: other keys have the rows that the lookup has found.
  const auto replace = [&](Live& table) {
    table.Drop(keys);
    table.Ensure({others.begin(), others.begin() + 1000});
  };
  CHECK(data::Same(LookUpAndTrain(keys, keys, replace), LookUpAndTrain({}, keys, replace)));
}

TEST(ALookupOfWhatHasBeenInsertedReadsItsRows) {
  data::Stream stream(9);
  Keys keys;
  for (size_t i = 0; i < 3000; ++i) keys.push_back(stream.Below(2000));
  Live table(4), other(4);
  table.Ensure(keys);
  const Floats initial = other.Rows(keys);
  CHECK(table.Rows(keys) == initial);
  table.Drop(keys);
  table.Ensure({1 << 20, 1 << 21, 1 << 22});  // which get rows that were theirs
  CHECK(table.Rows(keys) == initial);
}

TEST(AnEmptyStepCounts) {
  Live table(4);
  kvjax::ApplyOperands o;
  o.step.layout = SlotLayout::Parse("n|int32[]|4");
  o.program = Program::Parse("t", Sgd(4), 4, RowType::kFloat32, o.step.layout);
  const uint64_t shared[2] = {0, 1};
  const uint32_t version = table.version(), canary = kvjax::kCanary;
  uint32_t next;
  const int64_t step = 9;
  o.step.version = &version, o.next = &next, o.step.step = &step, o.shared = shared,
  o.step.gradients.canaries = &canary;
  CHECK_EQ(table.Apply(Serial, o), version + 1);
  CHECK_EQ(table.Copy().last_step, 9);
  CHECK_THROWS(kFailedPrecondition, table.Apply(Serial, o));  // through the handle of before
}

}  // namespace cpu_program
