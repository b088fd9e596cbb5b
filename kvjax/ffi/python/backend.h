// The bindings of a backend: handlers, constants, hashes, and the calls on its whole tables. Every module is
// made of these.
#pragma once
#include <nanobind/nanobind.h>

#include "kvjax/ffi/core/instructions.h"
#include "kvjax/ffi/core/operation.h"
#include "kvjax/ffi/core/program.h"
#include "kvjax/ffi/handlers/targets.h"
#include "kvjax/ffi/python/common.h"
#include "kvjax/ffi/python/deltas.h"
#include "kvjax/ffi/python/frozen.h"
#include "kvjax/ffi/python/shards.h"
#include "kvjax/ffi/python/tables.h"

namespace kvjax {

inline nb::dict HandlersToPython(const std::vector<NamedHandler>& targets) {
  nb::dict handlers;
  for (const auto& [target, handler] : targets)
    handlers[target] = nb::capsule(reinterpret_cast<void*>(handler));
  return handlers;
}

/// What Python has to know of each operation, by its name.
inline nb::dict OperationsToPython() {
  nb::dict operations;
  for (const Operation& o : kOperations) {
    nb::dict about;
    about["writes"] = o.writes;
    about["makes_rows"] = o.makes_rows;
    about["needs_initial"] = o.needs_initial;
    about["evicts"] = o.evicts;
    operations[nb::str(o.name.data(), o.name.size())] = about;
  }
  return operations;
}

/// The instructions of row programs: name, number of operands, and whether it makes one element of a row's;
/// an opcode is a place in it.
inline nb::list InstructionsToPython() {
  nb::list instructions;
  for (const InstructionForm& form : kInstructionForms) {
    const bool reduces = form.kind == InstructionForm::Kind::kReduce;
    instructions.append(nb::make_tuple(nb::str(form.name.data(), form.name.size()), form.arity, reduces));
  }
  return instructions;
}

/// The kinds of operands and the calls of each fused instruction, in the order in which they are to be looked
/// for.
inline nb::dict FusedToPython() {
  nb::dict fused;
  for (const InstructionForm& form : kInstructionForms) {
    if (form.kind == InstructionForm::Kind::kFused)
      fused[nb::str(form.name.data(), form.name.size())] = nb::make_tuple(
          nb::str(form.kinds.data(), form.kinds.size()), nb::str(form.calls.data(), form.calls.size()));
  }
  return fused;
}

/// `targets` gives the handlers, which another compiler may have compiled.
template <WholeTable T>
void BindBackend(nb::module_& m, std::vector<NamedHandler> (*targets)()) {
  nb::set_leak_warnings(false);  // of what a daemon thread holds that ends with the process
  BindCommon(m);
  m.attr("OPERATIONS") = OperationsToPython();
  m.attr("INSTRUCTIONS") = InstructionsToPython();
  m.attr("FUSED") = FusedToPython();
  m.attr("MAX_OPERANDS") = kMostOperands;
  m.attr("MAX_INSTRUCTIONS") = Program::kMost;
  BindTables<T>(m);
  BindShards<T>(m);
  BindDeltas<T>(m);
  BindFrozen<T>(m);
  m.def(
      "handlers", [targets] { return HandlersToPython(targets()); },
      nb::sig("def handlers() -> dict[str, object]"), "XLA FFI handlers by target name.");
}

/// A backend whose kernels this compiler compiles too.
template <class B>
void BindBackend(nb::module_& m) {
  BindBackend<typename B::Table>(m, &Targets<B>);
}

}  // namespace kvjax
