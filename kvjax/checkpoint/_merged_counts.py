"""Counts of a merge: how often several tables have seen a key, and the ancestor that they started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.choices import MergeRule
from kvjax._keys.buckets import by_bucket
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import NONE, runs_of
from kvjax._values.snapshot import Columns
from kvjax.checkpoint._ancestor import ANCESTOR, gained, sums

_WINDOW = 2**30
"""See ``kWindow`` of ``kvjax/ffi/core/admit.h``."""


class Seen:
    """What tables know of keys without a row, and what that adds to the frequencies of rows.

    Args:
      tables: the counts of each, by the names of `ADMISSION_COLUMNS`.
      ancestor: the counts that they began with; empty if it has none, or is not known.
      admit: the rule of the tables, as checkpoints have it.
    """

    def __init__(self, tables: Sequence[Columns], ancestor: Columns, admit: Mapping[str, Any] | None) -> None:
        self._counts, self._ancestor = tables, ancestor
        self._tables = [Waiting(counts, admit) for counts in tables]
        self._before = Waiting(ancestor, admit)

    def of_rows(self, rows: Columns, part: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How often keys with a row were seen.

        Args:
          rows: of the ancestor and the tables.
          part: ``(n,)``, of which each is.
          order: ``(n,)``, the rows by key, the ancestor's first.

        Returns:
          ``(n,)`` int64, since the ancestor in the table of each row; ``(m,)`` int64 the different keys, sorted; and
          ``(m,)`` int64, how often in all tables, and before, if a table has not forgotten that.
        """
        keys, freqs, old = as_int64(rows["keys"])[order], rows["freqs"][order], part[order] == ANCESTOR
        begins, sizes = runs_of(keys)
        before = np.where(old[begins], freqs[begins], self._before.of(keys[begins]))
        since = np.where(old, 0, gained(freqs, np.repeat(before, sizes)))
        waits = np.array([table.of(keys[begins]) for table in self._tables])
        known = sums(~old & (freqs >= np.repeat(before, sizes)), begins) > 0  # to a table that has gone on from there
        seen = _in_all(waits, before, known) + sums(since, begins)
        of_row = np.zeros(len(keys), np.int64)
        of_row[order] = since
        return of_row, keys[begins], seen

    def of_others(self, rule: MergeRule) -> dict[str, np.ndarray]:
        """The counts of keys without a row; waiting keys are sorted by (bucket, key)."""
        out: dict[str, np.ndarray] = {}
        sketches = np.array([counts["sketch"] for counts in self._counts if "sketch" in counts], np.int64)
        if len(sketches):
            before = self._ancestor.get("sketch", np.zeros(sketches.shape[1:], np.uint16)).astype(np.int64)
            cells = sketches.max(axis=0) if rule == "newest" else _in_all(sketches, before)
            out["sketch"] = np.minimum(cells, np.iinfo(np.uint16).max).astype(np.uint16)
        if any("pending_keys" in counts for counts in self._counts):
            keys = np.unique(np.concatenate([table.keys for table in self._tables]))
            found = np.array([table.of(keys) for table in self._tables])
            before = self._before.of(keys)
            here = found > 0
            # As with rows: what a table has forgotten goes, unless another has counted on.
            keep = here.all(axis=0) | (here & (found != before)).any(axis=0)
            counts = found.max(axis=0) if rule == "newest" else _in_all(found, before)
            if self._before.forgets:
                recent = np.array([table.recent(keys) for table in self._tables]).any(axis=0)
                counts = np.minimum(counts, _WINDOW - 2) + _WINDOW * recent
            keys, counts = keys[keep], counts[keep]
            order = by_bucket(keys)[0]
            out |= {"pending_keys": keys[order], "pending_counts": counts[order]}
        return out


def _in_all(counts: np.ndarray, before: np.ndarray, known: np.ndarray | bool = False) -> np.ndarray:
    """How often ``(m,)`` keys or cells were seen in all tables: before, unless each has forgotten that, and since.

    Args:
      counts: ``(tables, m)``, of each; 0 where it has none.
      before: ``(m,)``, of the ancestor.
      known: ``(m,)``, whether a table has not forgotten it, whatever its count here.
    """
    goes_on = (counts >= before).any(axis=0) | known
    return np.where(goes_on, before, 0) + np.where(counts > 0, gained(counts, before), 0).sum(axis=0)


class Waiting:
    """Counts of waiting keys, to be found by key.

    Args:
      counts: by the names of `ADMISSION_COLUMNS`.
      admit: the rule of the table, as checkpoints have it.

    Attributes:
      forgets: whether keys are forgotten. Then `_WINDOW` is added to the count of one that was seen in the last window.
    """

    def __init__(self, counts: Columns, admit: Mapping[str, Any] | None) -> None:
        self.forgets = bool(admit and (admit.get("max_age") or admit.get("max_waiting")))
        keys = as_int64(counts.get("pending_keys", NONE))
        order = np.argsort(keys)
        self.keys, words = keys[order], counts.get("pending_counts", NONE)[order]
        self._counts, self._recent = (
            (words % _WINDOW, words // _WINDOW) if self.forgets else (words, np.zeros_like(words))
        )

    def of(self, keys: np.ndarray) -> np.ndarray:
        """How often keys ``(n,)`` were seen, int64; 0 of those that do not wait."""
        return self._found(keys, self._counts)

    def recent(self, keys: np.ndarray) -> np.ndarray:
        """Which of keys ``(n,)`` were seen in the last window."""
        return self._found(keys, self._recent) > 0

    def _found(self, keys: np.ndarray, column: np.ndarray) -> np.ndarray:
        if len(self.keys) == 0:
            return np.zeros(len(keys), np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, column[at], 0)
