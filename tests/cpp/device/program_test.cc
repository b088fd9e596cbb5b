// Row programs on the device table: every instruction beside the CPU's kernels, and training beside the CPU's
// table, with one lane to a tile and with eight.
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cpp/support/lanes.h"
//
#include "kvjax/ffi/cpu/program/machine.h"
#include "kvjax/ffi/cpu/program/subnormal.h"
#include "kvjax/ffi/cpu/table.h"
#include "kvjax/ffi/device/program.h"
#include "tests/cpp/support/device.h"
#include "tests/cpp/support/no_threads.h"
#include "tests/cpp/support/program.h"
#include "tests/cpp/support/trained.h"

namespace device_program {

using data::Floats;
using data::Keys;
using device::Lanes;
using kvjax::InstructionForm;
using kvjax::Opcode;
using kvjax::Program;
using kvjax::RowType;
using kvjax::SlotLayout;
using kvjax::device::Threads;
using programs::kField;
using programs::kScalar;
using programs::kVector;
using programs::TrainBesideTheCpu;

/// One instruction on slots: operand j is slot j, of a row's elements or of one, and the result the last
/// slot.
struct Case {
  Case(Opcode op, int32_t vectors, int32_t dim) : dim(dim) {
    const InstructionForm& form = kvjax::kInstructionForms[static_cast<size_t>(op)];
    const bool reduces = form.kind == InstructionForm::Kind::kReduce;
    const int32_t arity = form.arity;
    const auto wide = [&](int32_t j) {
      return j < arity ? (vectors >> j & 1) != 0 : vectors != 0 && !reduces;
    };
    std::vector<int32_t> fields, update;
    for (int32_t j = 0; j <= arity; ++j) {
      const int32_t width = wide(j) ? dim : 1;
      layout.Add("s" + std::to_string(j), "x", 4 * static_cast<size_t>(width));
      fields.insert(fields.end(), {j, static_cast<int32_t>(kvjax::Field::Type::kWord), 0, width});
    }
    const std::string_view name = form.name;
    const bool compares = name.starts_with("l") || name.starts_with("g");
    const bool in_doubles = form.doubles && name != "f_to_d" && name != "i_to_d";
    const bool out_doubles =
        form.doubles && name.ends_with("_d") && !(in_doubles && compares && name != "log_d");
    std::vector<int32_t> operands = {wide(arity) ? kVector + arity : kScalar + arity};
    for (int32_t j = 0; j < arity; ++j) {
      const int32_t r = (wide(j) ? kVector : kScalar) + j;
      programs::Add(update, Opcode::k_load, {r, kField + j}), ++instructions;
      if (in_doubles) programs::Add(update, Opcode::k_f_to_d, {r, r}), ++instructions;
      operands.push_back(r);
    }
    programs::Add(update, op, operands), ++instructions;
    if (out_doubles) programs::Add(update, Opcode::k_d_to_f, {operands[0], operands[0]}), ++instructions;
    programs::Add(update, Opcode::k_store, {kField + arity, operands[0]}), ++instructions;
    std::vector<int32_t> words = {arity + 1, arity + 1, 0, arity + 1, 0, instructions};
    words.insert(words.end(), fields.begin(), fields.end());
    words.insert(words.end(), update.begin(), update.end());
    program = Program::Parse("t", words, dim, RowType::kFloat32, layout);
    integers = name.ends_with("_i") || name.starts_with("i_to") || name == "u_to_f";
    choice = name == "select";
    makes_floats = !integers &&
                   !(form.kind != InstructionForm::Kind::kReduce &&
                     (name.starts_with("eq") || name.starts_with("ne_") || compares)) &&
                   name != "is_finite_f" && name != "f_to_i" && name != "select";
  }

  /// Slots full of awkward numbers.
  [[nodiscard]] std::vector<std::byte> Slots(uint64_t seed) const {
    data::Stream stream(seed);
    std::vector<std::byte> bytes(layout.stride());
    for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
      const float x = programs::Awkward(stream);
      const auto whole = static_cast<int32_t>(stream.Below(7)) - 3;
      const kvjax::Slot& first = layout.slots()[0];
      const bool chooses = choice && at >= first.offset && at < first.offset + first.bytes;
      std::memcpy(bytes.data() + at, integers || chooses ? static_cast<const void*>(&whole) : &x, 4);
    }
    return bytes;
  }
  /// The result, as bits; one NaN is as good as another.
  [[nodiscard]] std::vector<uint32_t> Result(const std::vector<std::byte>& slots) const {
    const kvjax::Slot& slot = layout.slots().back();
    std::vector<uint32_t> words(slot.bytes / 4);
    std::memcpy(words.data(), slots.data() + slot.offset, slot.bytes);
    for (uint32_t& word : words) {
      if (makes_floats && (word & 0x7FFFFFFFu) > 0x7F800000u) word = 0x7FC00000u;
    }
    return words;
  }

  int32_t dim, instructions = 0;
  SlotLayout layout;
  Program program;
  bool integers = false, choice = false, makes_floats = true;
};

/// The rows of a tile that takes so many, or as many as are given.
template <class Q>
void RunOnDevice(const Program& p, const SlotLayout& layout, const uint64_t* shared,
                 const std::vector<kvjax::device::RowPlaces>& rows, size_t each) {
  Q q = Q::Alone();
  const kvjax::device::Steps steps(p, layout, 4 * static_cast<size_t>(p.dim), layout.stride(),
                                   Q::Tile::size());
  Lanes::most_bytes = steps.BytesOf(each);
  const kvjax::device::DeviceProgram<Q> program(q, steps, shared, 1, rows.size());
  Lanes::most_bytes = SIZE_MAX;
  const auto view = program.view();
  if (Q::Tile::size() > 1) CHECK(view.dealing.rows >= each);  // more, if they take no more memory
  const kvjax::program::NoSubnormals scope;                   // which the CPU's machine has none of either
  const size_t tiles = kvjax::device::TilesOf(rows.size(), view.dealing.rows);
  q.Tiles(tiles * Q::Tile::size(), program.registers(), [&](typename Q::Tile tile, size_t i, auto memory) {
    const auto rank = static_cast<size_t>(tile.rank());
    const size_t at = i / Q::Tile::size() * view.dealing.rows + rank;
    const bool has = rank < view.dealing.rows && at < rows.size();
    const kvjax::device::Lane<typename Q::Tile> lane(view, tile, memory, 2,
                                                     has ? rows[at] : kvjax::device::RowPlaces());
    lane.Run(/*fresh=*/false);
  });
}

/// The results of rows with these slots and the keys 7, 8, ...
template <class Q>
std::vector<std::vector<uint32_t>> OnDevice(const Case& c, std::vector<std::vector<std::byte>> slots,
                                            size_t each) {
  std::byte value[1] = {};  // which no case reads
  std::vector<kvjax::device::RowPlaces> rows;
  for (auto& row : slots) rows.push_back({value, row.data(), nullptr, nullptr, 7 + rows.size()});
  RunOnDevice<Q>(c.program, c.layout, nullptr, rows, each);
  std::vector<std::vector<uint32_t>> results;
  for (const auto& row : slots) results.push_back(c.Result(row));
  return results;
}

std::vector<uint32_t> OnCpu(const Case& c, std::vector<std::byte> slots, uint64_t key) {
  const kvjax::program::Kind kind{c.program, c.layout, 4};
  kvjax::program::Machine machine(kind, kvjax::program::BestKernels());
  machine.Begin({nullptr, 1, 2});
  machine.tile(0).Add({nullptr, slots.data(), nullptr, &key, false});
  machine.Run(0);
  return c.Result(slots);
}

TEST(EveryInstructionGivesTheBitsOfTheCpu) {
  size_t ran = 0;
  for (int32_t op = 0; op < static_cast<int32_t>(Opcode::kCount); ++op) {
    const InstructionForm& form = kvjax::kInstructionForms[op];
    const auto code = static_cast<Opcode>(op);
    const bool rounds = code == Opcode::k_stochastic_bfloat16 || code == Opcode::k_stochastic_float16;
    if (form.kind == InstructionForm::Kind::kMove && !rounds) continue;
    for (const int32_t dim : {2, 6, 16, 37, 164}) {
      for (int32_t vectors = 0; vectors < 1 << form.arity; ++vectors) {
        if ((form.kind == InstructionForm::Kind::kReduce || rounds) && vectors == 0) continue;
        if (form.doubles && vectors != 0) continue;
        if (rounds && vectors != 1) continue;
        if (form.kind == InstructionForm::Kind::kFused && vectors != form.vectors()) continue;
        const Case c(code, vectors, dim);
        std::vector<std::vector<std::byte>> slots;
        std::vector<std::vector<uint32_t>> want;
        for (uint64_t r = 0; r < 11; ++r) {
          slots.push_back(c.Slots(static_cast<uint64_t>(op * 64 + vectors) + (r << 20)));
          want.push_back(OnCpu(c, slots.back(), 7 + r));
        }
        const size_t each = size_t{1} << static_cast<size_t>(dim + op + vectors) % 4;
        const bool same = OnDevice<Threads>(c, slots, 1) == want && OnDevice<Lanes>(c, slots, each) == want;
        if (!same) std::cerr << form.name << " " << vectors << " dim " << dim << "\n";
        CHECK(same);
        ++ran;
      }
    }
  }
  CHECK(ran > 250);
}

template <class Q>
void MoveInALoop() {
  using programs::LoopedRow;
  const SlotLayout layout = SlotLayout::Parse(LoopedRow::kLayout);
  const Program program = Program::Parse("t", programs::PartsInALoop(), 6, RowType::kFloat32, layout);
  const std::vector<uint64_t> shared = LoopedRow::Shared();
  for (const size_t each : {1, 2, 4, 8}) {  // with a loop that rows of a tile leave at different turns
    std::vector<LoopedRow> rows(21);
    std::vector<kvjax::device::RowPlaces> places;
    for (LoopedRow& row : rows) {
      row.slots.n = static_cast<int32_t>(5 * places.size() % 9);
      places.push_back({reinterpret_cast<std::byte*>(row.value), reinterpret_cast<std::byte*>(&row.slots),
                        row.gradient, nullptr, 7});
    }
    std::vector<LoopedRow> want;
    for (const LoopedRow& row : rows) want.push_back(row.After());
    RunOnDevice<Q>(program, layout, shared.data(), places, each);
    CHECK(rows == want);
  }
}

TEST(PartsOfARowMoveInALoop) {
  MoveInALoop<Threads>();
  MoveInALoop<Lanes>();
}

template <class Q>
void MoveWholePieces() {
  const SlotLayout layout = SlotLayout::Parse("s|float32[8]|32");
  std::vector<int32_t> words = {0, 0, 0, 4, 0, 2};
  const int32_t fields[][4] = {
      {kvjax::Field::kGradient, 0, 0, 8}, {0, 0, 0, 8}, {0, 0, 4, 4}, {kvjax::Field::kValue, 0, 0, 4}};
  for (const auto& field : fields) words.insert(words.end(), field, field + 4);
  programs::Add(words, Opcode::k_store, {kField + 1, kField});
  programs::Add(words, Opcode::k_neg_f, {kField + 3, kField + 2});
  const Program program = Program::Parse("t", words, 8, RowType::kFloat32, layout);
  alignas(16) const float gradient[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  alignas(16) float value[8] = {}, slot[8] = {};
  RunOnDevice<Q>(
      program, layout, nullptr,
      {{reinterpret_cast<std::byte*>(value), reinterpret_cast<std::byte*>(slot), gradient, nullptr, 7}}, 8);
  for (int i = 0; i < 4; ++i) CHECK_EQ(value[i], -gradient[4 + i]);
  CHECK(std::memcmp(slot, gradient, sizeof(slot)) == 0);
}

TEST(APartThatIsAPieceIsOneThatAnotherLaneHasWritten) {
  MoveWholePieces<Threads>();
  MoveWholePieces<Lanes>();
}

TEST(TrainingIsThatOfTheCpu) {
  auto spec = data::Spec(20);
  spec.initializer = {};
  TrainBesideTheCpu<Threads>(spec, 700);
  TrainBesideTheCpu<Lanes>(spec, 150);
  for (const int64_t dim : {3, 8, 16}) {  // of which lanes of a tile have several rows side by side
    spec.dim = dim;
    TrainBesideTheCpu<Lanes>(spec, 60);
  }
  spec.dim = 20;
  spec.admission.kind = kvjax::AdmissionSpec::Kind::kMinCount;
  spec.admission.threshold = 2;
  spec.admission.unadmitted = kvjax::AdmissionSpec::Unadmitted::kShared;
  spec.admission.shared_key = 7;
  TrainBesideTheCpu<Threads>(spec, 300);
  TrainBesideTheCpu<Lanes>(spec, 100);
}

/// A step of several tables is done with another version where one of them is refused, also with slots to
/// come.
TEST(APlannedStepThatIsNotToBeDoneIsNone) {
  device::Device<Threads> t(data::Spec(20), Threads());
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4");
  const Program program = Program::Parse("t", programs::Sgd(20), 20, RowType::kFloat32, layout);
  const uint64_t shared[2] = {0, 1};
  const device::Gradients g{.keys = {1, 2}, .counts = {1, 1}, .rows = Floats(40, 1.0f)};
  auto o = programs::Of(g, layout, program, shared);
  const uint32_t live = t.handle, other = ~live;
  uint32_t next = 0;
  o.step.version = &other, o.next = &next, o.planned = true;
  t.Apply(t.q, o);
  t.Raise();
  CHECK_EQ(t.Export(live, true).keys.size(), 0u);
  t.Train(g, SlotLayout::Parse("m|float32[20]|80"));  // those of another optimizer may come
}

TEST(ARefusedStepChangesNothing) {
  device::Device<Threads> t(data::Spec(20), Threads());
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4");
  const Program program = Program::Parse("t", programs::Sgd(20), 20, RowType::kFloat32, layout);
  const uint64_t shared[2] = {0, 1};
  device::Gradients g{.keys = {1, 2}, .counts = {1, 1}, .rows = Floats(40, 1.0f)};
  g.canaries[0] = 0;
  const auto o = programs::Of(g, layout, program, shared);
  CHECK_THROWS(kInvalidArgument, t.Write([&](auto* handle, auto* next) {
    auto broken = o;
    broken.step.version = handle, broken.next = next;
    t.Apply(t.q, broken);
  }));
  CHECK_EQ(t.Export(t.handle, true).keys.size(), 0u);
}

TEST(KernelsRunWhereNoThreadCanBeMade) {
  const NoThreads none;
  Threads q(4, 8);
  std::vector<uint64_t> seen(1000), want(1000);
  for (size_t i = 0; i < want.size(); ++i) want[i] = 1 + i;
  q.Each(seen.size(), [&](size_t i) { seen[i] = 1; });
  const kvjax::device::TileMemory<Threads> memory(q, sizeof(uint64_t), seen.size());
  q.Tiles(seen.size(), memory.view(), [&](Threads::Tile, size_t i, kvjax::device::LaneMemory own) {
    std::memcpy(own.begin, &i, sizeof(i));
    seen[i] += *reinterpret_cast<const uint64_t*>(own.begin);
  });
  CHECK(seen == want);
}

}  // namespace device_program
