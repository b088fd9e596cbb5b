// The names under which XLA finds a backend's handlers.
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

/// One handler: decodes its operands as `Bind` says and calls `Function`.
template <auto Function, auto Bind>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame) {
  static auto* handler = Bind().To(Function).release();
  return handler->Call(frame);
}

/// Those of a table in one place.
template <Backend B>
std::vector<NamedHandler> TableTargets() {
  return {
      {"kvjax_lookup", Handle<Lookup<B>, BindLookup<B>>},
      {"kvjax_find_missing", Handle<FindMissing<B>, BindFindMissing<B>>},
      {"kvjax_inspect", Handle<Inspect<B>, BindInspect<B>>},
      {"kvjax_read_slot", Handle<ReadSlot<B>, BindReadSlot<B>>},
      {"kvjax_changed", Handle<Changed<B>, BindChanged<B>>},
      {"kvjax_write_keys", Handle<WriteKeys<B>, BindWriteKeys<B>>},
      {"kvjax_write_rows", Handle<WriteRows<B>, BindWriteRows<B>>},
      {"kvjax_accum", Handle<Accum<B>, BindAccum<B>>},
      {"kvjax_evict", Handle<Evict<B>, BindEvict<B>>},
      {"kvjax_clear", Handle<Clear<B>, BindClear<B>>},
      {"kvjax_merge", Handle<Merge<B>, BindMerge<B>>},
      {"kvjax_begin_apply", Handle<BeginApply<B>, BindBeginApply<B>>},
      {"kvjax_gather", Handle<Gather<B>, BindGather<B>>},
      {"kvjax_scatter", Handle<Scatter<B>, BindScatter<B>>},
      {"kvjax_seal", Handle<Seal<B>, BindOrder<B>>},
      {"kvjax_after", Handle<After<B>, BindOrder<B>>},
  };
}

/// Those of a table over several devices.
template <ShardedBackend B>
std::vector<NamedHandler> ShardedTargets() {
  return {
      {"kvjax_owned", Handle<OwnedKeys<B>, BindOwnedKeys<B>>},
      {"kvjax_route", Handle<RouteKeys<B>, BindRouteKeys<B>>},
      {"kvjax_alike", Handle<Alike<B>, BindAlike<B>>},
      {"kvjax_agree", Handle<Agree<B>, BindAgree<B>>},
      {"kvjax_receive", Handle<Receive<B>, BindReceive<B>>},
      {"kvjax_plan_step", Handle<PlanStep<B>, BindPlanStep<B>>},
      {"kvjax_prepare", Handle<Prepare<B>, BindPrepare<B>>},
      {"kvjax_commit_step", Handle<CommitStep<B>, BindCommitStep<B>>},
  };
}
template <RoomBackend B>
std::vector<NamedHandler> RoomTargets() {
  return {
      {"kvjax_facts", Handle<Facts<B>, BindFacts<B>>},
      {"kvjax_hear", Handle<Hear<B>, BindHear<B>>},
  };
}

/// Those of pooling.
template <BagBackend B>
std::vector<NamedHandler> BagTargets() {
  return {
      {"kvjax_bag_sum", Handle<BagSum<B>, BindBags<B>>},
      {"kvjax_bag_spread", Handle<BagSpread<B>, BindBags<B>>},
      {"kvjax_bag_dot", Handle<BagDot<B>, BindBags<B>>},
      {"kvjax_bag_max", Handle<BagMax<B>, BindBagMax<B>>},
      {"kvjax_bag_place", Handle<BagPlace<B>, BindBags<B>>},
      {"kvjax_bag_ids", Handle<BagIds<B>, BindBagIds<B>>},
  };
}

}  // namespace kvjax
