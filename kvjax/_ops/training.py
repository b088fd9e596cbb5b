"""Calls of a training step, one function per target: apply; or merge, begin, gather and scatter, of a device read and
write; on a shard receive, plan and commit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys
from kvjax._keys.opaque import words_in
from kvjax._keys.sparse_rows import SparseRows
from kvjax._ops.call import WORD, array, flag, initial_operand, nothing, read, write
from kvjax._programs.program import Run
from kvjax._spec.spec import TableSpec
from kvjax._values.facts import NUM_FACTS


def merge(
    spec: TableSpec | None, keys: Keys, rows: jax.Array, counts: jax.Array, canaries: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Key words ``(n, 2)``, rows ``(n, dim)`` float32 and counts ``(n,)`` int32, distinct keys first; and the status.

    spec: of a sharded table, on whose devices a failure is to be agreed on; or None, and it is an error of this call.
    """
    results = (
        array(keys.words.shape, jnp.uint32),
        array(rows.shape, jnp.float32),
        array(counts.shape, jnp.int32),
        WORD,
    )
    table, sharded = "" if spec is None else spec.name, flag(spec is not None)
    return read("kvjax_merge", results, keys.words, rows, counts, canaries, table=table, sharded=sharded)


class StepBatch(NamedTuple):
    """What a training step brings to a table in one place.

    Attributes:
      version: ``()`` uint32, of the write.
      grads: gradients ``(n, dim)`` float32 of keys ``(n,)``.
      step: ``(2,)`` uint32, the words of int64.
      initial: as `kvjax._ops.writes.Batch` has it.
      slots: the layout that the optimizer wants.
    """

    version: jax.Array
    grads: SparseRows
    step: jax.Array
    initial: jax.Array | None
    slots: str

    def operands(self, spec: TableSpec) -> tuple[Any, ...]:
        keys, rows, counts, canary = self.grads.keys, self.grads.rows, self.grads.counts, words_in(self.grads.canary)
        return self.version, keys.words, counts, canary, rows, self.step, initial_operand(spec, self.initial)

    def attributes(self, spec: TableSpec) -> dict[str, Any]:
        return {"table": spec.name, "slots": self.slots, "narrow": flag(self.grads.keys.narrow)}


def apply(
    spec: TableSpec, batch: StepBatch, run: Run, *, holds: bool, reports: bool, planned: bool
) -> tuple[jax.Array, jax.Array]:
    """A whole training write. Returns the next version, or of a step that holds for `end_apply` the word by which that
    knows it; and the status, which is 0 unless it reports. One that `plan_apply` has planned does nothing for a version
    that is not the live one."""
    operands = (*batch.operands(spec), run.shared)
    attributes = batch.attributes(spec) | {"planned": flag(planned), "program": _words(run)}
    return _planned("kvjax_apply", [WORD], operands, reports, holds=flag(holds), **attributes)


def _planned(target: str, results: list[Any], operands: Any, reports: bool, **attributes: Any) -> Any:
    """What a call that plans a step gives, and its status: 0 if it does not report one, but fails."""
    status = [WORD] if reports else []
    given = write("apply", target, (*results, *status), *operands, reports=flag(reports), **attributes)
    return *given[: len(results)], given[-1] if reports else jnp.uint32(0)


def plan_apply(spec: TableSpec, batch: StepBatch, *, reports: bool) -> jax.Array:
    """The status of a step on a device: 0 if `apply` or `write_step` can do it. Nothing is held for that. One that
    reports waits for the device, so that it is the number of a failure; one that does not, fails later by itself."""
    operands = batch.operands(spec)
    refused, status = _planned("kvjax_plan_apply", [WORD], operands, reports, **batch.attributes(spec))
    return status if reports else refused


def end_apply(spec: TableSpec, token: jax.Array, rows: jax.Array, others: jax.Array) -> jax.Array:
    """Does a step that holds, once `others` exist. Returns the next version.

    rows: the gradients of the batch, ``(n, dim)`` float32.
    """
    return write("apply", "kvjax_end_apply", WORD, token, rows, others, table=spec.name)


def end_refused(spec: TableSpec, version: jax.Array, number: jax.Array) -> jax.Array:
    """Ends a step that has been refused, for the failure of that number, which `kvjax.commit` asks for. Returns the
    version."""
    return write("apply", "kvjax_end_refused", WORD, version, number, table=spec.name)


def unasked(spec: TableSpec, number: jax.Array) -> jax.Array:
    """The number of a failure that `end_refused` was told, or 0 once it has been asked for."""
    return read("kvjax_unasked", WORD, number, table=spec.name)


def _words(run: Run | None) -> np.ndarray:
    return np.asarray([] if run is None else run.program.words, np.int32)


@dataclasses.dataclass(frozen=True)
class ChunkedStep:
    """A training step that goes on in chunks. On a shard of a sharded table all but the first three are empty.

    Attributes:
      version: ``()`` uint32, the word by which the first call of a chunk knows the step; the last one gives the next
        version.
      active: ``()`` int32, the rows of the step.
      step: ``(2,)`` uint32, the words of the step that was counted.
      targets: ``(n, 2)`` uint32, for each row of the step its id and which gradient it gets.
      keys: ``(n, 2)`` uint32 of the gradients.
      rows: ``(n, dim)`` float32, the gradients.
      shared: ``(dim,)`` float32, the gradient of the row that unadmitted keys share.
      facts: ``(n, 9)`` uint32 about the rows, or ``(0, 9)`` if nobody wants them.
    """

    version: jax.Array
    active: jax.Array
    step: jax.Array
    targets: Any
    keys: Any
    rows: Any
    shared: Any
    facts: Any


def begin_apply(spec: TableSpec, batch: StepBatch, facts: bool, *, reports: bool) -> tuple[ChunkedStep, jax.Array]:
    """The step, and its status, as `apply` has it."""
    grads, n = batch.grads, batch.grads.counts.shape[0]
    results = [
        WORD,
        array((n, 2), jnp.uint32),
        array((), jnp.int32),
        array((2,), jnp.uint32),
        array((spec.dim,), jnp.float32),
        array((n if facts else 0, NUM_FACTS), jnp.uint32),
    ]
    given = _planned("kvjax_begin_apply", results, batch.operands(spec), reports, **batch.attributes(spec))
    version, targets, active, used, shared, about, status = given
    return ChunkedStep(version, active, used, targets, grads.keys.words, grads.rows, shared, about), status


def gather(
    spec: TableSpec,
    version: jax.Array,
    begun: ChunkedStep,
    start: jax.Array,
    chunk: int,
    slots: str,
    slot_types: Sequence[jax.ShapeDtypeStruct],
    facts: bool = False,
) -> tuple[jax.Array, ...]:
    """Values and gradients ``(chunk, dim)``, fresh ``(chunk,)`` bool, keys ``(chunk, 2)``, facts ``(chunk, 9)`` uint32,
    then one array per slot.

    Without `facts` those are ``(0, 9)``.
    """
    results = _row_results(spec, chunk, slot_types, True, facts)
    operands = (version, begun.targets, begun.keys, begun.rows, begun.shared, begun.facts, start, begun.active)
    return write("apply", "kvjax_gather", results, *operands, table=spec.name, slots=slots)


def _row_results(
    spec: TableSpec, n: int, slot_types: Sequence[jax.ShapeDtypeStruct], gradients: bool, facts: bool
) -> tuple[Any, ...]:
    return (
        array((n, spec.dim), spec.row_dtype),
        array((n if gradients else 0, spec.dim), jnp.float32),
        array((n,), jnp.bool_),
        array((n, 2), jnp.uint32),
        array((n if facts else 0, NUM_FACTS), jnp.uint32),
        *(array((n, *slot.shape), slot.dtype) for slot in slot_types),
    )


def read_step(
    spec: TableSpec,
    batch: StepBatch,
    n: int,
    slot_types: Sequence[jax.ShapeDtypeStruct],
    *,
    gradients: bool,
    facts: bool,
) -> tuple[jax.Array, ...]:
    """Of a table on a device, the words of the step and then what `gather` gives, `n` rows at once: those that the step
    would train, each where its gradient is. It changes nothing, and holds nothing for `write_step`.

    Without `gradients` these are ``(0, dim)``.
    """
    results = (array((2,), jnp.uint32), *_row_results(spec, n, slot_types, gradients, facts))
    return read("kvjax_read_step", results, *batch.operands(spec), **batch.attributes(spec))


def write_step(
    spec: TableSpec, batch: StepBatch, values: jax.Array, slots: Sequence[jax.Array], *, planned: bool
) -> jax.Array:
    """The whole of that step, with the values and slots that its rows get. Returns the next version."""
    operands = (*batch.operands(spec), values, *slots)
    return write("apply", "kvjax_write_step", WORD, *operands, **batch.attributes(spec), planned=flag(planned))


def scatter(
    spec: TableSpec,
    version: jax.Array,
    begun: ChunkedStep,
    start: jax.Array,
    values: jax.Array,
    slots: str,
    slot_arrays: Sequence[jax.Array],
    holds: bool,
) -> jax.Array:
    """Writes the chunk back and hands the version through; the last one gives the next version, unless the step holds
    for `end_apply`."""
    operands = (version, begun.targets, start, begun.active, values, *slot_arrays)
    return write("apply", "kvjax_scatter", WORD, *operands, table=spec.name, slots=slots, holds=flag(holds))


def receive(
    spec: TableSpec,
    version: jax.Array,
    turn: tuple[Any, Any],
    keys: Keys,
    counts: jax.Array,
    canary: jax.Array,
    rows: jax.Array,
    initial: jax.Array | None,
) -> jax.Array:
    """Status. turn: the round and their number; keys ``(senders, n)`` and what belongs to them."""
    attributes = {"table": spec.name, "senders": np.int64(keys.shape[0]), "narrow": flag(keys.narrow)}
    operands = (version, *turn, keys.words, counts, words_in(canary), rows, initial_operand(spec, initial))
    return write("apply", "kvjax_receive", WORD, *operands, **attributes)


def plan_step(
    spec: TableSpec,
    version: jax.Array,
    step: jax.Array,
    delivered: jax.Array,
    slots: str,
    run: Run | None,
    facts: bool,
) -> jax.Array:
    """This shard's summary ``(f, 2)`` uint32. delivered: the status of what was received; run: of the update, if it is
    a program; facts: whether another one wants them."""
    result = array((spec.summary_words, 2), jnp.uint32)
    operands = (version, step, delivered, nothing(spec, (0, 2), np.uint32) if run is None else run.shared)
    attributes = {"slots": slots, "program": _words(run), "facts": flag(facts)}
    return write("apply", "kvjax_plan_step", result, *operands, table=spec.name, **attributes)


def commit_step(spec: TableSpec, version: jax.Array) -> ChunkedStep:
    results = (WORD, array((), jnp.int32), array((2,), jnp.uint32))
    # A step that a program has updated has no active rows left.
    version, active, step = write("apply", "kvjax_commit_step", results, version, table=spec.name)
    words, rows = nothing(spec, (0, 2), np.uint32), nothing(spec, (0, spec.dim), np.float32)
    shared, facts = nothing(spec, (0,), np.float32), nothing(spec, (0, NUM_FACTS), np.uint32)
    return ChunkedStep(version, active, step, words, words, rows, shared, facts)
