"""Rows that are behind: what is known and said, without JAX, of rows that `kvjax.optax.catch_up` has trained.

Those that steps have left out are behind until they catch up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvjax._values.errors import warn
from kvjax._values.exported import SLOT

LAST_STEP, _TYPE = "last_step", "int32[]"  # of `kvjax._training.catch_up.CatchUpRows`
LAST_COLUMN = SLOT + LAST_STEP
SWEEP = "write them with kvjax.optax.sweep(params, state, rows) before"
_MEND = f"give it what kvjax.optax.caught_up(params, state, rows) returns, or {SWEEP}"
_SAVE = (
    "save what kvjax.optax.caught_up(params, state, rows) returns, or, with a cursor, what kvjax.optax.sweep(params, "
    "state, rows) returns"
)


def can_be_behind(slot_types: Mapping[str, str]) -> bool:
    """Whether rows with these slots may be behind."""
    return slot_types.get(LAST_STEP) == _TYPE


def decays(slot_types: Mapping[str, str]) -> bool:
    """Whether rows with these slots decay, also those that are yet to be made."""
    return can_be_behind(slot_types) and "decay_whole" in slot_types  # of `CatchUpRows.clock`


def warn_behind(name: str, op: str, rows: str = "may be behind", mend: str = _MEND) -> None:
    """Says that a call reads rows as they are stored."""
    warn(
        f"kvjax: table {name!r}, {op}: it reads rows as they are stored, and those that steps have left out {rows}; "
        f"{mend}. Rows and a state that are saved and restored together go on as they are"
    )


class Lag:
    """How far rows are behind, of which some are given at a time."""

    def __init__(self) -> None:
        self._rows = self._at_newest = self._newest = self._oldest = 0

    def add(self, last: np.ndarray, has_slots: np.ndarray) -> None:
        """Some of the rows.

        Args:
          last: ``(n,)``, the slot of that name.
          has_slots: ``(n,)`` bool.
        """
        if not len(last):
            return
        steps = np.where(has_slots, last, 0)
        newest, oldest = int(steps.max()), int(steps.min())
        self._oldest = min(self._oldest, oldest) if self._rows else oldest
        if newest > self._newest:
            self._newest, self._at_newest = newest, 0
        self._at_newest += int(np.count_nonzero(steps == self._newest))
        self._rows += len(steps)

    def in_words(self, since: int = 0) -> str:
        """How many rows are behind; empty if none is.

        Args:
          since: steps since the newest of the rows was trained.
        """
        behind, by = self._rows - (0 if since else self._at_newest), since + self._newest - self._oldest
        return f"are behind ({behind} of {self._rows}, by up to {by} steps)" if behind else ""


def warn_if_saved_behind(name: str, op: str, pieces: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Says that a call takes rows that are behind from a checkpoint, without their slots."""
    lag = Lag()
    for columns in pieces:
        if LAST_COLUMN in columns:
            lag.add(columns[LAST_COLUMN], columns["has_slots"])
    if found := lag.in_words():
        warn_behind(name, op, found, f"{_SAVE}; or restore the rows with their slots and their state")


def warn_of_left(name: str, op: str) -> None:
    """Says that a call leaves rows as they were before a delta, which may be behind by its steps. It is one text for
    each table, so that it is said once."""
    warn_behind(name, op, "may be behind, as the delta leaves some out", _SAVE)
