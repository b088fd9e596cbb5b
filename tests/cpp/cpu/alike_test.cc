// Rows that are alike in a machine: what is made once for all of them, and forgotten when a call begins.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/cpu/program/machine.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/program.h"

namespace cpu_alike {

using kvjax::Field;
using kvjax::Opcode;
using kvjax::Program;
using kvjax::RowType;
using kvjax::SlotLayout;
using kvjax::program::Cell;
using programs::kField;
using programs::kScalar;
using programs::kShared;
using programs::kVector;

TEST(RowsThatAreAlikeGetWhatEachOfThemWouldGetAlone) {
  constexpr int32_t kDim = 4;
  // With n of slot 0 and m of slot 1: value -= grad * (g0 ** (2 * n + 2) - m); n += 1.
  std::vector<int32_t> words = {1, 3, 2, 4, 0, 9};
  for (const int32_t field : {Field::kValue, Field::kGradient})
    words.insert(words.end(), {field, 0, 0, kDim});
  words.insert(words.end(), {0, 0, 0, 1, 1, 0, 0, 1});
  const auto add = [&](Opcode op, std::initializer_list<int32_t> registers) {
    programs::Add(words, op, registers);
  };
  add(Opcode::k_load, {kScalar, kField + 2});
  add(Opcode::k_load, {kScalar + 2, kField + 3});
  add(Opcode::k_add_i, {kScalar, kScalar, kShared + 1});
  add(Opcode::k_i_to_f, {kScalar + 1, kScalar});
  add(Opcode::k_pow_f, {kScalar + 1, kShared, kScalar + 1});
  add(Opcode::k_fms_f, {kScalar + 2, kScalar + 1, kScalar + 1, kScalar + 2});
  add(Opcode::k_mul_f, {kVector, kField + 1, kScalar + 2});
  add(Opcode::k_sub_f, {kField, kField, kVector});
  add(Opcode::k_store, {kField + 2, kScalar});
  const SlotLayout layout = SlotLayout::Parse("n|int32[]|4;m|float32[]|4");
  const Program program = Program::Parse("t", words, kDim, RowType::kFloat32, layout);
  std::vector<Cell> shared(2);
  const float base = 0.999f;
  std::memcpy(&shared[0], &base, 4);
  shared[1].word = 1;
  struct Row {
    float value[kDim] = {1, 2, 3, 4}, gradient[kDim] = {1, -1, 2, 0.5f};
    struct {
      int32_t n = 0;
      float m = 0;
    } slots;
    [[nodiscard]] bool operator==(const Row& other) const {
      return std::memcmp(this, &other, sizeof(Row)) == 0;
    }
  };
  const uint64_t key = 7;
  const kvjax::program::Kind kind{program, layout, 16};
  const auto run_on = [&](kvjax::program::Machine& machine, std::span<Row> rows) {
    machine.Begin({shared.data(), 1, 2});
    for (size_t i = 0, now = 0; i < rows.size(); now ^= 1) {
      kvjax::program::Tile& tile = machine.tile(now);
      tile.Clear();
      for (; i < rows.size() && tile.size() < static_cast<size_t>(machine.rows()); ++i)
        tile.Add({reinterpret_cast<std::byte*>(rows[i].value), reinterpret_cast<std::byte*>(&rows[i].slots),
                  rows[i].gradient, &key, false});
      machine.Run(now);
    }
  };
  const auto run = [&](std::span<Row> rows, bool again) {
    kvjax::program::Machine machine(kind, kvjax::program::BestKernels());
    if (again) {  // nothing is left of a call before, with another base
      std::vector<Row> others(rows.begin(), rows.end());
      const Cell base_of_this = std::exchange(shared[0], Cell{});
      run_on(machine, others);
      shared[0] = base_of_this;
    }
    run_on(machine, rows);
  };
  // So many kinds that they are forgotten once, or given up; and again few.
  for (const uint64_t kinds : {1u, 9u, 300u, 700u, 100'000u}) {
    data::Stream stream(kinds);
    std::vector<Row> rows(4000);
    for (Row& row : rows) {
      row.slots.n = static_cast<int32_t>(stream.Below(kinds));
      row.slots.m = kinds == 700 ? 0.0f : static_cast<float>(stream.Below(2));
      if (&row > &rows[3000]) row.slots.n %= 5;
    }
    std::vector<Row> alone = rows;
    run(rows, true);
    for (Row& row : alone) run({&row, 1}, false);
    CHECK(rows == alone);
  }
}

}  // namespace cpu_alike
