"""Checkpoints: saving and restoring one table, in processor time and by the clock, and what the digests take of it.

    python benchmarks/checkpoints.py [--rows N] [--dim D] [--folder F]     # F: where they lie, by default here

Medians of all turns but the first. To compare two versions of kvjax, run it with each in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvjax
from kvjax.checkpoint import _files

TURNS = 6


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, args.rows)
    rows = rng.normal(size=(args.rows, args.dim)).astype(np.float32)
    table = kvjax.get_table("t", dim=args.dim).upsert(keys, rows)
    handler, seconds = kvjax.orbax.TableHandler(), {"save": [], "restore": [], "digests": []}
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            saved = kvjax.orbax.TableSave({"t": table})
            seconds["save"].append(timed(lambda: handler.save(folder, saved)))  # noqa: B023
            wanted = kvjax.orbax.TableRestore({"t": table})
            seconds["restore"].append(timed(lambda: handler.restore(folder, wanted)))  # noqa: B023
            table = table.refresh()
            files = [path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()]
            seconds["digests"].append(timed(lambda: [_files.digest(data) for data in files]))  # noqa: B023
    for name, turns in seconds.items():
        cpu, wall = (1e3 * statistics.median(x) for x in zip(*turns[1:], strict=True))
        print(f"{name:8} {cpu:6.0f} ms of the processor, {wall:6.0f} ms by the clock")


if __name__ == "__main__":
    main()
