"""Compatibility: what a transform does to the rows of a table, compared with a dense array, computed from it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._programs.program import Program
from kvjax._training.catch_up import catching_up_of
from kvjax._training.coupling import Coupling, coupling_of
from kvjax._training.rowwise import CatchUp, Rowwise, Transform, as_rowwise
from kvjax._training.slots import COUNTS, SlotCount, SlotLayout, leaves_by_shape
from kvjax._training.update import program_of
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import PyTree
from kvjax._values.slot_layout import type_text
from kvjax.optax._joint import takes_joint
from kvjax.optax._trials import Trial, tried

Verdict: TypeAlias = Literal["equal", "lazy", "per row", "refused"]

_EQUAL = 1e-5  # of the greatest displacement
_EQUAL_BEHIND = (
    1e-4  # in the first steps float32 has 6e-5 of the bias of Adam's moments, which XLA's powers round apart
)
_MEANS = {
    "equal": "equal to dense training",
    "lazy": "equal to dense training while every row is touched; rows that a batch leaves out stay as they are",
    "per row": "on each row by itself, which is not what it does to an array",
}
_LAZY = (
    "none if lazy rows are meant (a higher rate makes up for the steps that rows miss; kvjax.optax.gap_adam does so by "
    "itself)"
)
_MENDS = {
    "equal": "",
    "lazy": f"{_LAZY}; otherwise optax.sgd or optax.adagrad, which are equal to dense training; "
    "kvjax.optax.catch_up has no closed form of it",
    "per row": "none if norms of a row are meant; otherwise a transform in which rows do not depend on each other",
}
_CATCH_UP = f"kvjax.optax.catch_up(tx) makes rows equal to dense training; {_LAZY}"
_NEARLY = "equal to dense training while every row is touched; rows that a batch leaves out catch up to nearly that"
_REPLAY = "a larger replay=, such as kvjax.optax.{}(..., replay=200), which takes more of the missed steps one by one"
_JOINT = "kvjax.optax.joint(tx) before partition; none if norms of a row are meant"
_SHARE = 'kvjax.optax.rowwise(tx, count="global") shares the count, as dense training does'
_LOST, _FARTHER = 1e-3, 4.0  # of the way of a gradient in dense training
_HELD = "kvjax.optax.accumulate(kvjax.optax.partition(...), k) around all, if it is to hold gradients back"


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf of a transform's state.

    Attributes:
      name: its path, "[0].mu".
      type: dtype and shape for one row, "float32[8]".
      kept: "slot", beside each row, or "global", for all rows together.
      slot_under: the choices of ``count=`` that make it a slot.
      verdict: that of `Compatibility`, for this leaf.
      difference: its greatest difference from dense training, as a fraction of its greatest magnitude there, with rows
        that are touched now and then; nan if it has no counterpart there.
      from_value: whether it starts from the values of a row.
      mend: what would make it equal to dense training, if anything does.

    Example:
      >>> import kvjax, optax
      >>> (leaf,) = kvjax.optax.check_compatibility(optax.adagrad(0.1), dim=2).leaves
      >>> leaf.name, leaf.type, leaf.kept, leaf.verdict
      ('[0].sum_of_squares', 'float32[2]', 'slot', 'equal')
    """

    name: str
    type: str
    kept: Literal["slot", "global"]
    slot_under: tuple[str, ...]
    verdict: Verdict
    difference: float
    from_value: bool
    mend: str


@dataclasses.dataclass(frozen=True)
class CountReport:
    """What a transform does to rows with one choice of ``count=``.

    Attributes:
      every_step: see `Compatibility`.
      some_steps: see `Compatibility`.
      reached: how far a single gradient moves its row in the end, if the row is touched now and then without a
        gradient: the least and the most, as parts of the way in dense training. 1 and 1 mean that gradients are
        conserved; less, that a part is lost with the steps that a row misses; 0, that a gradient was held back and
        lost; 2, that one was applied twice.
    """

    every_step: float
    some_steps: float
    reached: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Compatibility:
    """What a transform does to the rows of a table; made by `check_compatibility`.

    Attributes:
      verdict: "equal": equal to dense training; "lazy": equal to it as long as every row is touched in every step; "per
        row": different, because in dense training rows depend on each other, or on their number; "refused".
      every_step: greatest difference of a row from dense training with the same gradients, when every row is touched in
        every step, as a fraction of the greatest displacement.
      some_steps: the same when about half of the rows are touched in a step.
      counts: the same by the choices of ``count=`` (see `rowwise`), and whether gradients are conserved.
      leaves: reports on the leaves of its state; for a refused transform as they would be, none if rows cannot have its
        state.
      reason: why it is refused, or what the verdict means.
      mend: what to do about it.
      program: the row program by which a table runs it, an instruction a line; None if there is none. A table runs
        that in place; what has none XLA runs on copies of the rows, which takes two to three times as long. (A
        `constraint` of the table belongs to the program, and may have none either.)
      no_program: what keeps it from being one, such as the name of a JAX primitive; "" if it is one, and of a
        refused transform.

    Example:
      >>> import kvjax, optax
      >>> report = kvjax.optax.check_compatibility(optax.adagrad(0.1), dim=2)
      >>> report.verdict, report.every_step < 1e-5, [leaf.name for leaf in report.leaves]
      ('equal', True, ['[0].sum_of_squares'])
      >>> print(kvjax.optax.check_compatibility(optax.sgd(0.1), dim=2).program)
      initial slots:
      update:
        value = fma_f g0 grad value
    """

    verdict: Verdict
    every_step: float
    some_steps: float
    counts: dict[SlotCount, CountReport]
    leaves: tuple[LeafReport, ...]
    reason: str
    mend: str
    program: str | None = dataclasses.field(default=None, repr=False)
    no_program: str = ""

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.verdict != "refused":
            lines.append(
                f"  difference: {self.every_step:.2g} of the greatest displacement with every row touched in every "
                f"step, {self.some_steps:.2g} with about half of them"
            )
        for names, of in _alike(self.counts):
            least, most = of.reached
            lines.append(
                f"  count={names}: {of.every_step:.2g} and {of.some_steps:.2g}; a gradient that comes alone goes "
                f"{least:.2g} to {most:.2g} of its way"
            )
        for leaf in self.leaves:
            others = ", ".join(f'"{c}"' for c in COUNTS if (c in leaf.slot_under) != (leaf.kept == "slot"))
            other = {"slot": "global", "global": "slot"}[leaf.kept]
            lines.append(
                f"  {leaf.name or 'state'} {leaf.type}: {leaf.kept}"
                + (f" ({other} with count={others})" if others else "")
                + (", starts from the row" if leaf.from_value else "")
                + f"; {leaf.verdict}, difference {leaf.difference:.2g}"
                + (f"; mend: {leaf.mend}" if leaf.mend else "")
            )
        if self.no_program:
            lines.append(f"  no row program ({self.no_program}): XLA runs it on copies of rows, which takes longer")
        return "\n".join([*lines, *([f"  mend: {self.mend}"] if self.mend else [])])


def check_compatibility(tx: Transform, dim: int, **extra_args: PyTree) -> Compatibility:
    """Computes what a transform does to the rows of a table with `dim` columns, compared with a dense array.

    It reads from the transform's jaxpr whether rows depend on each other, which holds for all inputs. It measures how
    much difference that makes, with 8 steps of random gradients on 6 rows, dense and row by row; what a schedule begins
    later it does not see. `partition` and `rowwise` only do the first, which takes milliseconds: they warn once of a
    transform in which rows depend on each other, and refuse transforms that would be a different optimizer row by row.

    Args:
      tx: an optax transform, or `rowwise(tx, count=)`.
      dim: width of the rows.
      **extra_args: extra arguments of its update, such as ``value=1.0``.

    Returns:
      `Compatibility`; print it.

    Raises:
      TypeError: `tx` is not a transform, or its update needs other extra arguments.
      ValueError: `dim` is not a valid width of a row.

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
        layouts = {count: dataclasses.replace(rowwise, count=count).layout(dim) for count in COUNTS}
    except ValueError as error:
        reason, _, mend = str(error).rpartition("; ")
        return Compatibility("refused", np.nan, np.nan, {}, _refused_leaves(rowwise, dim, mend), reason, mend)
    layout = layouts[rowwise.count]
    coupling = _coupling(rowwise, dim, layout, extra_args)
    # The one that is asked for, and those that share other scalars.
    kinds = {layout.is_slot: rowwise}
    for count, other in layouts.items():
        kinds.setdefault(other.is_slot, Rowwise(rowwise.tx, count))
    try:
        measured = dict(zip(kinds, tried(list(kinds.values()), dim, extra_args), strict=True))
    except TypeError as error:
        if not re.search(r"(missing|unexpected) .*argument", str(error)):
            raise TypeError(
                "kvjax: check_compatibility: want a transform that runs in jit, on an array of any number of rows of "
                f"{dim}, got one that raises {type(error).__name__}: {error}; what belongs to a row is its state"
            ) from error
        raise TypeError(
            "kvjax: check_compatibility: want the extra arguments of the transform's update, got "
            f"{sorted(extra_args)}: {error}; for instance check_compatibility(tx, {dim}, value=1.0)"
        ) from error
    every, some, reached = measured[layout.is_slot]
    equal = max(_EQUAL_BEHIND, every.rounding, some.rounding) if isinstance(rowwise, CatchUp) else _EQUAL
    verdict = _verdict(coupling is None or coupling.updates, every.rows, some.rows, equal)
    where = coupling.where if coupling is not None and verdict == "per row" else ()
    where = f" (by {', '.join(where)})" if where else ""
    by_count = {count: measured[layouts[count].is_slot] for count in COUNTS}
    counts = {count: CountReport(m.every.rows, m.some.rows, m.reached) for count, m in by_count.items()}
    mend = leaf_mend = _MENDS[verdict]
    if verdict == "lazy":
        mend, leaf_mend = _mends(rowwise, reached, counts)
    elif verdict == "per row" and takes_joint(rowwise.tx):
        mend = leaf_mend = _JOINT
    leaves = _leaves(rowwise, dim, layouts, coupling, by_count, leaf_mend)
    program = program_of(rowwise, dim, extra_args)
    listing, missing = (str(program), "") if isinstance(program, Program) else (None, str(program))
    reason = (_NEARLY if verdict == "lazy" and isinstance(rowwise, CatchUp) else _MEANS[verdict]) + where
    return Compatibility(verdict, every.rows, some.rows, counts, leaves, reason, mend, listing, missing)


def _mends(rowwise: Rowwise, reached: tuple[float, float], counts: dict[SlotCount, CountReport]) -> tuple[str, str]:
    """Of a lazy transform, and of the slots that make it lazy."""
    if isinstance(rowwise, CatchUp):
        replay = _REPLAY.format(rowwise.name)
        return f"none if so small a difference is meant; otherwise {replay}", replay
    if _conserves(*counts["global"].reached) and not _conserves(*reached):
        return f"{_SHARE}: a row that counts its own touches begins, or slows down, at other steps", "none"
    if reached[0] < _LOST:
        return _HELD, _HELD
    return (_CATCH_UP, "kvjax.optax.catch_up(tx)") if _catches_up(rowwise) else (_MENDS["lazy"], "none")


def _conserves(least: float, most: float) -> bool:
    return least >= _LOST and most <= _FARTHER


def _catches_up(rowwise: Rowwise) -> bool:
    try:
        catching_up_of(rowwise.tx, "catch_up", 0)
    except (TypeError, ValueError):  # it has no closed form, or wants more than gradients
        return False
    return True


def _alike(counts: dict[SlotCount, CountReport]) -> list[tuple[str, CountReport]]:
    """Reports with the choices that have them."""
    alike: dict[CountReport, list[str]] = {}
    for count, report in counts.items():
        alike.setdefault(report, []).append(f'"{count}"')
    return [(" and ".join(names), report) for report, names in alike.items()]


def _coupling(rowwise: Rowwise, dim: int, layout: SlotLayout, extra: dict[str, Any]) -> Coupling | None:
    if not isinstance(rowwise, CatchUp) or rowwise.layout_of is None:
        return coupling_of(rowwise.tx, dim, layout.is_slot, extra or None)
    # That of the transform whose steps are replayed: all rows of a loop look as if they depended on each other.
    n = len(layout.is_slot)
    coupled = bool(layout.coupled)
    return Coupling(coupled, layout.coupled, False, False, (coupled,) * n, layout.is_slot, (False,) * n)


def _verdict(coupled: bool, every: float, some: float, equal: float = _EQUAL) -> Verdict:
    if coupled or not every <= equal:
        return "per row"
    return "equal" if some <= equal else "lazy"


def _refused_leaves(rowwise: Rowwise, dim: int, mend: str) -> tuple[LeafReport, ...]:
    """What its state would be, if it can be made of rows."""
    by_count = {count: leaves_by_shape(rowwise.tx, count, dim) for count in COUNTS}
    reports = []
    for i, (name, of, slot) in enumerate(by_count[rowwise.count]):
        reports.append(
            LeafReport(
                name=name,
                type=type_text(of.dtype, of.shape),
                kept="slot" if slot else "global",
                slot_under=tuple(count for count in COUNTS if by_count[count][i][2]),
                verdict="refused",
                difference=np.nan,
                from_value=False,
                mend=mend,
            )
        )
    return tuple(reports)


def _leaves(
    rowwise: Rowwise,
    dim: int,
    layouts: dict[Any, SlotLayout],
    coupling: Coupling | None,
    measured: dict[SlotCount, Trial],
    mend: str,
) -> tuple[LeafReport, ...]:
    state = jax.eval_shape(rowwise.tx.init, jax.ShapeDtypeStruct((1, dim), jnp.float32))
    layout, reports = layouts[rowwise.count], []
    slot_types, (every, some, _) = iter(layout.types), measured[rowwise.count]
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(state)[0]):
        slot = layout.is_slot[i]
        of = next(slot_types) if slot else leaf
        verdict = _verdict(coupling is None or coupling.leaves[i], every.leaves[i], some.leaves[i])
        shared = not layouts["global"].is_slot[i] and measured["global"].some.leaves[i] <= _EQUAL
        reports.append(
            LeafReport(
                name=jax.tree_util.keystr(path),
                type=type_text(of.dtype, of.shape),
                kept="slot" if slot else "global",
                slot_under=tuple(count for count in COUNTS if layouts[count].is_slot[i]),
                verdict=verdict,
                difference=some.leaves[i],
                from_value=coupling is not None and coupling.starts[i],
                mend="" if verdict == "equal" else _SHARE if slot and shared and mend != _HELD else mend,
            )
        )
    return tuple(reports)
