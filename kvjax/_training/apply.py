"""The training write: gradients are merged, rows made, updated and written back, in one place or on every shard.

An update that is a row program is run by the table, in the call that makes the rows. Any other is vmapped over the rows
of a batch, so the result for a row does not depend on what else is in the batch: on the CPU in chunks that stay in the
cache between gather, update and scatter, on a GPU in one pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax._keys.keys import Keys
from kvjax._keys.sparse_rows import SparseRows
from kvjax._ops import routing, training
from kvjax._ops.initial_rows import initial_rows
from kvjax._process import PROCESS
from kvjax._programs.program import Run
from kvjax._sharded import copies, mesh
from kvjax._sharded.delivery import deliver
from kvjax._sharded.space import prepare
from kvjax._sharded.writes import settle
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._spmd.varying import varying_like
from kvjax._training.merge import check_dtypes, merge
from kvjax._training.rounding import random_bits, stochastic
from kvjax._training.rowwise import Rowwise
from kvjax._training.slots import SlotLayout
from kvjax._training.update import RowUpdate, lowered, takes_facts, update_of
from kvjax._values.errors import fail
from kvjax._values.facts import ROW_FACTS, RowFacts, facts_of
from kvjax.ffi import is_device

_GROUP = 64  # rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """What a training write is made of.

    Attributes:
      version: ``()`` uint32.
      grads: of the table.
      state: the globals of the transform.
      step: ``(2,)`` uint32, the words of int64.
      extra: extra arguments of the transform.
      run: its program, if it is one; the globals and extra arguments are then part of that.
    """

    version: jax.Array
    grads: SparseRows
    state: tuple[jax.Array, ...]
    step: jax.Array
    extra: dict[str, Any]
    run: Run | None = None


def check(spec: TableSpec, rowwise: Rowwise, grads: Any, state: Any) -> None:
    """Raises what `apply` would for these gradients and globals, before anything is written."""
    rowwise.warn(spec.dim)
    layout = rowwise.layout(spec.dim)
    want, got = jax.tree.structure(layout.state_of(itertools.repeat(0))), jax.tree.structure(state)
    if not isinstance(grads, SparseRows):
        raise fail(
            TypeError, spec.name, "apply", "SparseRows", type(grads).__name__,
            "differentiate with kvjax.value_and_grad instead of jax.value_and_grad",
        )  # fmt: skip
    if grads.rows.shape[-1] != spec.dim:
        raise fail(
            ValueError, spec.name, "apply", f"gradient rows (..., {spec.dim})", f"{grads.rows.shape}",
            "these gradients belong to another table",
        )  # fmt: skip
    if want != got and (want.num_leaves or got != jax.tree.structure(())):
        raise fail(
            ValueError, spec.name, "apply", f"the state of this transform, {want}", f"{got}",
            "start from kvjax.optax.rowwise(tx).init(dim) and keep what apply returns",
        )  # fmt: skip


@PROCESS.blaming()
def apply(spec: TableSpec, rowwise: Rowwise, update: Update, holds: bool = False) -> tuple[jax.Array, Any]:
    """The training write of what `check` has let through. Returns the next version and the next globals.

    holds: whether the step is only planned, and what is returned is no version but the word for its `end`.
    """
    extra = {name: x for name, x in update.extra.items() if name != ROW_FACTS}  # the table has its own
    update = dataclasses.replace(update, extra=extra)
    layout, facts = rowwise.layout(spec.dim), takes_facts(rowwise, spec.dim, extra)
    program = lowered(spec, rowwise, update.state, extra, facts)
    if program is None:
        return _apply(spec, InChunks(rowwise, layout, facts, holds), update)
    whole = dataclasses.replace(update, state=(), extra={}, run=program.run)
    return _apply(spec, ByProgram(layout.text, holds), whole)[0], program.globals_


def can_hold(spec: TableSpec) -> bool:
    """Whether steps of the table can be planned by one call and done by another: in one place, on the CPU."""
    return spec.placement is None and not is_device(spec.storage.backend)


@PROCESS.blaming()
def end(spec: TableSpec, token: jax.Array, grads: SparseRows, others: jax.Array) -> jax.Array:
    """Does a step that holds, once `others` exist. Returns the next version."""
    return _end_compiled(spec, token, grads, others)


@functools.partial(jax.jit, static_argnums=0)
def _end_compiled(spec: TableSpec, token: jax.Array, grads: SparseRows, others: jax.Array) -> jax.Array:
    def run(token: jax.Array, grads: SparseRows, others: jax.Array) -> Any:
        return (), (training.end_apply(spec, token, _flat(grads).rows, others),)

    return as_auto(run, (), token, grads, others)[1][0]


@dataclasses.dataclass(frozen=True)
class ByProgram:
    """The way of an update that the table runs itself.

    Attributes:
      slots: the layout, as the C++ side reads it.
      holds: whether the step is only planned.
      facts: whether it wants facts about rows from outside of the table.
    """

    slots: str
    holds: bool
    facts: bool = False

    def in_one_place(self, spec: TableSpec, update: Update) -> tuple[jax.Array, Any]:
        program = update.run
        assert program is not None
        check_dtypes([update.grads])

        def run(grads: SparseRows) -> Any:
            flat = _flat(grads)
            initial = initial_rows(spec, update.version, flat.keys, flat.counts > 0)
            slots, holds = self.slots, self.holds
            return (), (training.apply(spec, update.version, flat, update.step, initial, slots, program, holds),)

        return as_auto(run, (), update.grads)[1][0], ()

    def on_shard(self, spec: TableSpec, begun: training.Begun, n: int, update: Update) -> tuple[jax.Array, Any]:
        return begun.version, ()  # the commit has done it


@dataclasses.dataclass(frozen=True)
class InChunks:
    """The way of any update: XLA runs it on rows that are gathered and scattered.

    Attributes:
      facts: whether it wants facts about rows.
      holds: whether the step is only planned.
    """

    rowwise: Rowwise
    layout: SlotLayout
    facts: bool
    holds: bool

    @property
    def slots(self) -> str:
        return self.layout.text

    def in_one_place(self, spec: TableSpec, update: Update) -> tuple[jax.Array, Any]:
        merged = merge(update.grads)
        initial = initial_rows(spec, update.version, merged.keys, merged.counts > 0)
        begun = training.begin_apply(spec, update.version, merged, update.step, initial, self.slots, self.facts)
        return self.on_shard(spec, begun, merged.rows.shape[0], update)

    def on_shard(self, spec: TableSpec, begun: training.Begun, n: int, update: Update) -> tuple[jax.Array, Any]:
        one = update_of(self.rowwise, spec.dim, update.extra, spec.constraint)
        return _update_rows(spec, self, one, begun, n, update.state)


Way = ByProgram | InChunks


def _apply(spec: TableSpec, way: Way, update: Update) -> tuple[jax.Array, Any]:
    if spec.placement is not None and mesh.inside(spec, "apply"):
        grads = _flat(update.grads)
        status = copies.check_copies(spec, "apply", (grads.keys, grads.rows, grads.counts))
        piece = dataclasses.replace(update, grads=copies.piece(spec.placement, grads))
        return _apply_on_shard(spec, way, piece, status)
    # Compiled as a whole, so that a call outside jit compiles once; extra arguments may be what jit cannot take.
    return (_apply_whole if update.extra else _apply_compiled)(spec, way, update)


def _apply_whole(spec: TableSpec, way: Way, update: Update) -> tuple[jax.Array, Any]:
    if spec.placement is None:
        return way.in_one_place(spec, update)
    return _apply_on_all_shards(spec, way, update)


_apply_compiled = jax.jit(_apply_whole, static_argnums=(0, 1))


def _apply_on_all_shards(spec: TableSpec, way: Way, update: Update) -> tuple[jax.Array, Any]:
    placement, narrow = spec.mesh_placement, update.grads.keys.narrow

    def run(version: Any, words: Any, rows: Any, counts: Any, seal: Any, state: Any, step: Any, program: Any) -> Any:
        def local(
            version: Any, words: Any, rows: Any, counts: Any, seal: Any, state: Any, step: Any, program: Any
        ) -> Any:
            grads = SparseRows(Keys(words, narrow), rows, counts).replace(seal=seal)
            piece = Update(version, grads, state, step, update.extra, program)
            return _apply_on_shard(spec, way, piece, jnp.uint32(0))

        flat = _flat(SparseRows(Keys(words), rows, counts))
        words, rows, counts = (  # a count of 0 for padding
            mesh.pieces(placement.num_devices, x, None)[0] for x in (flat.keys.words, flat.rows, flat.counts)
        )
        split, whole = PartitionSpec(placement.axes), PartitionSpec()
        in_specs = (whole, split, split, split, whole, whole, whole, whole)
        operands = (version, words, rows, counts, seal, state, step, program)
        version, state = mesh.on_mesh(placement, local, in_specs, whole, operands)
        return (), (version, *state)

    grads = update.grads
    gradients = (grads.keys.words, grads.rows, grads.counts, grads.seal)
    operands = (update.version, *gradients, update.state, update.step, update.run)
    version, *state = mesh.auto(spec, "apply", run, (), *operands)[1]
    return version, tuple(state)


def _apply_on_shard(spec: TableSpec, way: Way, update: Update, status: jax.Array) -> tuple[jax.Array, Any]:
    """One device's part: its gradients ``(n,)`` go to their owners, and the rows that it owns change.

    status: ``()`` uint32, of what came before.
    """
    version = update.version
    summaries, delivered, traffic = deliver(
        spec, version, merge(update.grads), update.step, way.slots, update.run, way.facts
    )
    number = prepare(spec, "apply", version, summaries, jnp.maximum(status, delivered))
    (version,) = routing.agree(spec, "apply", number, [varying_like(version, delivered)], traffic)
    begun = training.commit_step(spec, version)
    n = max(1, update.grads.counts.shape[0])
    version, state = way.on_shard(spec, begun, n, update)
    return settle(version), state


def _flat(grads: SparseRows) -> SparseRows:
    """Gradients ``(n,)``, float32, with the leading axes in one."""
    rows = grads.rows.reshape(-1, grads.rows.shape[-1]).astype(jnp.float32)
    keys = Keys(grads.keys.words.reshape(-1, 2), grads.keys.narrow)
    return grads.replace(keys=keys, rows=rows, counts=grads.counts.reshape(-1))


def _update_rows(
    spec: TableSpec, way: InChunks, update: RowUpdate, begun: training.Begun, n: int, state: Any
) -> tuple[jax.Array, Any]:
    """The rows of a step, chunk by chunk; n of them are to be expected."""
    layout = way.layout
    # Whole groups of rows: in what is left over behind the last full vector, XLA may round otherwise, and a row would
    # depend on its place in the batch.
    limit, groups = spec.storage.chunk_bytes, -(-n // _GROUP)
    if limit is not None:
        groups = min(groups, limit // (4 * spec.dim + layout.row_bytes) // _GROUP)
    chunk = _GROUP * max(1, groups)
    at_once = limit is None and spec.placement is None  # a shard may have got more rows than its device had
    # The rows of a step at once stand where their gradients do, unless one of them gets the sum of several.
    in_place = at_once and not spec.shares_row

    def body(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        start, version, _ = carry
        values, grads, fresh, words, facts, *slots = training.gather(
            spec, version, begun, start, chunk, layout.text, layout.types, gradients=not in_place, facts=way.facts
        )
        if in_place:
            # As they are in memory: what made them shall not be made again, rounded otherwise, as part of the update.
            grads = jnp.pad(jax.lax.optimization_barrier(begun.rows), ((0, chunk - n), (0, 0)))
        about = facts_of(facts) if way.facts else None
        rows, slots, globals_ = _updated(update, layout, grads, values, fresh, slots, state, about)
        values = _stored(spec, rows, words, begun.step)
        version = training.scatter(spec, version, begun, start, values, layout.text, slots, way.holds)
        globals_ = tuple(new.astype(old.dtype) for new, old in zip(globals_, state, strict=True))
        return start + jnp.int32(chunk), version, globals_

    first = (jnp.int32(0), begun.version, state)
    if at_once:
        _, version, state = body(first)
        return version, state
    # The first chunk runs even if no row is touched: the globals count the step all the same.
    _, version, state = jax.lax.while_loop(lambda carry: carry[0] < jnp.maximum(begun.active, 1), body, first)
    return version, state


def _updated(
    update: RowUpdate,
    layout: SlotLayout,
    grads: jax.Array,
    values: jax.Array,
    fresh: jax.Array,
    stored: Sequence[jax.Array],
    globals_: Any,
    facts: RowFacts | None,
) -> Any:
    """One chunk: gradients and values ``(chunk, dim)`` to new values in float32, slots and globals."""
    rows = values.astype(jnp.float32)
    slots = [
        jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), first, old)
        for first, old in zip(jax.vmap(update.initial)(rows), stored, strict=True)
    ]
    shared = [None] * layout.is_slot.count(False)
    run = jax.vmap(update.update, in_axes=(0, 0, 0, None, 0), out_axes=(0, 0, shared))
    return run(grads, rows, slots, globals_, facts)


def _stored(spec: TableSpec, rows: jax.Array, words: jax.Array, step: jax.Array) -> jax.Array:
    """Updated rows ``(chunk, dim)`` float32 of keys ``(chunk, 2)`` as the table keeps them."""
    if spec.rounding == "nearest":
        return rows.astype(spec.row_dtype)
    return stochastic(rows, spec.row_dtype, random_bits(rows, words, step, spec.seed))
