// The backend concepts, what a backend supplies to the handlers: a function per operation over (where it
// runs, the table, the operands).
#pragma once
#include <cstddef>
#include <cstdint>

#include "kvjax/ffi/core/operands.h"

namespace kvjax {

/// `Ctx` is the FFI context that carries the execution resource, `Exec` its decoded form, `Table` the table.
/// The functions throw kvjax::Error or std::bad_alloc.
template <class B>
concept Backend =
    requires(typename B::Exec& exec, typename B::Table& table, const LookupOperands& lookup,
             const FindMissingOperands& find_missing, const InspectOperands& inspect,
             const ReadSlotOperands& read_slot, const ChangedOperands& changed,
             const WriteKeysOperands& write_keys, const WriteRowsOperands& write_rows,
             const AccumOperands& accum, const EvictOperands& evict, const ClearOperands& clear,
             const MergeOperands& merge, const ApplyOperands& apply, const GatherOperands& gather,
             const ScatterOperands& scatter, const CanaryOperands& canary) {
      typename B::Ctx;
      B::Lookup(exec, table, lookup);
      B::FindMissing(exec, table, find_missing);
      B::Inspect(exec, table, inspect);
      B::ReadSlot(exec, table, read_slot);
      B::Changed(exec, table, changed);
      B::WriteKeys(exec, table, write_keys);
      B::WriteRows(exec, table, write_rows);
      B::Accum(exec, table, accum);
      B::Evict(exec, table, evict);
      B::Clear(exec, table, clear);
      B::Apply(exec, table, apply);
      B::Gather(exec, table, gather);
      B::Scatter(exec, table, scatter);
      B::Merge(exec, merge);
      B::Canary(exec, canary);
    } &&
    requires(typename B::Exec& exec, const uint32_t* word, uint32_t* out, const std::byte* from,
             std::byte* to, size_t n) {
      B::Copy(exec, word, n, out);  // n words, or bytes; nothing if they are there
      B::Copy(exec, from, n, to);
      B::Fill(exec, out, n, 0u);  // n words
      B::Read(exec, word);
    } &&
    requires(typename B::Exec& exec, typename B::Table& table, const OwnedOperands& owned,
             const RouteOperands& route, const ReceiveOperands& receive, const PlanStepOperands& plan,
             const PrepareOperands& prepare, const CommitStepOperands& commit, uint64_t* summary) {
      B::Owned(exec, owned);
      B::Route(exec, route);
      B::Receive(exec, table, receive);
      B::PlanStep(exec, table, plan);
      B::PutFailure(exec, summary, 0u);  // a number, instead of a summary
      B::Prepare(exec, table, prepare);  // gives the number of the failure this shard has had before, or 0
      B::CommitStep(exec, table, commit);
    } &&
    requires(typename B::Exec& exec, const BagSumOperands& sum, const BagExpandOperands& expand,
             const BagDotOperands& dot, const BagMaxOperands& max, const BagPlaceOperands& place,
             const BagIdsOperands& ids) {
      B::BagSum(exec, sum);
      B::BagExpand(exec, expand);
      B::BagDot(exec, dot);
      B::BagMax(exec, max);
      B::BagPlace(exec, place);
      B::BagIds(exec, ids);
    };

/// Whose steps can be planned by one call and made by another, once those of other tables are planned, or
/// what has been done to their rows is there.
template <class B>
concept HoldingBackend =
    Backend<B> && requires(typename B::Exec& exec, typename B::Table& table, const BeginApplyOperands& begin,
                           const EndApplyOperands& end) {
      B::BeginApply(exec, table, begin);
      B::EndApply(exec, table, end);
    };

/// Whose steps can be tried by one call, which holds nothing, and made by another; and their rows read.
template <class B>
concept PlanningBackend =
    Backend<B> && requires(typename B::Exec& exec, typename B::Table& table, const PlanApplyOperands& plan,
                           const ReadStepOperands& read_step, const WriteStepOperands& write_step) {
      B::PlanApply(exec, table, plan);
      B::ReadStep(exec, table, read_step);
      B::WriteStep(exec, table, write_step);
    };

/// Whose shards choose together which rows are evicted so that a write can be made.
template <class B>
concept EvictingBackend =
    Backend<B> && requires(typename B::Exec& exec, typename B::Table& table, const SummaryOperands& summary,
                           const ContinueOperands& more) {
      B::Summarize(exec, table, summary);
      B::Continue(exec, table, more);
    };

}  // namespace kvjax
