"""Overlays: rows of a delta over those that it builds on, and of a checkpoint over those of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.source import Source, Type
from kvjax._table.loads import Loading
from kvjax._values.snapshot import WAITING_COLUMNS, Columns, Snapshot, column_types, concat, take
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


def merged(below: Snapshot, above: Loading) -> Loading:
    """Contents over those of a table: of a key that is in both, the row of `above`, of which pieces are in memory.

    Args:
      below: of a table.
      above: of the same table, or another of its dim and dtype.

    Raises:
      ValueError: both have slots, but not the same.
    """
    slots = below.slot_types or above.slot_types
    if above.slot_types and dict(slots) != dict(above.slot_types):
        raise ValueError(f"kvjax: restore: want rows with the slots {slots}, got {above.slot_types}; slots=False")
    keys = np.sort(np.concatenate([_NONE, *map(words, above.rows.pieces("keys"))]))
    columns = below.rows.columns()
    rest = Source.of(columns, {}).where(~among(words(columns["keys"]), keys))
    rows = _one_after_the_other(above.rows, rest)
    counts = overlaid_counts([(below.admission, None), (above.admission, keys)])
    admission = {name: array[:0] for name, array in above.admission.items()} | counts
    return Loading(rows, max(below.rows.last_step, above.last_step), dict(slots), admission)


def _one_after_the_other(one: Source, other: Source) -> Source:
    """The rows of both. What one lacks of the other's columns is zeros."""
    types = one.types | other.types

    def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        parts: list[dict[str, np.ndarray]] = []
        for source, begin in ((one, 0), (other, one.num_rows)):
            low, high = max(start - begin, 0), min(stop - begin, source.num_rows)
            if low < high:
                found = source.read([name for name in names if name in source.types], low, high)
                parts.append(
                    {name: found[name] if name in found else _zeros(types[name], high - low) for name in names}
                )
        return concat(parts) if parts else {name: _zeros(types[name], 0) for name in names}

    return Source(types, one.num_rows + other.num_rows, read, {})


def _zeros(kind: Type, n: int) -> np.ndarray:
    return np.zeros((n, *kind[1]), kind[0])


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
