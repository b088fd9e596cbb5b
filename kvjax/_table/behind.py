"""Rows that are behind: what is said where a table that `kvjax.optax.catch_up` trains is read as it is stored.

Such a table is known by a slot, so it needs no memory of its transform, also after a restore. Whether its rows are
behind is seen where they are copied out. Where they are not, it is enough that they have been trained since it was seen
that none is.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from jax.core import Tracer

from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._table.handle import Handle, wait
from kvjax._values.errors import fail, level_of_user
from kvjax._values.exported import Exported

_SLOT, _TYPE = "last_step", "int32[]"  # of `kvjax._training.catch_up.CatchUpRows`
_MEND = (
    "give it what kvjax.optax.caught_up(params, state, tx) returns, or write them with "
    "kvjax.optax.sweep(params, state, tx) before"
)


def may_be_behind(table: Handle) -> bool:
    """Whether rows as they are stored may be others than those of now."""
    if not isinstance(table.version, Tracer):
        wait(table)
    spec = table.spec
    try:
        slots = spec.host.slots(spec.name, 0)
    except KeyError:
        return False  # there is no table any more, which the call itself says better
    if not _late(dict(slots)):
        return False
    return PROCESS.present.get(spec.name) != _trained(spec)


def warn(table: Handle, op: str, rows: str = "may be behind") -> None:
    """Says that a call reads rows as they are stored."""
    warnings.warn(
        f"kvjax: table {table.name!r}, {op}: it reads rows as they are stored, and those that steps have left out "
        f"{rows}; {_MEND}. Rows and a state that are saved and restored together go on as they are",
        stacklevel=level_of_user(),
    )


def warn_if_behind(table: Handle, op: str) -> None:
    """The same where rows may be behind."""
    if may_be_behind(table):
        warn(table, op)


def found_behind(table: Handle, rows: Exported) -> str:
    """How many rows are behind, in words; empty if none is. Rows are those of now, with slots."""
    if not len(rows):
        return ""
    last = np.where(rows.has_slots, rows.slots[_SLOT], 0) if _SLOT in rows.slots else np.zeros(len(rows), int)
    missed = last.max() - last
    if not missed.any():
        note_present(table.spec)
        return ""
    return f"are behind ({np.count_nonzero(missed)} of {len(rows)}, by up to {missed.max()} steps)"


def check_present(table: Handle, op: str, slot_types: dict[str, str], rows: Exported) -> None:
    """Whether a call that ends catching up loses nothing.

    Raises:
      ValueError: rows are behind.
    """
    if _late(slot_types) and (found := found_behind(table, rows)):
        raise fail(
            ValueError, table.name, op, "rows of now", f"some that {found}",
            "kvjax.optax.sweep(params, state, tx) writes what they have missed",
        )  # fmt: skip


def note_present(spec: TableSpec) -> None:
    """Remembers that no row is behind, as long as the table is not trained."""
    PROCESS.present[spec.name] = _trained(spec)


def all_present(slot_types: dict[str, str], rows: Exported) -> bool:
    """Whether rows that are loaded into a table are all of one step."""
    if not _late(slot_types) or not rows.has_slots.all():
        return False
    return not np.ptp(rows.slots[_SLOT]) if len(rows) else True


def _late(slot_types: dict[str, str]) -> bool:
    return slot_types.get(_SLOT) == _TYPE


def _trained(spec: TableSpec) -> tuple[Any, ...]:
    """What changes with every step that has a key, and when the table is made anew."""
    return (PROCESS.births.get(spec.name), sum(spec.host.stats(spec.name, i)["distinct"] for i in spec.originals))
