"""Rows that are behind: warnings and errors where a table that `kvjax.optax.catch_up` trains is read as it is stored.

Such a table is known by a slot, so it needs no memory of its transform, also after a restore. Whether its rows are
behind is seen where they are copied out. Where they are not, it is enough that they have been trained since it was seen
that none is, and that is kept by moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.core import Tracer

from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._table.handle import Handle, wait
from kvjax._values.behind import LAST_COLUMN, LAST_STEP, SWEEP, Lag, can_be_behind, warn_behind
from kvjax._values.errors import fail, warn
from kvjax._values.exported import Exported


def may_be_behind(table: Handle) -> bool:
    """Whether rows as they are stored may be others than those of now."""
    if PROCESS.forked:
        return False  # there is no table here, which the call itself says better
    if not isinstance(table.version, Tracer):
        wait(table)
    return _may_be_behind(table.spec)


def _may_be_behind(spec: TableSpec) -> bool:
    try:
        slots = spec.host.slots(spec.name, 0)
    except KeyError:
        return False  # there is no table any more, which the call itself says better
    if not can_be_behind(dict(slots)):
        return False
    return PROCESS.caught_up.get(spec.name) != _trained(spec)


def warn_if_behind(table: Handle, op: str) -> None:
    """Says that a call, which reads rows as they are stored and takes no view, finds some that may be behind."""
    if may_be_behind(table):
        warn_behind(table.name, op, mend=SWEEP)


def warn_of_lookup(table: Handle) -> None:
    """The same for a lookup by no view and in no loss, which waits for nothing; in a program when it is traced."""
    if table.view is None and table.tape is None and not table.follows and _may_be_behind(table.spec):
        warn_behind(table.name, "lookup")


def warn_of_write(table: Handle, op: str) -> None:
    """Says that a row which a caller writes is taken for one that is as far behind as the one before was."""
    if _may_be_behind(table.spec):
        warn(
            f"kvjax: table {table.name!r}, {op}: it writes rows as they are stored, so the steps that a row has missed "
            "come to what is written when it is read or trained next; "
            "kvjax.optax.sweep(params, state, rows) before leaves none"
        )


def found_behind(table: Handle, rows: Exported) -> str:
    """How many rows are behind, in words; empty if none is. Rows are those of now, with slots."""
    lag = Lag()
    if LAST_STEP in rows.slots:
        lag.add(rows.slots[LAST_STEP], rows.has_slots)
    found = lag.in_words(_steps_since(table.spec, rows))
    if not found:
        note_caught_up(table.spec)
    return found


def _steps_since(spec: TableSpec, rows: Exported) -> int:
    """Steps of the table, as its calls have numbered them, in which none of these rows was trained: all may be of one
    step, and still be behind."""
    if not rows.has_slots.any():
        return 0
    noted = PROCESS.caught_up.get(spec.name)
    newest = int(rows.versions[rows.has_slots].max())
    if noted is not None:
        newest = max(newest, noted.last_step)
    return max(rows.last_step - newest, 0)


def warn_if_found_behind(table: Handle, op: str, rows: Exported) -> None:
    """The same where rows are behind that a call has copied out, with slots."""
    if table.view is None and may_be_behind(table) and (found := found_behind(table, rows)):
        warn_behind(table.name, op, found)


def check_none_behind(table: Handle, op: str, slot_types: dict[str, str], rows: Exported) -> None:
    """Whether a call that ends catching up loses nothing.

    Raises:
      ValueError: rows are behind.
    """
    if can_be_behind(slot_types) and (found := found_behind(table, rows)):
        raise fail(
            ValueError, table.name, op, "rows of now", f"some that {found}",
            "kvjax.optax.sweep(params, state, tx) writes what they have missed",
        )  # fmt: skip


def note_caught_up(spec: TableSpec) -> None:
    """Remembers that no row is behind, as long as the table is not trained."""
    PROCESS.caught_up[spec.name] = _trained(spec)


def note_loaded(spec: TableSpec, caught_up: bool) -> None:
    """Forgets what was known of the rows before, once others are loaded of which it is known or not."""
    if caught_up:
        note_caught_up(spec)
    else:
        PROCESS.caught_up.pop(spec.name, None)


def note_moved(spec: TableSpec, behind: bool) -> None:
    """Goes on to know of rows what was known, once they are in other shards, which count from 0.

    Args:
      spec: of the table from then on.
      behind: whether they might be before.
    """
    noted = PROCESS.caught_up.get(spec.name)
    if not behind:
        note_caught_up(spec)
    elif noted is not None:
        PROCESS.caught_up[spec.name] = noted._replace(distinct=-1)


class OneStepCheck:
    """Whether rows that are loaded into a table are all of one step, said of some at a time.

    Args:
      slot_types: of the rows.
    """

    def __init__(self, slot_types: dict[str, str]) -> None:
        self._so_far, self._step = can_be_behind(slot_types), None

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Some of the rows."""
        if not self._so_far or not len(columns["keys"]):
            return
        last = columns[LAST_COLUMN]
        self._step = last[0] if self._step is None else self._step
        self._so_far = bool(columns["has_slots"].all() and (last == self._step).all())

    def all(self) -> bool:
        """Whether all that were added are."""
        return self._so_far


class _Trained(NamedTuple):
    """How far a table has been trained: what changes with every step."""

    distinct: int
    last_step: int


def _trained(spec: TableSpec) -> _Trained:
    stats = [spec.host.stats(spec.name, i, raises=False) for i in spec.originals]
    distinct, steps = ([one[name] for one in stats] for name in ("distinct", "last_step"))
    return _Trained(sum(distinct), max(steps, default=0))
