"""What the parts of `gpu.py` share: sizes, and tables that are filled."""

from __future__ import annotations

import dataclasses
from typing import Any

import common

import kvjax


@dataclasses.dataclass(frozen=True)
class Size:
    cells: int = 2**25  # of the index, so that three quarters leave it space for the calls under way
    most_cells: int = 2**27
    batch: int = 2**20  # keys a call
    copied: int = 2**30  # bytes
    rows: int = 2**20  # of each table of the step
    samples: int = 2**16
    turns: int = 15
    queued: int = 8  # calls before they are waited for, and in one program


SMOKE = Size(cells=2**12, most_cells=2**13, batch=2**8, copied=2**16, rows=2**9, samples=2**6, turns=2, queued=2)


def filled(name: str, dim: int, rows: int, batch: int, **options: Any) -> kvjax.Table:
    """A table of the ids 0 .. rows - 1, its index made for just as many."""
    table = kvjax.get_table(name, dim=dim, initializer=kvjax.initializers.normal(1.0), **options).reserve(rows)
    return common.filled(table, rows, batch)
