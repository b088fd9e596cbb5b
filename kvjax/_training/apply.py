"""The training write: gradients are merged, rows made, updated and written back, in one place or on every shard.

A step may be planned by one call and done by another, so that several tables do theirs together: `plan` makes and
checks all that can be refused and changes nothing, and `end` does what has been planned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax._keys.keys import Keys
from kvjax._keys.sparse_rows import SparseRows, check_fit
from kvjax._ops import order, routing, training
from kvjax._ops.programs import program_outside
from kvjax._process import PROCESS
from kvjax._sharded import copies, mesh
from kvjax._sharded.delivery import deliver
from kvjax._sharded.space import prepare
from kvjax._sharded.writes import settle
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._spmd.varying import varying, varying_like, varying_over
from kvjax._training.merge import check_dtypes, merge, merge_on_shard
from kvjax._training.refusals import of_table
from kvjax._training.rowwise import Rowwise
from kvjax._training.update import canonical_of, lowered, takes_facts
from kvjax._training.ways import ByProgram, InChunks, Phase, StepResult, Update, Way, flat
from kvjax._values.errors import fail
from kvjax._values.facts import ROW_FACTS
from kvjax._values.tracing import in_a_trace
from kvjax.ffi import is_device


def check(spec: TableSpec, rowwise: Rowwise, grads: Any, state: Any) -> None:
    """Raises what `apply` would for these gradients and globals, before anything is written."""
    with of_table(spec.name, "apply"):
        rowwise.warn(spec.dim)
    layout = rowwise.layout(spec.dim)
    want, got = jax.tree.structure(layout.state_of(itertools.repeat(0))), jax.tree.structure(state)
    if not isinstance(grads, SparseRows):
        raise fail(
            TypeError, spec.name, "apply", "SparseRows", type(grads).__name__,
            "differentiate with kvjax.value_and_grad instead of jax.value_and_grad",
        )  # fmt: skip
    check_fit(grads, spec.name, "apply")
    if grads.rows.shape[-1] != spec.dim:
        raise fail(
            ValueError, spec.name, "apply", f"gradient rows (..., {spec.dim})", f"{grads.rows.shape}",
            "these gradients belong to another table",
        )  # fmt: skip
    if want != got and (want.num_leaves or got != jax.tree.structure(())):
        raise fail(
            ValueError, spec.name, "apply", f"the state of this transform, {want}", f"{got}",
            "keep what the last update returned; a new one is tx.init(params) of partition, or, for table.apply, "
            "kvjax.optax.rowwise(tx).init(dim)",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step that is planned.

    Attributes:
      word: ``()`` uint32, by which its end knows it.
      state: the next globals, or of an update in chunks what its end wants: those, and of a step that was tried what
        was merged and made.
      status: ``()`` uint32, 0 or the number of what it was refused for, if it keeps that to itself; of a device in one
        place, which says it later, 1.
    """

    spec: TableSpec
    way: Way
    update: Update
    word: jax.Array
    state: Any
    status: jax.Array


_TRANSFERS = jax.transfer_guard("allow")
"""Around steps: what transforms make of numbers while a program is traced are its constants, which nobody has
transferred. A call outside of a program hands over small arrays of the host in any case."""


def _tries(spec: TableSpec) -> bool:
    """Whether a step of a table whose rows are all here is planned by trying it, so that its end does all of it, with
    what its rows become if XLA makes that: a device's. It holds nothing from call to call, and nobody waits for it."""
    return is_device(spec.storage.backend)


@PROCESS.blaming()
@_TRANSFERS
def apply(spec: TableSpec, rowwise: Rowwise, update: Update) -> tuple[jax.Array, Any]:
    """The training write of what `check` has let through. Returns the next version and the next globals."""
    way, update, globals_ = _way(spec, rowwise, update, "whole")
    version, state, _ = _run(_apply, spec, way, update)
    return version, state if globals_ is None else globals_


@PROCESS.blaming()
@_TRANSFERS
def plan(spec: TableSpec, rowwise: Rowwise, update: Update, unasked: jax.Array | None) -> PlannedStep:
    """The same as far as `end`.

    Args:
      spec: of the table.
      rowwise: the transform.
      update: what `check` has let through.
      unasked: if the step keeps to itself what it is refused for, ``()`` uint32: 0, or the number of what a step before
        it was refused for, and then nothing is planned.
    """
    way, update, globals_ = _way(spec, rowwise, update, "plan" if unasked is None else "keep")
    word, state, status = _run(_plan, spec, way, update, unasked)
    return PlannedStep(spec, way, update, word, state if globals_ is None else globals_, status)


@PROCESS.blaming()
@_TRANSFERS
def end(held: PlannedStep, joint: jax.Array) -> tuple[jax.Array, Any]:
    """Does a planned step, once `joint` exists. Returns the next version and the next globals.

    joint: ``()`` uint32, the greatest status of all steps: where it is not 0, the version stays.
    """
    update = held.update if held.update.run is not None else dataclasses.replace(held.update, state=held.state)
    version, state = _run(_end, held.spec, held.way, update, held.word, joint)
    return version, held.state if held.update.run is not None else state


def _way(spec: TableSpec, rowwise: Rowwise, update: Update, phase: Phase) -> tuple[Way, Update, Any]:
    """The way of an update, what it is made of then, and the next globals of one that is a program."""
    extra = {name: x for name, x in update.extra.items() if name != ROW_FACTS}  # the table has its own
    update = dataclasses.replace(update, extra=extra)
    layout, facts = rowwise.layout(spec.dim), takes_facts(rowwise, spec.dim, extra)
    program = lowered(spec, rowwise, update.state, extra, facts)
    if program is None:
        kept = not extra and not in_a_trace()  # compiled for this call alone, and for others that do the same
        form = canonical_of(spec, rowwise, update.state, facts) if kept else rowwise
        return InChunks(rowwise, form, layout, facts, phase), update, None
    whole = dataclasses.replace(update, state=(), extra={}, run=program.run)
    return ByProgram(layout.text, phase), whole, program.globals_


def _run(part: Callable[..., Any], spec: TableSpec, way: Way, update: Update, *numbers: Any) -> Any:
    # Compiled as a whole, so that a call outside jit compiles once; extra arguments may be what jit cannot take.
    return (part if update.extra or _inside(spec) else _compiled(part))(spec, way, update, *numbers)


@functools.cache
def _compiled(part: Callable[..., Any]) -> Any:
    return program_outside(0, 1)(part)


def _inside(spec: TableSpec) -> bool:
    return spec.placement is not None and mesh.inside(spec, "apply")


def _apply(spec: TableSpec, way: Way, update: Update) -> StepResult:
    if spec.placement is None:
        return way.in_one_place(spec, update)

    def part(update: Update, status: jax.Array) -> StepResult:
        if spec.mesh_placement.alone:
            version, state, status = way.in_one_place(spec, _unless_failed(spec, update, status))
            return settle(version), state, status
        word, state, status = _plan_on_shard(spec, way, update, status)
        return *_end_on_shard(spec, way, dataclasses.replace(update, state=state), word), status

    return _on_shards(spec, update, part)


def _plan(spec: TableSpec, way: Way, update: Update, unasked: jax.Array | None) -> StepResult:
    if spec.placement is None:
        return _plan_here(spec, way, update, unasked)
    part = _plan_alone if spec.placement.alone else _plan_on_shard
    return _on_shards(spec, update, functools.partial(part, spec, way), unasked)


def _plan_here(spec: TableSpec, way: Way, update: Update, unasked: jax.Array | None) -> StepResult:
    """Of a table whose rows are all in one place."""

    def unless(failed: jax.Array | None, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        if failed is None:
            return do()
        like = functools.partial(varying_over, axes=varying((update.version, update.grads, unasked)))
        return jax.lax.cond(failed == 0, lambda: like(do()), lambda: like(otherwise()))

    planned = functools.partial(_tried if _tries(spec) else type(way).in_one_place, way, spec, update)
    word, state, status = unless(unasked, planned, lambda: (jnp.asarray(update.version), update.state, unasked))
    if not _tries(spec) or not isinstance(way, InChunks):
        return word, state, status
    merged = merge(update.grads)
    make = functools.partial(way.made, spec, update, merged)

    def none() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make)[0]), update.state

    made, state = unless(None if unasked is None else status, make, none)
    return word, (merged, made, state), order.after(spec, status, jax.tree.leaves(made))


def _tried(way: Way, spec: TableSpec, update: Update) -> StepResult:
    check_dtypes([update.grads])

    def run(grads: SparseRows) -> Any:
        batch = update.batch(spec, flat(grads), way.slots)
        return (), (training.plan_apply(spec, batch, reports=way.phase == "keep"),)

    return jnp.asarray(update.version), update.state, as_auto(run, (), update.grads)[1][0]


def _end(spec: TableSpec, way: Way, update: Update, word: jax.Array, joint: jax.Array) -> tuple[jax.Array, Any]:
    if spec.placement is None:
        return _end_here(spec, way, update, word, joint)

    def part(update: Update, _: jax.Array, word: jax.Array, joint: jax.Array) -> tuple[jax.Array, Any]:
        if spec.mesh_placement.alone:
            return _end_here(spec, way, update, word, joint)
        done = functools.partial(_end_on_shard, spec, way, update, order.after(spec, word, [joint]))
        return _unless_refused(spec, way, update.version, joint, done, update.state)

    return _on_shards(spec, update, part, None, word, joint)


def _end_here(spec: TableSpec, way: Way, update: Update, word: jax.Array, joint: jax.Array) -> tuple[jax.Array, Any]:
    if _tries(spec):
        return _end_tried(spec, way, update, joint)

    def run(word: jax.Array, joint: jax.Array, grads: SparseRows) -> Any:
        def done() -> jax.Array:
            return settle(training.end_apply(spec, word, flat(grads).rows, joint))

        return (), (_unless_refused(spec, way, update.version, joint, done),)

    return as_auto(run, (), word, joint, update.grads)[1][0], update.state


def _end_tried(spec: TableSpec, way: Way, update: Update, joint: jax.Array) -> tuple[jax.Array, Any]:
    planned = joint == 0
    held: Any = update.state

    def done(version: jax.Array) -> jax.Array:
        if isinstance(way, ByProgram):
            return settle(dataclasses.replace(way, phase="planned").in_one_place(spec, update, version)[0])
        merged, made, _ = held
        return settle(way.write(spec, version, merged, update.step, made, planned=True))

    state = held[-1] if isinstance(way, InChunks) else held
    if way.phase == "keep":
        return _unless_refused(spec, way, update.version, joint, lambda: done(update.version)), state
    version = done(jnp.where(planned, update.version, ~update.version))
    return jnp.where(planned, version, update.version), state


def _unless_refused(
    spec: TableSpec, way: Way, version: jax.Array, joint: jax.Array, done: Callable[[], Any], *state: Any
) -> Any:
    """What done() gives; or, if the step has a status that is not 0, the version, and the state if there is one."""
    if way.phase != "keep":
        return done()

    def refused() -> Any:
        same = training.end_refused(spec, version, joint)
        return (same, *state) if state else same

    return jax.lax.cond(joint == 0, done, refused)


def _on_shards(
    spec: TableSpec, update: Update, part: Callable[..., Any], status: jax.Array | None = None, *words: jax.Array
) -> Any:
    """part(its own piece of the update, a status, *words) on every device, also inside a ``shard_map``.

    status, words: ``()`` uint32, the same on all.
    """
    before = jnp.uint32(0) if status is None else status
    placement = spec.mesh_placement
    if not _inside(spec):
        return _everywhere(spec, update, part, before, words)
    grads = flat(update.grads)
    same = copies.check_copies(spec, "apply", (grads.keys, grads.rows, grads.counts))
    piece = dataclasses.replace(update, grads=copies.piece(placement, grads))
    return part(piece, jnp.maximum(same, before), *words)


def _everywhere(
    spec: TableSpec, update: Update, part: Callable[..., Any], status: jax.Array, words: tuple[jax.Array, ...]
) -> Any:
    placement, narrow = spec.mesh_placement, update.grads.keys.narrow
    whole, split = PartitionSpec(), PartitionSpec(placement.axes)
    tree: Any = None

    def run(keys: Any, rows: Any, counts: Any, canary: Any, *common: Any) -> Any:
        def local(keys: Any, rows: Any, counts: Any, canary: Any, *common: Any) -> Any:
            version, state, step, program, status, words = common
            grads = SparseRows(Keys(keys, narrow), rows, counts).replace(canary=canary)
            results = part(Update(version, grads, state, step, update.extra, program), status, *words)
            nonlocal tree
            leaves, tree = jax.tree.flatten(results)
            return tuple(leaves)

        gradient = flat(SparseRows(Keys(keys), rows, counts))
        columns = gradient.keys.words, gradient.rows, gradient.counts
        keys, rows, counts = (mesh.pieces(placement.num_devices, x, None)[0] for x in columns)  # padding counts 0
        in_specs = (split, split, split, *[whole] * (1 + len(common)))
        return (), mesh.on_mesh(placement, local, in_specs, whole, (keys, rows, counts, canary, *common))

    grads = update.grads
    gradient = (grads.keys.words, grads.rows, grads.counts, grads.canary)
    common = (update.version, update.state, update.step, update.run, status, words)
    leaves = mesh.auto(spec, "apply", run, (), *gradient, *common)[1]
    return jax.tree.unflatten(tree, leaves)


def _plan_on_shard(spec: TableSpec, way: Way, update: Update, status: jax.Array) -> StepResult:
    """One device's part: its gradients ``(n,)`` go to their owners, which plan what changes in the rows that they have.

    status: ``()`` uint32, of what came before.
    """
    version = update.version
    merged, failed = merge_on_shard(spec, update.grads)
    status = jnp.maximum(status, failed)
    summaries, delivered, traffic = deliver(
        spec, version, merged, update.step, way.slots, update.run, way.facts, status
    )
    number = prepare(spec, "apply", version, summaries, delivered)

    def agree() -> tuple[jax.Array, Any]:
        (word,) = routing.agree(spec, "apply", number, [varying_like(version, delivered)], traffic)
        if isinstance(way, ByProgram):
            return word, update.state
        staged, state = way.on_shard(spec, training.commit_step(spec, word), _rows_of(update), update)
        return order.after(spec, word, [staged]), state

    if way.phase != "keep":
        return *agree(), number
    return *jax.lax.cond(number == 0, agree, lambda: (varying_like(version, delivered), update.state)), number


def _plan_alone(spec: TableSpec, way: Way, update: Update, status: jax.Array) -> StepResult:
    """The same on a mesh of one device, which has all rows: what several calls find by a version, another thread could
    have changed between them."""
    if way.phase == "keep":
        word, state, number = _plan_here(spec, way, update, status)
    else:
        word, state, number = _plan_here(spec, way, _unless_failed(spec, update, status), None)
    return word, state, mesh.agreed(number)


def _unless_failed(spec: TableSpec, update: Update, status: jax.Array) -> Update:
    """The update, unless the status is that of a failure, which is raised."""
    (version,) = routing.agree(spec, "apply", status, [varying_like(update.version, status)])
    return dataclasses.replace(update, version=version)


def _end_on_shard(spec: TableSpec, way: Way, update: Update, word: jax.Array) -> tuple[jax.Array, Any]:
    begun = training.commit_step(spec, word)
    return settle(begun.version), update.state


def _rows_of(update: Update) -> int:
    """How many rows a device may expect to be its part."""
    return max(1, update.grads.counts.shape[0])
