"""The two ways of an update: the table runs it as a row program, or XLA on rows that are gathered and scattered.

In chunks it is vmapped over the rows of a batch, so the result for a row does not depend on what else is in the batch:
on the CPU in chunks that stay in the cache between gather, update and scatter, on a GPU in one pass. XLA may fail in
between. So rows are read before anything is written, and the last call does the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._keys.sparse_rows import SparseRows
from kvjax._ops import order, training
from kvjax._ops.initial_rows import initial_rows
from kvjax._ops.training import StepBatch
from kvjax._programs.program import Run
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._training.merge import check_dtypes, merge
from kvjax._training.rounding import random_bits, stochastic
from kvjax._training.rowwise import Rowwise
from kvjax._training.slots import SlotLayout
from kvjax._training.transform_errors import of_shared_numbers
from kvjax._training.update import update_of
from kvjax._values.facts import facts_of
from kvjax.ffi import is_device

_GROUP = 64  # rows

_CHUNK_BYTES = 1 << 20
"""Of rows and slots of one chunk on the host together: little enough to stay in the caches between reading the rows,
computing and writing them back, and enough for threads to share. benchmarks/NOTES.md has the figures."""


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

    def batch(self, spec: TableSpec, grads: SparseRows, slots: str) -> StepBatch:
        """What the step brings to a table in one place, with its gradients ``(n,)`` and the layout of its slots."""
        initial = initial_rows(spec, self.version, grads.keys, grads.counts > 0)
        return StepBatch(self.version, grads, self.step, initial, slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewRows:
    """What the rows of a device's step become, before anything is written.

    Attributes:
      initial: what `StepBatch` brings of that name.
      values: ``(m, dim)`` as the table keeps them, m >= n.
      slots: ``(m, ...)`` each.
    """

    initial: jax.Array | None
    values: jax.Array
    slots: list[jax.Array]


class Way(Protocol):
    """How the rows of a step are updated."""

    @property
    def slots(self) -> str:
        """The layout that the step wants, as the C++ side reads it."""
        ...

    @property
    def facts(self) -> bool:
        """Whether it wants facts about rows from outside of the table."""
        ...

    @property
    def reports(self) -> bool:
        """Whether a step says as a status what it is refused for, and does not fail."""
        ...

    def on_host(self, spec: TableSpec, update: Update, holds: bool) -> tuple[jax.Array, Any, jax.Array]:
        """A step to its end, or until it is planned and holds. Returns the next version or the word by which its end
        knows it, the globals, and the status."""
        ...

    def on_shard(self, spec: TableSpec, word: jax.Array, n: int, update: Update) -> tuple[jax.Array, Any]:
        """A step that all shards have planned, up to its commit; n rows are to be expected. Returns the word and the
        globals."""
        ...

    def merged(self, grads: SparseRows) -> SparseRows | None:
        """What the two below want of gradients."""
        ...

    def made(self, spec: TableSpec, update: Update, merged: Any) -> tuple[NewRows | None, Any]:
        """What XLA makes of a device's rows while the table is as it was; and the next globals."""
        ...

    def written(
        self, spec: TableSpec, version: jax.Array, update: Update, merged: Any, made: Any, *, planned: bool
    ) -> jax.Array:
        """Does a step on a device, with that; of one that was planned nothing, if the version is not the live one.
        Returns the next version."""
        ...


@dataclasses.dataclass(frozen=True)
class ByProgram:
    """The way of an update that the table runs itself, which sums gradients, too. Its globals are known before."""

    slots: str
    reports: bool

    @property
    def facts(self) -> bool:
        return False  # it asks the table itself

    def on_host(self, spec: TableSpec, update: Update, holds: bool) -> tuple[jax.Array, Any, jax.Array]:
        word, status = self._apply(spec, update.version, update, holds=holds, reports=self.reports)
        return word, update.state, status

    def on_shard(self, spec: TableSpec, word: jax.Array, n: int, update: Update) -> tuple[jax.Array, Any]:
        return word, update.state

    def merged(self, grads: SparseRows) -> None:
        return None

    def made(self, spec: TableSpec, update: Update, merged: None) -> tuple[None, Any]:
        return None, update.state

    def written(
        self, spec: TableSpec, version: jax.Array, update: Update, merged: None, made: None, *, planned: bool
    ) -> jax.Array:
        return self._apply(spec, version, update, planned=planned)[0]

    def _apply(
        self,
        spec: TableSpec,
        version: jax.Array,
        update: Update,
        *,
        holds: bool = False,
        reports: bool = False,
        planned: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        program = update.run
        assert program is not None
        check_dtypes([update.grads])

        def run(grads: SparseRows) -> Any:
            batch = update.batch(spec, flat(grads), self.slots)._replace(version=version)
            return (), training.apply(spec, batch, program, holds=holds, reports=reports, planned=planned)

        return as_auto(run, (), update.grads)[1]


@dataclasses.dataclass(frozen=True)
class InChunks:
    """The way of any update: XLA runs it on rows that are gathered and scattered.

    Attributes:
      form: the canonical form of what is taken from the transform here, by which ways are compared; or the transform
        itself.
    """

    rowwise: Rowwise = dataclasses.field(compare=False)
    form: Hashable
    layout: SlotLayout
    facts: bool
    reports: bool

    @property
    def slots(self) -> str:
        return self.layout.text

    def on_host(self, spec: TableSpec, update: Update, holds: bool) -> tuple[jax.Array, Any, jax.Array]:
        merged = merge(update.grads)
        batch = update.batch(spec, merged, self.slots)
        begun, status = training.begin_apply(spec, batch, self.facts, reports=self.reports)

        def chunks() -> tuple[jax.Array, Any]:
            return self._chunks(spec, begun, merged.rows.shape[0], update, holds)

        if not self.reports:
            return *chunks(), status
        return *jax.lax.cond(status == 0, chunks, lambda: (begun.version, update.state)), status

    def on_shard(self, spec: TableSpec, word: jax.Array, n: int, update: Update) -> tuple[jax.Array, Any]:
        staged, state = self._chunks(spec, training.commit_step(spec, word), n, update, holds=True)
        return order.after(spec, word, [staged]), state

    def merged(self, grads: SparseRows) -> SparseRows:
        return merge(grads)

    def made(self, spec: TableSpec, update: Update, merged: SparseRows) -> tuple[NewRows, Any]:
        batch, n = update.batch(spec, merged, self.slots), merged.rows.shape[0]
        chunk = _GROUP * _groups(n)
        # Rows stand where their gradients do, unless one of them gets the sum of several.
        in_place = not spec.shares_row
        step, values, grads, fresh, words, facts, *slots = training.read_step(
            spec, batch, chunk, self.layout.types, gradients=not in_place, facts=self.facts
        )
        if in_place:
            # As they are in memory: what made them shall not be made again, rounded otherwise, as part of the update.
            grads = jnp.pad(jax.lax.optimization_barrier(merged.rows), ((0, chunk - n), (0, 0)))
        there = jnp.pad(merged.counts > 0, (0, chunk - n))
        values, grads, fresh, *slots = _padded(there, jnp.argmax(there), values, grads, fresh, *slots)
        rows, slots, state = self._updated(spec, update, grads, values, fresh, slots, facts)
        return NewRows(batch.initial, _stored(spec, rows, words, step), slots), state

    def written(
        self, spec: TableSpec, version: jax.Array, update: Update, merged: SparseRows, made: NewRows, *, planned: bool
    ) -> jax.Array:
        batch = StepBatch(version, merged, update.step, made.initial, self.slots)
        return training.write_step(spec, batch, made.values, made.slots, planned=planned)

    def _chunks(
        self, spec: TableSpec, begun: training.ChunkedStep, n: int, update: Update, holds: bool
    ) -> tuple[jax.Array, Any]:
        """The rows of a step, chunk by chunk; n of them are to be expected."""
        layout, groups = self.layout, _groups(n)
        if not is_device(spec.storage.backend):
            groups = min(groups, _CHUNK_BYTES // (4 * spec.dim + layout.row_bytes) // _GROUP)
        chunk = _GROUP * max(1, groups)

        def body(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            start, version, _ = carry
            values, grads, fresh, words, facts, *slots = training.gather(
                spec, version, begun, start, chunk, layout.text, layout.types, facts=self.facts
            )
            there = jnp.arange(chunk, dtype=jnp.int32) < begun.active - start
            values, grads, fresh, *slots = _padded(there, jnp.int32(0), values, grads, fresh, *slots)
            rows, slots, globals_ = self._updated(spec, update, grads, values, fresh, slots, facts)
            values = _stored(spec, rows, words, begun.step)
            version = training.scatter(spec, version, begun, start, values, layout.text, slots, holds)
            return start + jnp.int32(chunk), version, globals_

        # The first chunk runs even if no row is touched: the globals count the step all the same.
        first = (jnp.int32(0), begun.version, update.state)
        _, version, state = jax.lax.while_loop(lambda carry: carry[0] < jnp.maximum(begun.active, 1), body, first)
        return version, state

    def _updated(
        self, spec: TableSpec, update: Update, grads: Any, values: Any, fresh: Any, stored: Any, facts: Any
    ) -> Any:
        """Some rows: gradients and values ``(n, dim)`` to new values in float32, slots and globals."""
        layout, globals_, rows = self.layout, update.state, values.astype(jnp.float32)
        one = update_of(self.rowwise, spec.dim, update.extra, spec.constraint)
        slots = [
            jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), first, old)
            for first, old in zip(jax.vmap(one.initial)(rows), stored, strict=True)
        ]
        shared = [None] * layout.is_slot.count(False)
        run = jax.vmap(one.update, in_axes=(0, 0, 0, None, 0), out_axes=(0, 0, shared))
        with of_shared_numbers():
            rows, slots, new = run(grads, rows, slots, globals_, facts_of(facts) if self.facts else None)
        return rows, slots, tuple(x.astype(old.dtype) for x, old in zip(new, globals_, strict=True))


def flat(grads: SparseRows) -> SparseRows:
    """Gradients ``(n,)``, float32, with the leading axes in one."""
    rows = grads.rows.reshape(-1, grads.rows.shape[-1]).astype(jnp.float32)
    keys = Keys(grads.keys.words.reshape(-1, 2), grads.keys.narrow)
    return grads.replace(keys=keys, rows=rows, counts=grads.counts.reshape(-1))


def _padded(there: jax.Array, one: jax.Array, *columns: Any) -> list[Any]:
    """Columns of rows, of which those that are not there become `one` that is, or zeros if none is. A user's transform
    sees them, too: what was in memory might be not finite, or keep a loop going for ever."""
    padded: list[Any] = []
    for column in columns:
        row = jax.lax.dynamic_index_in_dim(column, one)
        row = jnp.where(there[one], row, jnp.zeros_like(row))
        padded.append(jnp.where(there.reshape(-1, *[1] * (column.ndim - 1)), column, row))
    return padded


def _groups(n: int) -> int:
    """For n rows. Whole groups of them: in what is left over behind the last full vector, XLA may round otherwise, and
    a row would depend on its place in the batch."""
    return max(1, -(-n // _GROUP))


def _stored(spec: TableSpec, rows: jax.Array, words: jax.Array, step: jax.Array) -> jax.Array:
    """Updated rows ``(chunk, dim)`` float32 of keys ``(chunk, 2)`` as the table keeps them."""
    if spec.rounding == "nearest":
        return rows.astype(spec.row_dtype)
    return stochastic(rows, spec.row_dtype, random_bits(rows, words, step, spec.seed))
