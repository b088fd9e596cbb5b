"""Ancestors of a merge: what separately trained tables have changed since the checkpoint that they started from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax._values.integers import as_int64
from kvjax._values.key_sets import runs_of
from kvjax._values.snapshot import Columns, same_bits

ANCESTOR = -1
"""The part whose rows are the ancestor's."""


def changed(
    rows: Columns, part: np.ndarray, order: np.ndarray, tables: int, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are not as in the ancestor. A key that no table has changed keeps a row, unless a table has removed
    it and none pins it.

    Args:
      rows: of the ancestor and the tables.
      part: ``(n,)``, of which each is: `ANCESTOR`, or 0 and up.
      order: ``(n,)``, the rows by key, the ancestor's first.
      tables: how many there are, without the ancestor.
      names: of the columns that make a row another one.

    Returns:
      ``(m,)``, those rows, in the same order; and ``(m,)`` bool, whether their key is pinned.
    """
    part = part[order]
    begins, sizes = runs_of(as_int64(rows["keys"])[order])
    of = np.repeat(np.arange(len(begins)), sizes)  # the key of each row, as a number
    known = part[begins] == ANCESTOR
    old = order[begins][of]
    differs = ~known[of]
    for name in names:
        differs |= ~same_bits(rows[name][order], rows[name][old])
    pins = sums(rows["pinned"][order] & (part != ANCESTOR), begins)
    pinned = np.where(known & rows["pinned"][order[begins]], pins == tables, pins > 0)
    present = sizes - known
    as_before = (sums(differs, begins) == 0) & (present > 0) & ((present == tables) | pinned)
    # Of equal rows the last, of a checkpoint that has kept its slots if there is one.
    rank = np.where(part == ANCESTOR, -1, np.arange(len(part)) + len(part) * rows["has_slots"][order])
    last = np.maximum.reduceat(rank, begins) % len(part) if len(begins) else begins
    differs[last[as_before]] = True
    return order[differs], pinned[of][differs]


def gained(counts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How often keys were seen since the ancestor; one with less than it had was removed, and came back."""
    return counts - np.where(counts >= before, before, 0)


def sums(of_rows: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The sums of runs of a column, int64."""
    return np.add.reduceat(of_rows.astype(np.int64), begins) if len(begins) else np.zeros(0, np.int64)
