"""Compatibility: what a transform does to the rows of a table, compared with a dense array, computed from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.catch_up import present_row
from kvjax._training.coupling import Coupling, coupling_of
from kvjax._training.rowwise import Late, Rowwise, Transform, as_rowwise
from kvjax._training.slots import COUNTS, SlotLayout
from kvjax._training.update import takes_facts, update_of
from kvjax._values.arrays import PyTree
from kvjax._values.facts import ROW_FACTS, RowFacts, Words
from kvjax._values.numbers import is_integer
from kvjax._values.slot_layout import type_text

Verdict: TypeAlias = Literal["equal", "lazy", "per row", "refused"]

_ROWS, _STEPS = 6, 8
_EQUAL = 1e-5  # of the greatest displacement
_EQUAL_LATE = 1e-4  # in the first steps float32 has 6e-5 of the bias of Adam's moments, which XLA's powers round apart
_MEANS = {
    "equal": "equal to dense training",
    "lazy": "equal to dense training while every row is touched; rows that a batch leaves out stay as they are",
    "per row": "on each row by itself, which is not what it does to an array",
}
_MENDS = {
    "equal": "",
    "lazy": "none if lazy rows are meant (a higher rate makes up for the steps that rows miss); "
    "kvjax.optax.catch_up(tx) makes most of them equal to dense training, and optax.sgd and optax.adagrad are",
    "per row": "kvjax.optax.joint(tx) before partition, if it keeps no arrays; none if norms of a row are meant",
}


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf of a transform's state.

    Attributes:
      name: its path, "[0].mu".
      type: dtype and shape for one row, "float32[8]".
      kept: "slot", beside each row, or "global", for all rows together.
      slot_under: the choices of ``count=`` that make it a slot.
      verdict: that of `Compatibility`, for this leaf.
      difference: its greatest difference from dense training, of its greatest magnitude there, with rows that are
        touched now and then; nan where there is no counterpart.
      from_value: whether it starts from the values of a row.
    """

    name: str
    type: str
    kept: Literal["slot", "global"]
    slot_under: tuple[str, ...]
    verdict: Verdict
    difference: float
    from_value: bool


@dataclasses.dataclass(frozen=True)
class Compatibility:
    """What a transform does to the rows of a table; made by `check_compatibility`.

    Attributes:
      verdict: "equal" to dense training; "lazy": equal to it as long as every row is touched in every step; "per row":
        another thing than in dense training, where rows depend on each other, or on how many there are; "refused".
      every_step: greatest difference of a row from dense training with the same gradients, when every row is touched in
        every step, as a part of the greatest displacement.
      some_steps: the same when about half of the rows are touched in a step.
      leaves: of its state.
      reason: why it is refused, or what the verdict means.
      mend: what to do about it.
    """

    verdict: Verdict
    every_step: float
    some_steps: float
    leaves: tuple[LeafReport, ...]
    reason: str
    mend: str

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.verdict != "refused":
            lines.append(
                f"  difference: {self.every_step:.2g} of the greatest displacement with every row touched in every "
                f"step, {self.some_steps:.2g} with about half of them"
            )
        for leaf in self.leaves:
            others = ", ".join(f'"{c}"' for c in COUNTS if (c in leaf.slot_under) != (leaf.kept == "slot"))
            other = {"slot": "global", "global": "slot"}[leaf.kept]
            lines.append(
                f"  {leaf.name or 'state'} {leaf.type}: {leaf.kept}"
                + (f" ({other} with count={others})" if others else "")
                + (", starts from the row" if leaf.from_value else "")
                + f"; {leaf.verdict}, difference {leaf.difference:.2g}"
            )
        return "\n".join([*lines, *([f"  mend: {self.mend}"] if self.mend else [])])


def check_compatibility(tx: Transform, dim: int, **extra_args: PyTree) -> Compatibility:
    """What a transform does to the rows of a table that are `dim` wide, compared with a dense array.

    Whether rows depend on each other is read off the transform's jaxpr, for all numbers there may be. How much of a
    difference it makes is measured: 8 steps of random gradients on 6 rows, dense and row by row. `partition` and
    `rowwise` do only the first, which takes milliseconds: they warn of a transform that depends on other rows, once,
    and refuse those that would be something else row by row.

    Args:
      tx: an optax transform, or `rowwise(tx, count=)`.
      dim: width of the rows.
      **extra_args: those of its update, such as ``value=1.0``.

    Returns:
      `Compatibility`; print it.

    Raises:
      TypeError: `tx` is no transform, or it wants other extra arguments.
      ValueError: `dim` is no width of a row.

    Example:
      >>> import kvjax, optax
      >>> found = kvjax.optax.check_compatibility(optax.adam(1e-3), 8)
      >>> found.verdict, [(leaf.name, leaf.kept) for leaf in found.leaves]
      ('lazy', [('[0].count', 'slot'), ('[0].mu', 'slot'), ('[0].nu', 'slot')])
      >>> kvjax.optax.check_compatibility(optax.contrib.prodigy(), 8).verdict
      'refused'
    """
    rowwise = as_rowwise(tx)
    if not is_integer(dim) or dim < 1:
        raise ValueError(
            f"kvjax: check_compatibility: want a dim of 1 or more, got {dim!r}; give the width of the rows"
        )
    try:
        layouts = {count: Rowwise(rowwise.tx, count).layout(dim) for count in COUNTS}
    except ValueError as error:
        reason, _, mend = str(error).partition("; ")
        return Compatibility("refused", np.nan, np.nan, (), reason, mend)
    layout = layouts[rowwise.count]
    coupling = coupling_of(rowwise.tx, dim, layout.is_slot, extra_args or None)
    try:
        every, some = _measured(rowwise, dim, extra_args, [np.ones((_STEPS, _ROWS), bool), _sometimes()])
    except TypeError as error:
        raise TypeError(
            "kvjax: check_compatibility: want the extra arguments of the transform's update, got "
            f"{sorted(extra_args)}: {error}; for instance check_compatibility(tx, {dim}, value=1.0)"
        ) from error
    equal = max(_EQUAL_LATE, every.rounding, some.rounding) if isinstance(rowwise, Late) else _EQUAL
    verdict = _verdict(coupling is None or coupling.updates, every.rows, some.rows, equal)
    where = f" (by {', '.join(coupling.where)})" if coupling is not None and verdict == "per row" else ""
    return Compatibility(
        verdict, every.rows, some.rows, _leaves(rowwise, dim, layouts, coupling, every, some),
        _MEANS[verdict] + where, _MENDS[verdict],
    )  # fmt: skip


def _verdict(coupled: bool, every: float, some: float, equal: float = _EQUAL) -> Verdict:
    if coupled or not every <= equal:
        return "per row"
    return "equal" if some <= equal else "lazy"


def _leaves(
    rowwise: Rowwise, dim: int, layouts: dict[Any, SlotLayout], coupling: Coupling | None, every: Any, some: Any
) -> tuple[LeafReport, ...]:
    state = jax.eval_shape(rowwise.tx.init, jax.ShapeDtypeStruct((1, dim), jnp.float32))
    layout, reports = layouts[rowwise.count], []
    slot_types = iter(layout.types)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(state)[0]):
        slot = layout.is_slot[i]
        of = next(slot_types) if slot else leaf
        reports.append(
            LeafReport(
                name=jax.tree_util.keystr(path),
                type=type_text(of.dtype, of.shape),
                kept="slot" if slot else "global",
                slot_under=tuple(count for count in COUNTS if layouts[count].is_slot[i]),
                verdict=_verdict(coupling is None or coupling.leaves[i], every.leaves[i], some.leaves[i]),
                difference=some.leaves[i],
                from_value=coupling is not None and coupling.starts[i],
            )
        )
    return tuple(reports)


class _Difference(NamedTuple):
    rows: float
    leaves: list[float]
    rounding: float  # what float32 rounds rows apart by, in the same unit


def _sometimes() -> np.ndarray:
    """Which rows are touched in which step: each of them now and then, the last one first in the middle."""
    touched = np.random.default_rng(1).random((_STEPS, _ROWS)) < 0.5
    touched[: _STEPS // 2, -1] = False
    touched[_STEPS // 2] = True
    return touched


def _measured(rowwise: Rowwise, dim: int, extra: dict[str, Any], patterns: Sequence[np.ndarray]) -> list[_Difference]:
    """Differences between a dense array and its rows, by the same gradients, for some patterns of touched rows."""
    tx: Any = optax.with_extra_args_support(rowwise.tx)  # pyright: ignore[reportArgumentType]
    layout, one = rowwise.layout(dim), update_of(rowwise, dim, extra)
    rng = np.random.default_rng(0)
    start = rng.normal(size=(_ROWS, dim)).astype(np.float32)
    noise = rng.normal(size=(_STEPS, _ROWS, dim)).astype(np.float32)
    shared = [None] * layout.is_slot.count(False)
    takes = takes_facts(rowwise, dim, extra)
    rows_of = jax.vmap(one.update, in_axes=(0, 0, 0, None, 0), out_axes=(0, 0, shared))

    def first(values: Any) -> Any:
        return (values, tx.init(values)), (
            values,
            jax.vmap(one.initial)(values),
            tuple(jax.tree.leaves(rowwise.first_globals(dim))),
        )

    def step(dense: Any, sparse: Any, grads: Any, touched: Any, facts: RowFacts) -> Any:
        def kept(new: Any, old: Any) -> Any:
            return jnp.where(touched.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        grads = kept(grads, jnp.zeros_like(grads))
        values, state = dense
        updates, state = tx.update(grads, state, values, **extra, **({ROW_FACTS: facts} if takes else {}))
        rows, slots, globals_ = sparse
        new_rows, new_slots, globals_ = rows_of(grads, rows, slots, globals_, facts if takes else None)
        sparse = kept(new_rows, rows), [*map(kept, new_slots, slots)], tuple(globals_)
        return (optax.apply_updates(values, updates), state), sparse

    begin = jax.jit(first)(start)
    operands = (noise[0], patterns[0][0], next(_facts(patterns[0])))
    compiled = jax.jit(step).lower(*begin, *operands).compile({"xla_backend_optimization_level": "0"})
    results = []
    for touched in patterns:
        dense, sparse = begin
        for grads, now, facts in zip(noise, touched, _facts(touched), strict=True):
            dense, sparse = compiled(dense, sparse, grads, now, facts)
        if isinstance(rowwise, Late):  # whose rows are behind
            rows, slots, globals_ = sparse
            now = jax.jit(jax.vmap(present_row(rowwise, dim), in_axes=(0, 0, None)))
            sparse = *now(rows, slots, globals_), globals_
        results.append(_difference(layout, start, dense, sparse))
    return results


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


def _difference(layout: SlotLayout, start: np.ndarray, dense: Any, sparse: Any) -> _Difference:
    (values, state), (rows, slots, globals_) = jax.tree.map(np.asarray, (dense, sparse))
    each = (x.reshape(_ROWS, *shape) for x, shape in zip(slots, layout.shapes, strict=True))
    all_ = (np.broadcast_to(x, (_ROWS, *x.shape)) for x in globals_)
    mine = [next(each) if slot else next(all_) for slot in layout.is_slot]
    leaves = [_apart(x, y) for x, y in zip(mine, jax.tree.leaves(state), strict=True)]
    far = np.max(np.abs(values - start), initial=0)
    rounding = _STEPS * np.finfo(np.float32).eps * np.max(np.abs(values)) / far if far > 0 else 0.0
    return _Difference(_relative(rows, values, far), leaves, float(rounding))


def _apart(rows: np.ndarray, dense: np.ndarray) -> float:
    """The difference of a leaf that each row has from that of the array: along its axis of rows, if it has one."""
    if dense.size == rows.size:
        dense = dense.reshape(rows.shape)
        return _relative(rows, dense, np.max(np.abs(dense.astype(np.float64)), initial=0))
    axis = next((i for i, (n, m) in enumerate(zip(dense.shape, rows.shape[1:], strict=False)) if n != m), None)
    if rows.ndim - 1 != dense.ndim or (axis is not None and dense.shape[axis] != _ROWS):
        return np.nan
    dense = dense[None] if axis is None else np.expand_dims(np.moveaxis(dense, axis, 0), axis + 1)
    dense = np.broadcast_to(dense, rows.shape)
    return _relative(rows, dense, np.max(np.abs(dense.astype(np.float64)), initial=0))


def _relative(got: np.ndarray, want: np.ndarray, scale: float) -> float:
    difference = np.max(np.abs(got.astype(np.float64) - want.astype(np.float64)), initial=0)
    return float(difference / scale) if scale > 0 else float(difference)
