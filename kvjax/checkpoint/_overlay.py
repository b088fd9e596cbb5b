"""Overlays: rows of one snapshot over those of another, and what is chosen of a snapshot on its way into a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import as_keys
from kvjax._values.exported import Exported, slot_column
from kvjax._values.slot_layout import parse_type
from kvjax._values.snapshot import ADMISSION_COLUMNS, WAITING_COLUMNS, Columns, Snapshot, concat, take
from kvjax.checkpoint._format import POOL, REMOVED
from kvjax.checkpoint._stored import Stored

_NONE = np.zeros(0, np.int64)


def overlay(below: Snapshot, above: Snapshot) -> Snapshot:
    """The rows of two snapshots; of a key that is in both, that of `above`. They are in no order.

    Args:
      below: of a table.
      above: of the same table, or another of its dim and dtype.

    Raises:
      ValueError: both have slots, but not the same.
    """
    slots = below.slot_types or above.slot_types
    if above.slot_types and dict(slots) != dict(above.slot_types):
        raise ValueError(f"kvjax: restore: want rows with the slots {slots}, got {above.slot_types}; slots=False")
    last_step = max(below.rows.last_step, above.rows.last_step)
    known = np.unique(_words(above.rows.keys))
    parts = [_columns(below, slots, ~among(_words(below.rows.keys), known)), _columns(above, slots)]
    rows = Exported.of_columns(concat(parts), last_step)
    return Snapshot(rows, _NONE, dict(slots), overlaid_counts(below.admission, above.admission, known, False))


def overlaid(links: Sequence[Stored]) -> Stored:
    """A table as it was at the last of some checkpoints, of which the first has all of it and the others deltas."""
    if len(links) == 1:
        return links[0]
    last, slots = links[-1], next((link.meta["slots"] for link in links if link.meta["slots"]), [])
    parts: list[dict[str, np.ndarray]] = []
    later = _NONE  # keys that the checkpoints behind have touched; so the rows of each are copied once
    for link in reversed(links):
        given = link.snapshot()
        parts.append(_columns(given, dict(slots), ~among(_words(given.rows.keys), later)))
        if link is not links[0]:
            later = np.union1d(later, _touched(link))
    counts: dict[str, np.ndarray] = {}
    for link in links:
        counts.pop("sketch", None)  # of which a delta has all
        of_all = link.meta.get("delta", {}).get("counts_of_all", True)
        counts = overlaid_counts(counts, link.arrays, _NONE if of_all else _touched(link), of_all)
    rows = concat(parts[::-1])
    meta = {name: value for name, value in last.meta.items() if name != "delta"}
    meta |= {"rows": len(rows["keys"]), "slots": slots}
    return Stored(meta, rows | counts | {name: array for name, array in last.arrays.items() if name == POOL})


def _touched(link: Stored) -> np.ndarray:
    return np.union1d(_words(link.arrays["keys"]), link.arrays.get(REMOVED, _NONE))


def _columns(given: Snapshot, slots: dict[str, str], keep: Any = slice(None)) -> dict[str, np.ndarray]:
    columns = take(given.rows.columns(), keep)
    n = len(columns["keys"])
    for name, text in slots.items():
        dtype, shape = parse_type(text)
        columns.setdefault(slot_column(name), np.zeros((n, *shape), dtype))
    return columns


def overlaid_counts(below: Columns, above: Columns, known: np.ndarray, counts_of_all: bool) -> dict[str, np.ndarray]:
    """What is counted of keys without a row, by the names of `ADMISSION_COLUMNS`.

    Args:
      below: counts.
      above: counts, of which a sketch takes the place of the other.
      known: keys ``(m,)`` int64, sorted, of which `above` has the counts if there are any.
      counts_of_all: whether it has those of all keys.
    """
    old, new = ({name: part.get(name, _NONE) for name in WAITING_COLUMNS} for part in (below, above))
    if counts_of_all:
        old = {name: _NONE for name in WAITING_COLUMNS}
    again = np.unique(np.concatenate([known, new["pending_keys"]]))
    waiting = concat([take(old, ~among(old["pending_keys"], again)), new])
    out = waiting if len(waiting["pending_keys"]) else {}
    cells = [part["sketch"] for part in (below, above) if len(part.get("sketch", _NONE))]
    return out | ({"sketch": cells[-1]} if cells else {})


def only(arrays: dict[str, np.ndarray], wanted: Any) -> dict[str, np.ndarray]:
    """Of the arrays of a table what belongs to some keys: their rows, and what is counted of those that wait."""
    keys = np.unique(np.asarray(as_keys(wanted, "restore(keys=)")).reshape(-1).view(np.int64))
    of_rows = {name: array for name, array in arrays.items() if name not in (*ADMISSION_COLUMNS, POOL, REMOVED)}
    out = arrays | take(of_rows, among(_words(arrays["keys"]), keys))
    if "pending_keys" in arrays:
        waiting = {name: arrays[name] for name in WAITING_COLUMNS}
        out |= take(waiting, among(arrays["pending_keys"], keys))
    return out


def converted(values: np.ndarray, keys: np.ndarray, dtype: str, table: str) -> np.ndarray:
    """Values ``(n, dim)`` in another dtype.

    Raises:
      ValueError: one is too large for it.
    """
    with np.errstate(over="ignore"):  # which is found below
        out = values.astype(np.float32).astype(jnp.dtype(dtype))
    lost = np.flatnonzero((np.isinf(out.astype(np.float32)) & ~np.isinf(values.astype(np.float32))).any(axis=1))
    if len(lost):
        raise ValueError(
            f"kvjax: table {table!r}, restore: want values that {dtype} can hold, got larger ones in {len(lost)} rows, "
            f"for instance of key {keys[lost[0]]}; give a dtype with a larger range, such as bfloat16"
        )
    return out


def _words(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys).view(np.int64)


def among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which keys ``(n,)`` are among those known ``(m,)``, which are sorted."""
    if len(known) == 0:
        return np.zeros(len(keys), bool)
    at = np.searchsorted(known, keys)
    return known[np.minimum(at, len(known) - 1)] == keys
