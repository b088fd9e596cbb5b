// The names under which XLA finds the handlers of a backend.
#pragma once
#include <vector>

#include "kvjax/ffi/handlers/bags.h"
#include "kvjax/ffi/handlers/sharded.h"
#include "kvjax/ffi/handlers/tables.h"
#include "kvjax/ffi/handlers/training.h"
#include "xla/ffi/api/ffi.h"

namespace kvjax {

struct NamedHandler {
  const char* target;
  XLA_FFI_Handler* handler;
};

/// One handler: gives Function(exec, decoder) the call. All of them have this one binding; what each operand
/// is, its function says as it takes it. It has no traits: a launch holds state of the host, as where rows
/// are, so XLA must never capture a call into a command buffer and replay it.
template <class B, ffi::Error (*Function)(typename B::Exec&, Decoder&)>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .template Ctx<typename B::Ctx>()
                             .template Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To([](typename B::Exec exec, int32_t device, ffi::RemainingArgs args,
                                    ffi::RemainingRets rets, ffi::Dictionary attrs) {
                               Decoder in(device, args, rets, attrs);
                               ffi::Error error = ffi::Error::Success();
                               ffi::Error outer =
                                   Guard(in.table(), in.op(), [&] { error = Function(exec, in); });
                               return outer.failure() ? outer : error;
                             })
                             .release();
  return handler->Call(frame);
}

/// All that a backend can do.
template <Backend B>
std::vector<NamedHandler> Targets() {
  std::vector<NamedHandler> targets = {
      {"kvjax_lookup", Handle<B, Lookup<B>>},        {"kvjax_find_missing", Handle<B, FindMissing<B>>},
      {"kvjax_inspect", Handle<B, Inspect<B>>},      {"kvjax_read_slot", Handle<B, ReadSlot<B>>},
      {"kvjax_changed", Handle<B, Changed<B>>},      {"kvjax_write_keys", Handle<B, WriteKeys<B>>},
      {"kvjax_write_rows", Handle<B, WriteRows<B>>}, {"kvjax_accum", Handle<B, Accum<B>>},
      {"kvjax_evict", Handle<B, Evict<B>>},          {"kvjax_clear", Handle<B, Clear<B>>},
      {"kvjax_merge", Handle<B, Merge<B>>},          {"kvjax_apply", Handle<B, Apply<B>>},
      {"kvjax_gather", Handle<B, Gather<B>>},        {"kvjax_scatter", Handle<B, Scatter<B>>},
      {"kvjax_canary", Handle<B, Canary<B>>},        {"kvjax_after", Handle<B, After<B>>},
      {"kvjax_unasked", Handle<B, Unasked<B>>},      {"kvjax_end_refused", Handle<B, EndRefused<B>>},
      {"kvjax_bag_sum", Handle<B, BagSum<B>>},       {"kvjax_bag_expand", Handle<B, BagExpand<B>>},
      {"kvjax_bag_dot", Handle<B, BagDot<B>>},       {"kvjax_bag_max", Handle<B, BagMax<B>>},
      {"kvjax_bag_place", Handle<B, BagPlace<B>>},   {"kvjax_bag_ids", Handle<B, BagIds<B>>},
      {"kvjax_owned", Handle<B, OwnedKeys<B>>},      {"kvjax_route", Handle<B, RouteKeys<B>>},
      {"kvjax_check_same", Handle<B, CheckSame<B>>}, {"kvjax_agree", Handle<B, Agree<B>>},
      {"kvjax_receive", Handle<B, Receive<B>>},      {"kvjax_plan_step", Handle<B, PlanStep<B>>},
      {"kvjax_prepare", Handle<B, Prepare<B>>},      {"kvjax_commit_step", Handle<B, CommitStep<B>>},
  };
  if constexpr (HoldingBackend<B>) {
    targets.push_back({"kvjax_begin_apply", Handle<B, BeginApply<B>>});
    targets.push_back({"kvjax_end_apply", Handle<B, EndApply<B>>});
  }
  if constexpr (PlanningBackend<B>) {
    targets.push_back({"kvjax_plan_apply", Handle<B, PlanApply<B>>});
    targets.push_back({"kvjax_read_step", Handle<B, ReadStep<B>>});
    targets.push_back({"kvjax_write_step", Handle<B, WriteStep<B>>});
  }
  if constexpr (EvictingBackend<B>) {
    targets.push_back({"kvjax_summarize", Handle<B, Summarize<B>>});
    targets.push_back({"kvjax_continue", Handle<B, Continue<B>>});
  }
  return targets;
}

}  // namespace kvjax
