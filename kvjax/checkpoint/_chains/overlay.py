"""Overlays: rows of a delta over those that it builds on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.source import Type
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import NONE, among
from kvjax._values.snapshot import Columns, column_types, concat, take
from kvjax.checkpoint._disk.format import REMOVED


def overlaid(parts: Sequence[Columns], types: Mapping[str, Type]) -> dict[str, np.ndarray]:
    """Rows over rows, in no order: of each key that of the last part that has touched it, if that has one.

    Args:
      parts: columns of rows, those below first; where keys went, their "removed" ``(m,)`` int64.
      types: of the columns to give. What a part lacks of them is zeros.
    """
    out: list[dict[str, np.ndarray]] = []
    later = NONE  # keys that the parts above have touched; so the rows of each are copied once
    for i, part in reversed(list(enumerate(parts))):
        n = len(part["keys"])
        rows = {
            name: part[name] if name in part else np.zeros((n, *shape), dtype) for name, (dtype, shape) in types.items()
        }
        out.append(take(rows, ~among(as_int64(part["keys"]), later)) if len(later) else rows)
        if i > 0:
            later = np.union1d(later, touched(part))
    return concat(out[::-1])


def meta_of(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a table is at the last checkpoint of a chain, all but the number of its rows."""
    slots = next((meta["slots"] for meta in metas if meta["slots"]), [])
    return {name: value for name, value in metas[-1].items() if name not in ("delta", "rows")} | {"slots": slots}


def types_of(meta: Mapping[str, Any]) -> dict[str, Type]:
    """Dtype and shape of what a row has in each column."""
    return column_types(meta["dim"], np.dtype(meta["dtype"]), meta["key_dtype"], dict(meta["slots"]))


def touched(part: Columns) -> np.ndarray:
    """Which keys are not as below a part, sorted: those that it has, and those that it says went."""
    return np.union1d(as_int64(part["keys"]), part.get(REMOVED, NONE))


def counts_of(
    meta: Mapping[str, Any], counts: Columns, rows: Callable[[], Columns]
) -> tuple[Columns, np.ndarray | None]:
    """A part of `overlaid_counts`: what one checkpoint of a chain has, of a sketch always all."""
    of_all = meta.get("delta", {}).get("counts_of_all", True)
    return {"sketch": NONE, **counts}, None if of_all else touched(rows())
