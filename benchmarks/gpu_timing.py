"""What the parts of `gpu.py` share: sizes, tables that are filled, and how calls are timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

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


def medians(ways: dict[str, Callable[[int], Any]], size: Size, queued: int | None = None) -> dict[str, float]:
    """Seconds a call of each of the ways, taken in turns; a way gets the number of its call."""
    queued = queued or size.queued
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(size.turns + 2):
        for name, way in ways.items():
            began, out = time.perf_counter(), None
            for number in range(queued):
                out = way(turn * queued + number)
            jax.block_until_ready(out)
            if turn >= 2:  # the first ones compile and make the slots
                seconds[name].append((time.perf_counter() - began) / queued)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def filled(name: str, dim: int, rows: int, batch: int, **options: Any) -> kvjax.Table:
    """A table of the ids 0 .. rows - 1, its index made for just as many."""
    table = kvjax.get_table(name, dim=dim, initializer=kvjax.initializers.normal(1.0), **options).reserve(rows)
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
    for start in range(0, rows, batch):
        table = insert(table, kvjax.keys(kvjax.hash_keys(np.arange(start, min(rows, start + batch)))))
    return jax.block_until_ready(table)
