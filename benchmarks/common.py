"""What benchmarks share: calls that take turns, keys by Zipf's law, tables that have rows, the memory of the process.

JAX is loaded by what needs it: some benchmarks first say how many devices there are, others measure without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import kvjax


def in_turns(
    ways: Mapping[str, Callable[[int], Any]], turns: int, *, first: int = 2, queued: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Seconds of a call of each of some ways, medians. They take turns, so that a busy machine slows all of them alike.

    Args:
      ways: each gets the number of its call; what it gives is waited for.
      turns: how many count.
      first: so many come before these, which compile and make slots.
      queued: so many calls are waited for together.
      before: is called before each, and does not count.
    """
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(first + turns):
        for name, way in ways.items():
            before()
            began, out = time.perf_counter(), None
            for number in range(queued):
                out = way(turn * queued + number)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - began) / queued)
    return {name: float(np.median(taken[first:])) for name, taken in seconds.items()}


def zipf(rng: np.random.Generator, n: int, shape: int | tuple[int, ...], exponent: float = 1.05) -> np.ndarray:
    """Numbers below n, as often as 1 / rank**exponent; which rank each has is always the same."""
    share = np.cumsum(1 / np.arange(1, n + 1) ** exponent)
    return np.random.default_rng(9).permutation(n)[np.searchsorted(share / share[-1], rng.random(shape))]


def filled(table: kvjax.Table, rows: int, batch: int = 65_536) -> kvjax.Table:
    """A table with the initial rows of the hashed ids 0 .. rows - 1."""
    import jax

    import kvjax

    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1], donate_argnums=0)
    for start in range(0, rows, batch):
        table = insert(table, kvjax.keys(kvjax.hash_keys(np.arange(start, min(rows, start + batch)))))
    return jax.block_until_ready(table)


def anonymous() -> int:
    """Bytes of this process's memory that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise OSError("no RssAnon")
