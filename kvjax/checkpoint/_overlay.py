"""Overlays: rows of one snapshot over those of another, and what is chosen of a snapshot on its way into a table."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import as_keys
from kvjax._values.exported import Exported, slot_column
from kvjax._values.slot_layout import parse_type
from kvjax._values.snapshot import ADMISSION_COLUMNS, WAITING_COLUMNS, Snapshot, concat, take
from kvjax.checkpoint._format import POOL

_NONE = np.zeros(0, np.int64)


def overlay(below: Snapshot, above: Snapshot, removed: np.ndarray = _NONE, counts_of_all: bool = False) -> Snapshot:
    """The rows of two snapshots; of a key that is in both, that of `above`. They are in no order.

    Args:
      below: of a table.
      above: of the same table, or another of its dim and dtype.
      removed: keys ``(m,)`` int64 that have no row, and do not wait unless `above` says so.
      counts_of_all: whether no other key waits than those of `above`.

    Raises:
      ValueError: both have slots, but not the same.
    """
    slots = below.slot_types or above.slot_types
    if above.slot_types and dict(slots) != dict(above.slot_types):
        raise ValueError(f"kvjax: restore: want rows with the slots {slots}, got {above.slot_types}; slots=False")
    last_step = max(below.rows.last_step, above.rows.last_step)
    known = np.unique(np.concatenate([_words(above.rows.keys), removed]))
    parts = [_columns(below, slots, ~_among(_words(below.rows.keys), known)), _columns(above, slots)]
    rows = Exported.of_columns(concat(parts), last_step)
    return Snapshot(rows, _NONE, dict(slots), _admission(below, above, known, counts_of_all))


def _columns(given: Snapshot, slots: dict[str, str], keep: Any = slice(None)) -> dict[str, np.ndarray]:
    columns = take(given.rows.columns(), keep)
    n = len(columns["keys"])
    for name, text in slots.items():
        dtype, shape = parse_type(text)
        columns.setdefault(slot_column(name), np.zeros((n, *shape), dtype))
    return columns


def _admission(below: Snapshot, above: Snapshot, known: np.ndarray, counts_of_all: bool) -> dict[str, np.ndarray]:
    out = {}
    none: dict[str, np.ndarray] = {name: _NONE for name in WAITING_COLUMNS}
    old, new = ({name: part.admission.get(name, _NONE) for name in none} for part in (below, above))
    if counts_of_all:
        old = none
    again = np.unique(np.concatenate([known, new["pending_keys"]]))
    waiting = concat([take(old, ~_among(old["pending_keys"], again)), new])
    if len(waiting["pending_keys"]):
        out |= waiting
    cells = [part.admission["sketch"] for part in (below, above) if len(part.admission.get("sketch", _NONE))]
    if cells:
        out["sketch"] = cells[-1]
    return out


def only(arrays: dict[str, np.ndarray], wanted: Any) -> dict[str, np.ndarray]:
    """Of the arrays of a table what belongs to some keys: their rows, and what is counted of those that wait."""
    keys = np.unique(np.asarray(as_keys(wanted, "restore(keys=)")).reshape(-1).view(np.int64))
    of_rows = {name: array for name, array in arrays.items() if name not in (*ADMISSION_COLUMNS, POOL)}
    out = arrays | take(of_rows, _among(_words(arrays["keys"]), keys))
    if "pending_keys" in arrays:
        waiting = {name: arrays[name] for name in WAITING_COLUMNS}
        out |= take(waiting, _among(arrays["pending_keys"], keys))
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


def _among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which keys ``(n,)`` are among those known ``(m,)``, which are sorted."""
    if len(known) == 0:
        return np.zeros(len(keys), bool)
    at = np.searchsorted(known, keys)
    return known[np.minimum(at, len(known) - 1)] == keys
