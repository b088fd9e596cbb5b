"""Ancestors of a merge: what tables that were trained apart have changed since the checkpoint that they began with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax._values.integers import as_int64
from kvjax._values.key_sets import runs_of
from kvjax._values.snapshot import Columns, same_bits, waiting_of

ANCESTOR = -1
"""The part whose rows are the ancestor's."""


@dataclasses.dataclass(frozen=True)
class Changed:
    """Rows that tables have changed, of each key one or more.

    Attributes:
      order: ``(m,)``, which rows; those of a key follow each other.
      freqs_before: ``(m,)`` int64, the frequency of the ancestor's row of the key, or 0.
      pinned: ``(m,)`` bool, whether the key is pinned.
    """

    order: np.ndarray
    freqs_before: np.ndarray
    pinned: np.ndarray


def changed(rows: Columns, part: np.ndarray, order: np.ndarray, tables: int, names: Sequence[str]) -> Changed:
    """The rows that are not as in the ancestor. A key that no table has changed keeps a row, unless a table has removed
    it and none pins it.

    Args:
      rows: of the ancestor and the tables.
      part: ``(n,)``, of which each is: `ANCESTOR`, or 0 and up.
      order: ``(n,)``, the rows by key, the ancestor's first.
      tables: how many there are, without the ancestor.
      names: of the columns that make a row another one.
    """
    keys, part = as_int64(rows["keys"])[order], part[order]
    begins, sizes = runs_of(keys)
    of = np.repeat(np.arange(len(begins)), sizes)  # the key of each row, as a number
    known = part[begins] == ANCESTOR
    old = order[begins][of]
    differs = ~known[of]
    for name in names:
        differs |= ~same_bits(rows[name][order], rows[name][old])
    pins = _sums(rows["pinned"][order] & (part != ANCESTOR), begins)
    pinned = np.where(known & rows["pinned"][order[begins]], pins == tables, pins > 0)
    present = sizes - known
    as_before = (_sums(differs, begins) == 0) & (present > 0) & ((present == tables) | pinned)
    differs[(begins + sizes - 1)[as_before]] = True
    before = np.where(known[of], rows["freqs"][old], 0)
    return Changed(order[differs], before[differs], pinned[of][differs])


def gained(freqs: np.ndarray, before: np.ndarray) -> np.ndarray:
    """How often rows were seen since the ancestor; one with less than it had was removed, and came back."""
    return freqs - np.where(freqs >= before, before, 0)


def counts_since(counts: Sequence[Columns], ancestor: Columns) -> list[Columns]:
    """Counts of keys without a row, whose sum has what the ancestor had once, and not once in each table.

    Args:
      counts: of each table.
      ancestor: those of the ancestor.
    """
    again = 1 - len(counts)
    if "sketch" in ancestor:
        return [*counts, {"sketch": ancestor["sketch"].astype(np.int64) * again}]
    if "pending_keys" in ancestor:
        waiting = waiting_of(ancestor)
        return [*counts, waiting | {"pending_counts": waiting["pending_counts"] * again}]
    return list(counts)


def _sums(of_rows: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """How many rows of each key are so, int64."""
    return np.add.reduceat(of_rows.astype(np.int64), begins) if len(begins) else np.zeros(0, np.int64)
