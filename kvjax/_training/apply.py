"""The training write of a table: which way its update goes, and what each device does of it.

A step may be planned by one call and done by another, so that several tables do theirs together.
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
from kvjax._ops.programs import program_outside
from kvjax._process import PROCESS
from kvjax._sharded import copies, mesh
from kvjax._spec.spec import TableSpec
from kvjax._training.places import Planned, place_of
from kvjax._training.rowwise import Rowwise
from kvjax._training.transform_errors import of_table
from kvjax._training.update import canonical_of, lowered, takes_facts
from kvjax._training.ways import ByProgram, InChunks, Update, Way, flat
from kvjax._values.errors import fail
from kvjax._values.facts import ROW_FACTS
from kvjax._values.tracing import in_a_trace


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
      globals_: the next globals of an update that is a program; else they are part of what is planned.
    """

    spec: TableSpec
    way: Way
    update: Update
    planned: Planned
    globals_: Any


_TRANSFERS = jax.transfer_guard("allow")
"""Around steps: what transforms make of numbers while a program is traced are its constants, which nobody has
transferred. A call outside of a program hands over small arrays of the host in any case."""


@PROCESS.blaming()
@_TRANSFERS
def apply(spec: TableSpec, rowwise: Rowwise, update: Update) -> tuple[jax.Array, Any]:
    """The training write of what `check` has let through. Returns the next version and the next globals."""
    way, update, globals_ = _way(spec, rowwise, update, reports=False)
    version, state = _run(_apply, spec, way, update)
    return version, state if globals_ is None else globals_


@PROCESS.blaming()
@_TRANSFERS
def plan(spec: TableSpec, rowwise: Rowwise, update: Update, unasked: jax.Array | None) -> PlannedStep:
    """The same as far as `end`.

    Args:
      spec: of the table.
      rowwise: the transform.
      update: what `check` has let through.
      unasked: if the step reports what it is refused for, and does not fail, ``()`` uint32: 0, or the number of what a
        step before it was refused for, and then nothing is planned.
    """
    way, update, globals_ = _way(spec, rowwise, update, reports=unasked is not None)
    return PlannedStep(spec, way, update, _run(_plan, spec, way, update, unasked), globals_)


@PROCESS.blaming()
@_TRANSFERS
def end(held: PlannedStep, joint: jax.Array) -> tuple[jax.Array, Any]:
    """Does a planned step, once `joint` exists. Returns the next version and the next globals.

    joint: ``()`` uint32, the greatest status of all steps: where it is not 0, the version stays.
    """
    version = _run(_end, held.spec, held.way, held.update, held.planned.word, held.planned.held, joint)
    return version, held.planned.state if held.globals_ is None else held.globals_


def _way(spec: TableSpec, rowwise: Rowwise, update: Update, reports: bool) -> tuple[Way, Update, Any]:
    """The way of an update, what it is made of then, and the next globals of one that is a program."""
    extra = {name: x for name, x in update.extra.items() if name != ROW_FACTS}  # the table has its own
    update = dataclasses.replace(update, extra=extra)
    layout, facts = rowwise.layout(spec.dim), takes_facts(rowwise, spec.dim, extra)
    program = lowered(spec, rowwise, update.state, extra, facts)
    if program is None:
        kept = not extra and not in_a_trace()  # compiled for this call alone, and for others that do the same
        form = canonical_of(spec, rowwise, update.state, facts) if kept else rowwise
        return InChunks(rowwise, form, layout, facts, reports), update, None
    whole = dataclasses.replace(update, state=(), extra={}, run=program.run)
    return ByProgram(layout.text, reports), whole, program.globals_


def _run(part: Callable[..., Any], spec: TableSpec, way: Way, update: Update, *values: Any) -> Any:
    # Compiled as a whole, so that a call outside jit compiles once; extra arguments may be what jit cannot take.
    return (part if update.extra or _inside(spec) else _compiled(part))(spec, way, update, *values)


@functools.cache
def _compiled(part: Callable[..., Any]) -> Any:
    return program_outside(0, 1)(part)


def _inside(spec: TableSpec) -> bool:
    return spec.placement is not None and mesh.inside(spec, "apply")


def _apply(spec: TableSpec, way: Way, update: Update) -> tuple[jax.Array, Any]:
    return _on_devices(spec, update, None, place_of(spec, way).whole)


def _plan(spec: TableSpec, way: Way, update: Update, unasked: jax.Array | None) -> Planned:
    return _on_devices(spec, update, unasked, place_of(spec, way).plan)


def _end(spec: TableSpec, way: Way, update: Update, word: jax.Array, held: Any, joint: jax.Array) -> jax.Array:
    def part(update: Update, _: Any, *planned: Any) -> jax.Array:
        return place_of(spec, way).end(update, *planned)

    return _on_devices(spec, update, None, part, word, held, joint)


def _on_devices(
    spec: TableSpec, update: Update, status: jax.Array | None, part: Callable[..., Any], *planned: Any
) -> Any:
    """part(the update, a status or None, *planned) in one place; or on every device of a mesh, also inside a
    ``shard_map``, with its own piece of the gradients.

    status: ``()`` uint32, the same on all. planned: trees, the same on all.
    """
    if spec.placement is None:
        return part(update, status, *planned)
    before = jnp.uint32(0) if status is None else status
    if not _inside(spec):
        return _everywhere(spec, update, before, part, planned)
    grads = flat(update.grads)
    same = copies.check_copies(spec, "apply", (grads.keys, grads.rows, grads.counts))
    piece = dataclasses.replace(update, grads=copies.piece(spec.mesh_placement, grads))
    return part(piece, jnp.maximum(same, before), *planned)


def _everywhere(
    spec: TableSpec, update: Update, status: jax.Array, part: Callable[..., Any], planned: tuple[Any, ...]
) -> Any:
    placement, narrow = spec.mesh_placement, update.grads.keys.narrow
    whole, split = PartitionSpec(), PartitionSpec(placement.axes)
    tree: Any = None

    def run(keys: Any, rows: Any, counts: Any, canary: Any, *common: Any) -> Any:
        def local(keys: Any, rows: Any, counts: Any, canary: Any, *common: Any) -> Any:
            version, state, step, program, status, planned = common
            grads = SparseRows(Keys(keys, narrow), rows, counts).replace(canary=canary)
            results = part(Update(version, grads, state, step, update.extra, program), status, *planned)
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
    common = (update.version, update.state, update.step, update.run, status, planned)
    leaves = mesh.auto(spec, "apply", run, (), *gradient, *common)[1]
    return jax.tree.unflatten(tree, leaves)
