// Handlers of a training step: all of it with a row program, or merge, begin, gather and scatter; and the two
// calls that order others.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvjax/ffi/handlers/backend.h"
#include "kvjax/ffi/handlers/decode.h"
#include "kvjax/ffi/handlers/failures.h"
#include "kvjax/ffi/handlers/tables.h"

namespace kvjax {

/// The sums of gradients, which may belong to no table yet. One that fails on one device of a mesh gives
/// padding.
template <Backend B>
ffi::Error Merge(typename B::Exec& exec, Decoder& in) {
  return AnswerRead<B>(exec, in, Op::kMerge, [&] {
    MergeOperands o;
    o.keys = in.InKeys(false);
    const size_t n = o.keys.n;
    const ffi::AnyBuffer rows = in.In();
    o.dim = n == 0 ? 0 : rows.element_count() / n;
    in.Want(Decoder::Holds(rows, ffi::F32, n * o.dim), "rows (n, dim) float32", rows);
    o.gradients.rows = static_cast<const float*>(rows.untyped_data());
    o.gradients.counts = in.In<int32_t>("counts (n,)", n);
    const Array1<const uint32_t> canaries = in.InAny<uint32_t>("canaries ()");
    o.gradients.canaries = canaries.data, o.gradients.num_canaries = canaries.n;
    o.out_keys = in.Out<uint64_t>("keys (n, 2)", n);
    o.out_rows = in.Out<float>("rows (n, dim)", n * o.dim);
    o.out_counts = in.Out<int32_t>("counts (n,)", n);
    (void)in.Done(exec);
    try {
      B::Merge(exec, o);
    } catch (...) {
      B::Fill(exec, reinterpret_cast<uint32_t*>(o.out_counts), n, 0);
      throw;
    }
  });
}

/// The call that plans a step, body(). One that `reports` fails nobody: its last result is a status () then.
template <class B, class Body>
ffi::Error PlanTraining(typename B::Exec& exec, Decoder& in, Body body) {
  in.Names(Name(Op::kApply), in.Text("table"));
  if (!in.Flag("reports")) return Guard(in.table(), in.op(), body);
  return AnswerRead<B>(exec, in, in.op(), true, body);
}

/// What a step is made of.
inline StepSpan InStep(Decoder& in, const TableSpec& spec) {
  StepSpan step;
  step.version = in.InVersion();
  step.keys = in.InKeys(in.Flag("narrow"));
  step.gradients = in.InGradients(spec, step.keys.n);
  step.step = in.In<int64_t>("step (2,)", 1);
  step.layout = SlotLayout::Parse(in.Text("slots"));
  step.initial = in.InInitial(spec);
  return step;
}

template <Backend B>
ffi::Error Apply(typename B::Exec& exec, Decoder& in) {
  return PlanTraining<B>(exec, in, [&] {
    const auto table = TableOf<B>(in);
    ApplyOperands o;
    o.step = InStep(in, table->spec());
    std::optional<Program> program = in.ProgramFor(table->spec(), o.step.layout);
    if (!program) throw ProgramError(in.table(), 0);
    o.program = *std::move(program);
    o.shared = in.InShared(static_cast<size_t>(o.program.shared));
    o.holds = in.Flag("holds");
    o.planned = in.Flag("planned");
    o.next = in.OutWord();
    B::Apply(in.Done(exec), *table, o);
  });
}

template <PlanningBackend B>
ffi::Error PlanApply(typename B::Exec& exec, Decoder& in) {
  return PlanTraining<B>(exec, in, [&] {
    const auto table = TableOf<B>(in);
    PlanApplyOperands o;
    o.step = InStep(in, table->spec());
    o.reports = in.Flag("reports");
    o.status = in.OutWord();
    B::PlanApply(in.Done(exec), *table, o);
  });
}

/// Facts about n rows, or nullptr for those of none, which nobody wants.
inline RowFacts* OutFacts(Decoder& in, std::string_view what, size_t n) {
  const ffi::AnyBuffer facts = in.Out();
  const bool wanted = facts.element_count() > 0;
  in.Want(Decoder::Holds(facts, ffi::U32, wanted ? n * RowFacts::kWords : 0), what, facts);
  return wanted ? static_cast<RowFacts*>(facts.untyped_data()) : nullptr;
}

/// The operands behind the rows are only waited for.
template <HoldingBackend B>
ffi::Error EndApply(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    EndApplyOperands o;
    o.token = in.InVersion("the word of a step ()");
    const Array1<const float> rows = in.InAny<float>("rows (n, dim)");
    o.rows = rows.data, o.num_rows = rows.n / static_cast<size_t>(table->spec().dim);
    o.next = in.OutWord();
    in.SkipOperands();
    B::EndApply(in.Done(exec), *table, o);
  });
}

template <HoldingBackend B>
ffi::Error BeginApply(typename B::Exec& exec, Decoder& in) {
  return PlanTraining<B>(exec, in, [&] {
    const auto table = TableOf<B>(in);
    BeginApplyOperands o;
    o.step = InStep(in, table->spec());
    o.next = in.OutWord();
    o.targets = in.Out<uint32_t>("targets (n, 2)", 2 * o.step.keys.n);
    o.active = in.Out<int32_t>("active ()", 1);
    o.used_step = in.Out<int64_t>("step (2,)", 1);
    o.shared_gradient = in.OutFloats(table->spec(), 1);
    o.facts = OutFacts(in, "facts (n, 9) or (0, 9)", o.step.keys.n);
    B::BeginApply(in.Done(exec), *table, o);
  });
}

/// The slots of a chunk have the sizes that the layout says, which is that of the attribute. Returns it.
inline SlotLayout WantSlots(const Decoder& in, size_t chunk, const std::vector<ffi::AnyBuffer>& slots) {
  SlotLayout layout = SlotLayout::Parse(in.Text("slots"));
  for (size_t s = 0; s < std::max(slots.size(), layout.slots().size()); ++s) {
    const bool ok =
        slots.size() == layout.slots().size() && slots[s].size_bytes() == chunk * layout.slots()[s].bytes;
    if (!ok) {
      throw OperandError(in.table(), in.op(), "slots " + layout.ToString(),
                         std::to_string(slots.size()) + " arrays of other sizes");
    }
  }
  return layout;
}

/// The layout that the slots of a chunk are of, or those of all rows of a step.
template <class Operands>
SlotLayout& SlotsOf(Operands& o) {
  if constexpr (requires { o.chunk; }) {
    return o.chunk.layout;
  } else {
    return o.step.layout;
  }
}

/// Rows that are handed out: values, grads (or (0, dim) if nobody wants them), fresh, row keys, facts about
/// the rows (or (0, 9)), and one array per slot. Returns how many.
template <class Operands>
size_t OutRows(Decoder& in, const TableSpec& spec, Operands& o) {
  const ffi::AnyBuffer values = in.Out(), grads = in.Out(), fresh = in.Out();
  const size_t n = fresh.element_count(), dim = static_cast<size_t>(spec.dim);
  in.Want(Decoder::Holds(values, DataTypeOf(spec.type), n * dim), "values (chunk, dim) of the table's dtype",
          values);
  const bool wanted = n == 0 || grads.element_count() > 0;
  in.Want(Decoder::Holds(grads, ffi::F32, wanted ? n * dim : 0), "grads (chunk, dim) float32", grads);
  in.Want(Decoder::Holds(fresh, ffi::PRED, n), "fresh (chunk,) bool", fresh);
  o.values = static_cast<std::byte*>(values.untyped_data());
  o.grads = wanted ? static_cast<float*>(grads.untyped_data()) : nullptr;
  o.fresh = static_cast<bool*>(fresh.untyped_data());
  o.row_keys = in.Out<uint64_t>("keys (chunk, 2)", n);
  o.row_facts = OutFacts(in, "facts (chunk, 9) or (0, 9)", n);
  std::vector<ffi::AnyBuffer> slots;
  while (in.HasOut()) {
    slots.push_back(in.Out());
    o.slots.push_back(static_cast<std::byte*>(slots.back().untyped_data()));
  }
  SlotsOf(o) = WantSlots(in, n, slots);
  return n;
}
/// And what comes back of them: values and one array per slot.
template <class Operands>
size_t InRows(Decoder& in, const TableSpec& spec, Operands& o) {
  const ffi::AnyBuffer values = in.In();
  const size_t dim = static_cast<size_t>(spec.dim), n = values.element_count() / dim;
  in.Want(Decoder::Holds(values, DataTypeOf(spec.type), n * dim), "values (chunk, dim) of the table's dtype",
          values);
  o.values = static_cast<const std::byte*>(values.untyped_data());
  std::vector<ffi::AnyBuffer> slots;
  while (in.HasIn()) {
    slots.push_back(in.In());
    o.slots.push_back(static_cast<const std::byte*>(slots.back().untyped_data()));
  }
  SlotsOf(o) = WantSlots(in, n, slots);
  return n;
}

/// targets, keys, rows, shared_gradient and facts are empty if the step is that of a shard, which has them
/// itself.
template <Backend B>
ffi::Error Gather(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    const TableSpec& spec = table->spec();
    GatherOperands o;
    o.version = in.InVersion();
    const Array1<const uint32_t> targets = in.InAny<uint32_t>("targets (n, 2)");
    const size_t n = targets.n / 2;
    o.keys = in.In<uint64_t>("keys (n, 2)", n);
    o.rows = in.InFloats(spec, n);
    const ffi::AnyBuffer shared_gradient = in.In();
    const size_t dim = static_cast<size_t>(spec.dim),
                 shared_size = n == 0 && shared_gradient.element_count() == 0 ? 0 : dim;
    in.Want(Decoder::Holds(shared_gradient, ffi::F32, shared_size), "the shared gradient (dim,) float32",
            shared_gradient);
    o.shared_gradient = static_cast<const float*>(shared_gradient.untyped_data());
    const ffi::AnyBuffer facts = in.In();
    const bool given = facts.element_count() > 0;
    in.Want(Decoder::Holds(facts, ffi::U32, given ? n * RowFacts::kWords : 0), "facts (n, 9) or (0, 9)",
            facts);
    o.facts = given ? static_cast<const RowFacts*>(facts.untyped_data()) : nullptr;
    o.chunk = {.targets = targets.data, .num_rows = n};
    o.chunk.start = in.In<int32_t>("start ()", 1);
    o.chunk.active = in.In<int32_t>("active ()", 1);
    o.chunk.size = OutRows(in, spec, o);
    in.Want(o.row_facts == nullptr || given || n == 0, "the facts (n, 9) of the step", facts);
    B::Gather(in.Done(exec), *table, o);
  });
}

/// Writes the chunk back; out: the version, for the next call to depend on.
template <Backend B>
ffi::Error Scatter(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    const TableSpec& spec = table->spec();
    ScatterOperands o;
    o.version = in.InVersion();
    const Array1<const uint32_t> targets = in.InAny<uint32_t>("targets (n, 2)");
    o.chunk = {.targets = targets.data, .num_rows = targets.n / 2};
    o.chunk.start = in.In<int32_t>("start ()", 1);
    o.chunk.active = in.In<int32_t>("active ()", 1);
    o.chunk.size = InRows(in, spec, o);
    o.holds = in.Flag("holds");
    o.out = in.OutWord();
    B::Scatter(in.Done(exec), *table, o);
  });
}

template <PlanningBackend B>
ffi::Error ReadStep(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    ReadStepOperands o;
    o.step = InStep(in, table->spec());
    o.used_step = in.Out<int64_t>("step (2,)", 1);
    o.size = OutRows(in, table->spec(), o);
    if (o.size < o.step.keys.n) throw ChunkError(in.table());
    B::ReadStep(in.Done(exec), *table, o);
  });
}

template <PlanningBackend B>
ffi::Error WriteStep(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const auto table = TableOf<B>(in);
    WriteStepOperands o;
    o.step = InStep(in, table->spec());
    if (InRows(in, table->spec(), o) < o.step.keys.n) throw ChunkError(in.table());
    o.planned = in.Flag("planned");
    o.next = in.OutWord();
    B::WriteStep(in.Done(exec), *table, o);
  });
}

/// The operands behind the uses are only waited for.
template <Backend B>
ffi::Error Canary(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kValueAndGrad), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const Array1<const float> used = in.InAny<float>("uses (lookups,)");
    uint32_t* const canary = in.OutWord();
    in.SkipOperands();
    B::Canary(in.Done(exec), {.table = in.table(), .used = used.data, .lookups = used.n, .canary = canary});
  });
}
/// The version, handed through once all operands behind it exist.
template <Backend B>
ffi::Error After(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kAfter), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const uint32_t* const version = in.InVersion();
    uint32_t* const out = in.OutWord();
    in.SkipOperands();
    B::Copy(in.Done(exec), version, 1, out);
  });
}

/// refused: () uint32, 0 or the number of a failure that a step has kept to itself. Gives it, or 0 unless
/// somebody is still to ask for it, and the step that begins is refused for it, too.
template <Backend B>
ffi::Error Unasked(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const uint32_t* const refused = in.InVersion("the number of a failure ()");
    uint32_t* const out = in.OutWord();
    const uint32_t number = B::Read(in.Done(exec), refused);
    B::Fill(exec, out, 1, Failures::Get().RefusesAnother(number) ? number : 0);
  });
}

/// The end of a step that has been refused, in the place of the call that would do it: the version stays, and
/// somebody has to ask for the failure of that number () uint32.
template <Backend B>
ffi::Error EndRefused(typename B::Exec& exec, Decoder& in) {
  in.Names(Name(Op::kApply), in.Text("table"));
  return Guard(in.table(), in.op(), [&] {
    const uint32_t* const version = in.InVersion();
    const uint32_t* const refused = in.InVersion("the number of a failure ()");
    uint32_t* const out = in.OutWord();
    Failures::Get().Leave(B::Read(in.Done(exec), refused), in.table());
    B::Copy(exec, version, 1, out);
  });
}

}  // namespace kvjax
