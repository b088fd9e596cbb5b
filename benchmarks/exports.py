"""Exports: all rows of a table, sorted, beside the least that it takes to read the same rows in that order.

    python benchmarks/exports.py [--rows N] [--dim D] [--turns T]

Each in turn, by the clock and in processor time (of all threads); the least and the median of all turns but the first.
"gather" is NumPy's, of float32 rows in random order, into an array that is there (kept) or is made for it (fresh), and
"copy" of the same rows in the order of memory: both of one thread, without keys, frequencies, versions and sorting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import kvjax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, args.rows)
    rows = rng.normal(size=(args.rows, args.dim)).astype(np.float32)
    table = kvjax.get_table("t", dim=args.dim).upsert(keys, rows)
    order, kept = rng.permutation(args.rows), np.empty_like(rows)
    calls: dict[str, Callable[[], object]] = {
        "export": table.export,
        "gather, fresh": lambda: np.take(rows, order, axis=0),
        "gather, kept": lambda: np.take(rows, order, axis=0, out=kept, mode="clip"),
        "copy, fresh": lambda: rows.copy(),
        "copy, kept": lambda: np.copyto(kept, rows),
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(args.turns):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            turns[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    for name, taken in turns.items():
        wall, cpu = zip(*taken[1:], strict=True)
        print(
            f"{name:14} {min(wall):7.1f} ms at least, {statistics.median(wall):7.1f} in the middle "
            f"({args.rows / statistics.median(wall) / 1e3:6.1f} million rows/s), {min(cpu):7.1f} of the processor"
        )


if __name__ == "__main__":
    main()
