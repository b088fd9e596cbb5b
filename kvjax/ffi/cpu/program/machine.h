// The machine that runs a row program: its registers, for a tile of rows at a time.
//
// A tile is as many rows as keep the registers in the cache. There are two: while one is computed, the rows
// of the other are fetched.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvjax/ffi/core/facts.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/core/row.h"
#include "kvjax/ffi/cpu/program/alike.h"
#include "kvjax/ffi/cpu/program/kernels.h"
#include "kvjax/ffi/cpu/program/subnormal.h"
#include "kvjax/ffi/cpu/program/tile.h"

namespace kvjax::program {

/// A program, and the rows that it is for.
struct Kind {
  Program program;
  SlotLayout layout;
  size_t value_bytes;

  [[nodiscard]] bool Is(const Program& p, const SlotLayout& l, size_t bytes) const {
    return value_bytes == bytes && program == p && layout == l;
  }
};

/// What all rows of a call have in common.
struct Batch {
  const Cell* shared;  // the shared registers
  uint64_t seed;
  int64_t step;
};

/// One thread's.
class Machine {
 public:
  Machine(const Kind& kind, const Kernels& kernels)
      : kind_(kind),
        kernels_(kernels),
        rows_(RowsOfTile(kind)),
        tiles_{Tile(Rows()), Tile(Rows()), Tile(Rows())},
        cells_(static_cast<size_t>(kind.program.shared)) {
    const Program& p = kind.program;
    const size_t rows = static_cast<size_t>(rows_), dim = static_cast<size_t>(p.dim);
    const size_t vector = rows * dim, words = vector * static_cast<size_t>(p.vectors);
    registers_.reset(static_cast<float*>(::operator new(std::max<size_t>(words, 1) * sizeof(float), kLine)));
    scalars_.resize(rows * static_cast<size_t>(p.scalars));
    pointers_.resize(rows * (static_cast<size_t>(p.vectors) + p.fields.size()));
    for (size_t v = 0; v < static_cast<size_t>(p.vectors); ++v) {
      for (size_t r = 0; r < rows; ++r) pointers_[v * rows + r] = registers_.get() + v * vector + r * dim;
    }
    for (size_t t = 0; t < kTiles; ++t) random_[t] = {0, 0, tiles_[t].keys()};
    Bind(p.initial, initial_, kFresh);
    Bind(p.update, update_[0], 0);
    update_[1] = update_[0];
    for (Step& step : update_[1]) {
      for (Source& source : step.arg) source.rows = tiles_[0].Same(source.rows, tiles_[1]);
      step.out_rows = tiles_[0].Same(step.out_rows, tiles_[1]);
      step.random = &random_[1];
    }
    FindAlike();
  }

  /// What follows is about the rows of this call. What has been made of other shared registers is forgotten.
  void Begin(const Batch& batch) {
    for (Random& random : random_) random.seed = batch.seed, random.step = batch.step;
    const size_t bytes = cells_.size() * sizeof(Cell);
    if (bytes == 0 || std::memcmp(cells_.data(), batch.shared, bytes) == 0) return;
    std::memcpy(cells_.data(), batch.shared, bytes);
    for (const auto& memory : memory_) std::fill_n(memory.get(), Step::kMemory, std::byte{0});
    if (alike_) alike_->Clear();
  }

  /// Rows that fit a tile.
  [[nodiscard]] int32_t rows() const { return rows_; }

  /// One of the two tiles, to be filled.
  [[nodiscard]] Tile& tile(size_t number) { return tiles_[number]; }

  /// Runs the program on a tile, whose rows may change places, and fetches the rows of the other.
  void Run(size_t number) {
    const NoSubnormals scope;
    Tile& fresh = tiles_[kFresh];
    fresh.Clear();
    if (!initial_.empty()) fresh.AddFresh(tiles_[number]);
    const Program& p = kind_.program;
    if (fresh.size() > 0) Run(p.initial, initial_, fresh, nullptr, false);
    Run(p.update, update_[number], tiles_[number], &tiles_[number ^ 1], alike_.has_value());
  }

  /// Sums rows, as SumInOrder does.
  [[nodiscard]] auto sum() const {
    return [sum = kernels_.sum](float* to, const float* rows, std::span<const uint32_t> which, size_t dim) {
      sum(to, rows, which.data(), which.size(), dim);
    };
  }

 private:
  static constexpr std::align_val_t kLine{64};
  // Registers and parts of rows: of two tiles, more would leave the first cache, and of fewer rows the work
  // between two kernels would be most of it.
  static constexpr size_t kTileBytes = size_t{12} << 10;
  static constexpr size_t kFewest = 8, kMost = 256;
  static constexpr size_t kFresh = 2, kTiles = 3;
  static constexpr size_t kFewestShared = 4;  // instructions; to find rows takes as long as a few

  static int32_t RowsOfTile(const Kind& kind) {
    const Program& p = kind.program;
    const size_t row = (static_cast<size_t>(p.vectors) + 1) * static_cast<size_t>(p.dim) * sizeof(float) +
                       static_cast<size_t>(p.scalars) * sizeof(Cell) + kind.value_bytes +
                       kind.layout.stride();  // and one gradient
    return static_cast<int32_t>(std::clamp(kTileBytes / row, kFewest, kMost));
  }

  [[nodiscard]] float* const* Pointers(Register r) const {
    const auto number = static_cast<size_t>(r.number());
    const size_t before = r.kind() == Register::Kind::kField ? static_cast<size_t>(kind_.program.vectors) : 0;
    return pointers_.data() + (before + number) * static_cast<size_t>(rows_);
  }
  static bool HasPointers(Register r) {
    return r.kind() == Register::Kind::kVector || r.kind() == Register::Kind::kField;
  }
  [[nodiscard]] Source From(Register r, const Tile& tile) {
    if (r.kind() == Register::Kind::kField) return OfField(r, tile);
    if (r.kind() == Register::Kind::kVector) return {.rows = Pointers(r)};
    if (r.kind() == Register::Kind::kShared) return {.cells = cells_.data() + r.number(), .stride = 0};
    return {.cells = Scalars(r), .stride = 1};
  }
  [[nodiscard]] Source OfField(Register r, const Tile& tile) {
    const Field& field = kind_.program.FieldOf(r);
    if (field.is_fact()) return {.rows = tile.part(Tile::kFacts), .offset = sizeof(float) * field.fact()};
    if (field.is_register())
      return {.rows = pointers_.data() + static_cast<size_t>(field.vector()) * Rows(),
              .offset = field.offset()};
    if (field.is_constant()) {  // the same place for all rows, which nothing writes
      const Cell* const row = cells_.data() + field.constant();
      float** const to = const_cast<float**>(Pointers(r));
      std::fill_n(to, Rows(), reinterpret_cast<float*>(const_cast<Cell*>(row)));
      return {.rows = to, .offset = field.offset()};
    }
    if (field.source == Field::kGradient)
      return {.rows = tile.part(Tile::kGradient), .offset = field.offset()};
    if (field.source == Field::kValue) return {.rows = tile.part(Tile::kValue), .offset = field.offset()};
    const Slot& slot = kind_.layout.slots()[static_cast<size_t>(field.source)];
    return {.rows = tile.part(Tile::kSlots), .offset = slot.offset + field.offset()};
  }
  [[nodiscard]] size_t Rows() const { return static_cast<size_t>(rows_); }
  [[nodiscard]] Cell* Scalars(Register r) {
    return scalars_.data() + static_cast<size_t>(r.number()) * static_cast<size_t>(rows_);
  }

  void Bind(const std::vector<Instruction>& from, std::vector<Step>& to, size_t number) {
    const Tile& tile = tiles_[number];
    for (const Instruction& i : from) {
      Step step;
      const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
      Shape shape;
      for (int32_t j = 0; j < form.arity; ++j) {
        step.arg[j] = From(i.arg[j], tile);
        shape.vectors |= HasPointers(i.arg[j]) ? 1 << j : 0;
        step.width = std::max(step.width, kind_.program.WidthOf(i.arg[j]));
      }
      if (i.jumps()) {
        loops_.reserve(loops_.capacity() + 1);  // so that Run cannot fail
        to.push_back(step);
        continue;
      }
      step.width = std::max(step.width, kind_.program.WidthOf(i.out));
      shape.shared_base = i.arg[0].kind() == Register::Kind::kShared;
      shape.vector = HasPointers(i.out);
      if (HasPointers(i.out)) {
        const Source out = From(i.out, tile);
        step.out_rows = out.rows, step.out_offset = out.offset;
      }
      if (i.out.kind() == Register::Kind::kScalar) step.out = Scalars(i.out);
      if (i.op == Opcode::k_load || i.op == Opcode::k_store) {
        const Register row = i.op == Opcode::k_load ? i.arg[0] : i.out;
        const Field& field = kind_.program.fields[static_cast<size_t>(row.number())];
        shape.type = static_cast<int32_t>(field.type);
        shape.vector = HasPointers(i.op == Opcode::k_load ? i.out : i.arg[0]);
      }
      step.random = &random_[number];
      if ((i.op == Opcode::k_pow_f || i.op == Opcode::k_pow_d) && shape.shared_base) {
        memory_.push_back(std::make_unique<std::byte[]>(Step::kMemory));
        step.memory = memory_.back().get();
      }
      kernels_.find(i.op, shape, step);
      to.push_back(step);
    }
  }

  /// Finds what the update makes of single elements that rows keep. A program begins with that.
  void FindAlike() {
    const std::vector<Instruction>& update = kind_.program.update;
    const auto is_scalar = [](Register r) { return r.kind() == Register::Kind::kScalar; };
    std::vector<bool> kept(static_cast<size_t>(kind_.program.scalars)), made(kept.size()), read(kept.size());
    const auto is_one_of = [&](const std::vector<bool>& of, Register r) {
      return is_scalar(r) && of[static_cast<size_t>(r.number())];
    };
    for (; loads_ < update.size(); ++loads_) {
      const Instruction& i = update[loads_];
      if (i.op != Opcode::k_load || !is_scalar(i.out) || !IsSlot(i.arg[0]) || is_one_of(kept, i.out)) break;
      kept[static_cast<size_t>(i.out.number())] = true;
    }
    made = kept;
    for (shared_ = loads_; shared_ < update.size(); ++shared_) {
      const Instruction& i = update[shared_];
      const InstructionForm& form = kInstructionForms[static_cast<size_t>(i.op)];
      const bool follows = std::all_of(i.arg, i.arg + form.arity, [&](Register r) {
        return r.kind() == Register::Kind::kShared || is_one_of(made, r);
      });
      if (!is_scalar(i.out) || !follows || form.kind == InstructionForm::Kind::kMove) break;
      made[static_cast<size_t>(i.out.number())] = true;
    }
    if (loads_ == 0 || shared_ < loads_ + kFewestShared) return;
    // What is written in a loop may stay as it was, as a row may take no turn.
    for (size_t at = shared_, loops = 0; at < update.size(); ++at) {
      const Instruction& i = update[at];
      loops += i.op == Opcode::k_loop ? 1 : 0, loops -= i.op == Opcode::k_again ? 1 : 0;
      for (int32_t j = 0; j < kInstructionForms[static_cast<size_t>(i.op)].arity; ++j) {
        if (is_one_of(made, i.arg[j])) read[static_cast<size_t>(i.arg[j].number())] = true;
      }
      if (is_scalar(i.out) && loops == 0) made[static_cast<size_t>(i.out.number())] = false;
    }
    const auto cells = [&](const std::vector<bool>& of) {
      std::vector<Cell*> which;
      for (size_t r = 0; r < of.size(); ++r) {
        if (of[r]) which.push_back(scalars_.data() + r * static_cast<size_t>(rows_));
      }
      return which;
    };
    alike_.emplace(cells(kept), cells(read), static_cast<size_t>(rows_));
  }
  [[nodiscard]] bool IsSlot(Register r) const {
    return kind_.program.fields[static_cast<size_t>(r.number())].source >= 0;
  }

  void Run(const std::vector<Instruction>& list, const std::vector<Step>& steps, Tile& tile, const Tile* next,
           bool alike) {
    const auto rows = static_cast<int32_t>(tile.size());
    // A few rows after each step that all rows take, so that they do not wait for each other. Fractions of
    // 2^16.
    const size_t first = alike ? shared_ : 0, left = std::max<size_t>(steps.size() - first, 1);
    const size_t to_fetch = next == nullptr ? 0 : next->size(), each = ((to_fetch << 16) + left - 1) / left;
    size_t fetched = 0, done = 0;
    const auto run = [&](size_t until, int32_t on) {
      if (on == 0) done = until;
      for (; done < until; ++done) {
        const size_t by = done < first ? 0 : std::min(to_fetch, (done + 1 - first) * each >> 16);
        for (; fetched < by; ++fetched) Fetch(*next, fetched);
        if (list[done].jumps()) {
          Jump(list[done], steps[done], tile, done, on);
        } else {
          steps[done].kernel(steps[done], on, steps[done].width);
        }
      }
    };
    if (alike) {
      run(loads_, rows);
      run(shared_, alike_->Find(rows));
      alike_->Give(rows);
    }
    run(steps.size(), rows);
  }

  /// The first `on` rows of the tile are in the loop: those that leave it come behind them.
  void Jump(const Instruction& i, const Step& step, Tile& tile, size_t& done, int32_t& on) {
    const auto target = static_cast<size_t>(i.out.number());
    if (i.op == Opcode::k_again) done = target;
    if (i.op != Opcode::k_leave) return;
    if (loops_.empty() || loops_.back().leave != done) loops_.push_back({done, on});
    int32_t stay = 0;
    for (int32_t r = 0; r < on; ++r) {
      if (static_cast<uint32_t>(step.arg[0].cells[r].word) == 0) continue;
      if (stay != r) Swap(static_cast<size_t>(stay), static_cast<size_t>(r), tile);
      ++stay;
    }
    on = stay;
    if (on > 0) return;
    done = target, on = loops_.back().before;
    loops_.pop_back();
  }
  /// Each of two rows gets the place of the other, in the registers too.
  void Swap(size_t a, size_t b, Tile& tile) {
    const size_t vectors = static_cast<size_t>(kind_.program.vectors) * Rows();
    for (size_t at = 0; at < vectors; at += Rows()) std::swap(pointers_[at + a], pointers_[at + b]);
    for (size_t at = 0; at < scalars_.size(); at += Rows()) std::swap(scalars_[at + a], scalars_[at + b]);
    tile.Swap(a, b);
  }

  // By force inline: GCC takes a function that only prefetches for one without effects, and drops calls of
  // it.
  [[gnu::always_inline]] void Fetch(const Tile& tile, size_t row) const {
    Fetch(tile.part(Tile::kValue)[row], kind_.value_bytes);
    Fetch(tile.part(Tile::kSlots)[row], kind_.layout.stride());
    Fetch(tile.part(Tile::kGradient)[row], static_cast<size_t>(kind_.program.dim) * sizeof(float));
  }
  [[gnu::always_inline]] static void Fetch(const float* from, size_t bytes) {
    constexpr size_t kMostBytes = 2048;  // the processor sees by itself how longer ones go on
    for (size_t i = 0; i < std::min(bytes, kMostBytes); i += 64)
      __builtin_prefetch(reinterpret_cast<const std::byte*>(from) + i, 0, 3);
  }

  struct Free {
    void operator()(float* words) const { ::operator delete(words, kLine); }
  };

  const Kind& kind_;
  const Kernels& kernels_;
  int32_t rows_;
  Tile tiles_[kTiles];
  std::vector<Cell> cells_;  // the shared registers
  std::unique_ptr<float, Free> registers_;
  std::vector<Cell> scalars_;
  std::vector<float*> pointers_;  // to the rows of each vector register, and of each field of constants
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<Step> initial_, update_[2];  // by tile
  size_t loads_ = 0,
         shared_ = 0;  // where the update's loads of single elements end, and what follows from them
  struct Loop {
    size_t leave;
    int32_t before;  // rows
  };
  std::vector<Loop> loops_;     // that the rows are in
  std::optional<Alike> alike_;  // if that is worth finding rows for
  Random random_[kTiles];
};

}  // namespace kvjax::program
