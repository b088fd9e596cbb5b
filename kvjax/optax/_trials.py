"""Trials: what a transform makes of a few rows, as a dense array and as the rows of a table, and how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.catch_up import caught_up_row
from kvjax._training.rowwise import CatchUp, Rowwise
from kvjax._training.slots import SlotLayout, join_leaves
from kvjax._training.transform_errors import of_shared_numbers
from kvjax._training.update import RowUpdate, takes_facts, update_of
from kvjax._values.facts import ROW_FACTS, RowFacts, Words

_ROWS, _STEPS = 6, 8


class Difference(NamedTuple):
    """Attributes:
    rows: greatest difference of a row, as a part of the greatest displacement.
    leaves: of each leaf of the state, as a part of its greatest magnitude.
    rounding: what float32 rounds rows apart by, in the same unit as `rows`.
    """

    rows: float
    leaves: list[float]
    rounding: float


class Trial(NamedTuple):
    """Attributes:
    every: the difference when every row is touched in every step.
    some: when about half of them are.
    reached: least and most of the way that a gradient which comes alone moves its row.
    """

    every: Difference
    some: Difference
    reached: tuple[float, float]


def _sometimes() -> np.ndarray:
    """Which rows are touched in which step: each of them now and then, the last one first in the middle."""
    touched = np.random.default_rng(1).random((_STEPS, _ROWS)) < 0.5
    touched[: _STEPS // 2, -1] = False
    touched[_STEPS // 2] = True
    return touched


def _trials(dim: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Gradients ``(trials, steps, rows, dim)``, which rows are touched, and facts about them: every row in every step,
    some in each; and one gradient for each row, in a step of its own, with touches afterwards, and these alone."""
    noise = np.random.default_rng(0).normal(size=(_STEPS, _ROWS, dim)).astype(np.float32)
    begun = np.arange(_STEPS)[:, None] >= np.arange(_ROWS)  # row i in step i
    first = np.eye(_STEPS, _ROWS, dtype=bool)
    touched = np.stack([np.ones((_STEPS, _ROWS), bool), _sometimes(), *[first | (begun & _sometimes())] * 2])
    given = np.stack([touched[0], touched[1], first, np.zeros_like(first)])
    facts = [jax.tree.map(lambda *each: np.stack(each), *_facts(each)) for each in touched]
    return noise * given[..., None], touched, jax.tree.map(lambda *each: np.stack(each), *facts)


def tried(rowwises: Sequence[Rowwise], dim: int, extra: dict[str, Any]) -> list[Trial]:
    """Differences between a dense array and its rows, which some transforms train that differ in their counts."""
    made: Any = rowwises[0].tx
    tx = optax.with_extra_args_support(made)
    takes = takes_facts(rowwises[0], dim, extra)
    updates = [update_of(rowwise, dim, extra) for rowwise in rowwises]

    def begun(rowwise: Rowwise, one: RowUpdate, values: Any) -> Any:
        return values, jax.vmap(one.initial)(values), jax.tree.leaves(rowwise.first_globals(dim))

    def step(dense: Any, tables: Any, grads: Any, touched: Any, facts: RowFacts) -> Any:
        def kept(new: Any, old: Any) -> Any:
            return jnp.where(touched.reshape(-1, *[1] * (old.ndim - 1)), new, old).astype(old.dtype)

        def trained(one: RowUpdate, rows: Any, slots: Any, globals_: Any) -> Any:
            shared = [None] * len(globals_)
            run = jax.vmap(one.update, in_axes=(0, 0, 0, None, 0), out_axes=(0, 0, shared))
            with of_shared_numbers():
                new_rows, new_slots, new = run(grads, rows, slots, globals_, facts if takes else None)
            new = [x.astype(y.dtype) for x, y in zip(new, globals_, strict=True)]
            return kept(new_rows, rows), [*map(kept, new_slots, slots)], new

        values, state = dense
        updates_, after = tx.update(grads, state, values, **extra, **({ROW_FACTS: facts} if takes else {}))
        after = jax.tree.map(lambda x, y: jnp.asarray(x, jnp.result_type(y)), after, state)
        tables = [trained(one, *table) for one, table in zip(updates, tables, strict=True)]
        return (optax.apply_updates(values, updates_), after), tables

    def trial(values: Any, operands: Any) -> Any:
        first = jax.tree.map(jnp.asarray, (values, tx.init(values)))
        tables = [begun(rowwise, one, values) for rowwise, one in zip(rowwises, updates, strict=True)]
        (dense, tables), _ = jax.lax.scan(lambda carry, x: (step(*carry, *x), None), (first, tables), operands)
        for i, rowwise in enumerate(rowwises):
            if isinstance(rowwise, CatchUp):  # whose rows are behind
                rows, slots, globals_ = tables[i]
                now = jax.vmap(caught_up_row(rowwise, dim), in_axes=(0, 0, None))
                tables[i] = (*now(rows, slots, globals_), globals_)
        return dense, tables

    start = np.random.default_rng(2).normal(size=(_ROWS, dim)).astype(np.float32)
    run = jax.jit(lambda values, operands: jax.lax.map(lambda x: trial(values, x), operands))
    operands = _trials(dim)
    done = run.lower(start, operands).compile({"xla_backend_optimization_level": "0"})(start, operands)
    results: list[Trial] = []
    for i, rowwise in enumerate(rowwises):
        layout = rowwise.layout(dim)
        of = [jax.tree.map(lambda x, k=k: np.asarray(x[k]), (done[0], done[1][i])) for k in range(4)]
        with np.errstate(invalid="ignore"):  # of a transform that makes NaN of such gradients
            every, some = (_difference(layout, start, *each) for each in of[:2])
            results.append(Trial(every, some, _reached(*of[2:])))
    return results


def _reached(lone: Any, none: Any) -> tuple[float, float]:
    """How far a gradient that comes alone moves its row, least and most, as a part of its way in dense training."""
    (values, _), (rows, *_) = lone
    dense, table = (np.linalg.norm(x - y, axis=1) for x, y in ((values, none[0][0]), (rows, none[1][0])))
    moved = dense > 1e-6 * np.max(dense, initial=0)
    parts = table[moved] / dense[moved]
    return (float(parts.min()), float(parts.max())) if parts.size else (1.0, 1.0)


def _facts(touched: np.ndarray) -> Iterator[RowFacts]:
    """Of all rows in each step, of keys from 0 on; a row that is not touched has no occurrences in it."""
    frequency, last = np.zeros(_ROWS, np.int32), np.full(_ROWS, -1)
    for step, now in enumerate(touched, 1):
        words = [Words(x.astype(np.uint32), (x >> 32).astype(np.uint32)) for x in (last, np.full(_ROWS, step))]
        missed = np.where(frequency > 0, step - last - 1, 0).astype(np.int32)
        frequency = frequency + now.astype(np.int32)
        key = Words(np.arange(_ROWS, dtype=np.uint32), np.zeros(_ROWS, np.uint32))
        yield RowFacts(now.astype(np.int32), frequency, missed, words[0], words[1], key)
        last = np.where(now, step, last)


def _difference(layout: SlotLayout, start: np.ndarray, dense: Any, sparse: Any) -> Difference:
    (values, state), (rows, slots, globals_) = jax.tree.map(np.asarray, (dense, sparse))
    each = (x.reshape(_ROWS, *shape) for x, shape in zip(slots, layout.shapes, strict=True))
    all_ = (np.broadcast_to(x, (_ROWS, *x.shape)) for x in globals_)
    mine = join_leaves(layout.treedef, layout.is_slot, each, all_)
    leaves = list(map(_apart, jax.tree.leaves(mine), jax.tree.leaves(state)))
    far = np.max(np.abs(values - start), initial=0)
    rounding = _STEPS * np.finfo(np.float32).eps * np.max(np.abs(values)) / far if far > 0 else 0.0
    return Difference(_relative(rows, values, far), leaves, float(rounding))


def _apart(rows: np.ndarray, dense: np.ndarray) -> float:
    """The difference of a leaf that each row has from that of the array: along its axis of rows, if it has one."""
    if dense.size == rows.size:
        dense = dense.reshape(rows.shape)
    else:
        axis = next((i for i, (n, m) in enumerate(zip(dense.shape, rows.shape[1:], strict=False)) if n != m), None)
        if rows.ndim - 1 != dense.ndim or (axis is not None and dense.shape[axis] != _ROWS):
            return np.nan
        dense = dense[None] if axis is None else np.expand_dims(np.moveaxis(dense, axis, 0), axis + 1)
        dense = np.broadcast_to(dense, rows.shape)
    return _relative(rows, dense, np.max(np.abs(dense.astype(np.float64)), initial=0))


def _relative(got: np.ndarray, want: np.ndarray, scale: float) -> float:
    difference = np.max(np.abs(got.astype(np.float64) - want.astype(np.float64)), initial=0)
    return float(difference / scale) if scale > 0 else float(difference)
