// Parts of rows and loops in row programs: rows that leave a loop by themselves, and programs that are none.
#include <cstdint>
#include <utility>
#include <vector>

#include "kvjax/ffi/cpu/program/machine.h"
#include "tests/cpp/support/check.h"
#include "tests/cpp/support/data.h"
#include "tests/cpp/support/program.h"

namespace cpu_loop {

using kvjax::Opcode;
using kvjax::Program;
using kvjax::RowType;
using kvjax::SlotLayout;
using kvjax::program::Cell;

TEST(PartsOfRowsMoveInLoopsThatEachRowLeavesByItself) {
  using programs::LoopedRow;
  const SlotLayout layout = SlotLayout::Parse(LoopedRow::kLayout);
  const std::vector<int32_t> words = programs::PartsInALoop();
  const Program program = Program::Parse("t", words, 6, RowType::kFloat32, layout);
  const std::vector<uint64_t> shared = LoopedRow::Shared();
  const uint64_t key = 7;
  for (const uint64_t turns : {1u, 2u, 9u}) {
    data::Stream stream(turns);
    const kvjax::program::Kind kind{program, layout, 24};
    kvjax::program::Machine machine(kind, kvjax::program::BestKernels());
    machine.Begin({reinterpret_cast<const Cell*>(shared.data()), 1, 2});
    std::vector<LoopedRow> rows(static_cast<size_t>(machine.rows())), want;
    for (size_t now = 0; now < 6; ++now) {  // the tiles take turns, with rows in any order
      kvjax::program::Tile& tile = machine.tile(now % 2);
      tile.Clear();
      want.clear();
      for (LoopedRow& row : rows) {
        row = {};
        row.slots.n = static_cast<int32_t>(stream.Below(turns));
        row.value[5] = static_cast<float>(stream.Below(9));
        want.push_back(row.After());
        tile.Add({reinterpret_cast<std::byte*>(row.value), reinterpret_cast<std::byte*>(&row.slots),
                  row.gradient, &key, false});
      }
      machine.Run(now % 2);
      CHECK(rows == want);
    }
  }
}

TEST(LoopsThatAreNoneAreRefused) {
  const SlotLayout layout = SlotLayout::Parse(programs::LoopedRow::kLayout);
  const std::vector<int32_t> words = programs::PartsInALoop();
  const auto op_of = [](size_t instruction) { return 6 + 11 * 4 + instruction * (2 + kvjax::kMostOperands); };
  for (const Opcode op : {Opcode::k_loop, Opcode::k_leave, Opcode::k_again}) {
    for (size_t at = 0; at < 17; ++at) {
      std::vector<int32_t> changed = words;
      if (changed[op_of(at)] == static_cast<int32_t>(op)) continue;
      changed[op_of(at)] = static_cast<int32_t>(op);
      CHECK_THROWS(kInvalidArgument, Program::Parse("t", changed, 6, RowType::kFloat32, layout));
    }
  }
  // Parts that reach beyond a row, a slot, a register and the constants.
  for (const size_t field : {0u, 1u, 3u, 4u, 5u, 8u}) {
    for (const auto& [word, by] : {std::pair<size_t, int32_t>{2, 4}, {2, -3}, {3, 4}, {3, -5}}) {
      std::vector<int32_t> changed = words;
      changed[6 + field * 4 + word] += by;
      CHECK_THROWS(kInvalidArgument, Program::Parse("t", changed, 6, RowType::kFloat32, layout));
    }
  }
}

}  // namespace cpu_loop
