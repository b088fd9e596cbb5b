"""Overlays: rows of a delta over those that it builds on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.source import Type
from kvjax._values.snapshot import WAITING_COLUMNS, Columns, column_types, concat, take
from kvjax.checkpoint._format import REMOVED

_NONE = np.zeros(0, np.int64)


def overlaid(parts: Sequence[Columns], types: Mapping[str, Type]) -> dict[str, np.ndarray]:
    """Rows over rows, in no order: of each key that of the last part that has touched it, if that has one.

    Args:
      parts: columns of rows, those below first; where keys went, their "removed" ``(m,)`` int64.
      types: of the columns to give. What a part lacks of them is zeros.
    """
    out: list[dict[str, np.ndarray]] = []
    later = _NONE  # keys that the parts above have touched; so the rows of each are copied once
    for i, part in reversed(list(enumerate(parts))):
        n = len(part["keys"])
        rows = {
            name: part[name] if name in part else np.zeros((n, *shape), dtype) for name, (dtype, shape) in types.items()
        }
        out.append(take(rows, ~among(words(part["keys"]), later)) if len(later) else rows)
        if i > 0:
            later = np.union1d(later, touched(part))
    return concat(out[::-1])


def overlaid_counts(parts: Iterable[tuple[Columns, np.ndarray | None]]) -> dict[str, np.ndarray]:
    """What is counted of keys without a row, by the names of `ADMISSION_COLUMNS`; in no order.

    Args:
      parts: counts, those below first, and the keys ``(m,)`` int64, sorted, of which they are; None for all. A sketch
        that a part names takes the place of that below.
    """
    waiting: list[dict[str, np.ndarray]] = [{name: _NONE for name in WAITING_COLUMNS}]
    sketch = _NONE
    for counts, known in parts:
        new = {name: counts.get(name, _NONE) for name in WAITING_COLUMNS}
        if known is None:
            waiting = [new]
        else:
            again = np.union1d(known, new["pending_keys"])
            waiting = [take(old, ~among(old["pending_keys"], again)) for old in waiting] + [new]
        sketch = counts.get("sketch", sketch)
    out = concat(waiting)
    return (out if len(out["pending_keys"]) else {}) | ({"sketch": sketch} if len(sketch) else {})


def meta_of(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a table is at the last checkpoint of a chain, all but the number of its rows."""
    slots = next((meta["slots"] for meta in metas if meta["slots"]), [])
    return {name: value for name, value in metas[-1].items() if name != "delta"} | {"slots": slots}


def types_of(meta: Mapping[str, Any]) -> dict[str, Type]:
    """Dtype and shape of what a row has in each column."""
    return column_types(meta["dim"], np.dtype(meta["dtype"]), meta["key_dtype"], dict(meta["slots"]))


def touched(part: Columns) -> np.ndarray:
    """Which keys are not as below a part, sorted: those that it has, and those that it says went."""
    return np.union1d(words(part["keys"]), part.get(REMOVED, _NONE))


def counts_of(
    meta: Mapping[str, Any], counts: Columns, rows: Callable[[], Columns]
) -> tuple[Columns, np.ndarray | None]:
    """A part of `overlaid_counts`: what one checkpoint of a chain has, of a sketch always all."""
    of_all = meta.get("delta", {}).get("counts_of_all", True)
    return {"sketch": _NONE, **counts}, None if of_all else touched(rows())


def words(keys: np.ndarray) -> np.ndarray:
    """Keys ``(n,)`` of 64 bits as int64."""
    return np.ascontiguousarray(keys).view(np.int64)


def among(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Which keys ``(n,)`` are among those known ``(m,)``, which are sorted."""
    if len(known) == 0:
        return np.zeros(len(keys), bool)
    at = np.searchsorted(known, keys)
    return known[np.minimum(at, len(known) - 1)] == keys
