"""Sets of keys as sorted arrays, and counts of keys over those of others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvjax._formats.source import concat
from kvjax._values.snapshot import WAITING_COLUMNS, Columns, take

NONE = np.zeros(0, np.int64)
"""No keys, or no counts of keys."""


def among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which keys ``(n,)`` are among those known ``(m,)``, which are sorted."""
    if len(known) == 0:
        return np.zeros(len(keys), bool)
    at = np.searchsorted(known, keys)
    return known[np.minimum(at, len(known) - 1)] == keys


def runs_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal keys ``(n,)`` begins, and how many it has."""
    begins = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    return begins, np.diff(begins, append=len(keys))


def overlaid_counts(parts: Iterable[tuple[Columns, np.ndarray | None]]) -> dict[str, np.ndarray]:
    """What is counted of keys without a row, by the names of `ADMISSION_COLUMNS`; in no order.

    Args:
      parts: counts, those below first, and the keys ``(m,)`` int64, sorted, of which they are; None for all. A sketch
        that a part names takes the place of that below.
    """
    waiting: list[dict[str, np.ndarray]] = [{name: NONE for name in WAITING_COLUMNS}]
    sketch = NONE
    for counts, known in parts:
        new = {name: counts.get(name, NONE) for name in WAITING_COLUMNS}
        if known is None:
            waiting = [new]
        else:
            again = np.union1d(known, new["pending_keys"])
            waiting = [take(old, ~among(old["pending_keys"], again)) for old in waiting] + [new]
        sketch = counts.get("sketch", sketch)
    out = concat(waiting)
    return (out if len(out["pending_keys"]) else {}) | ({"sketch": sketch} if len(sketch) else {})
