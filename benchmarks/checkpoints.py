"""Checkpoints: saving, restoring and merging beside a plain copy of the same bytes, and the stages of the first two.

    python benchmarks/checkpoints.py [--rows N] [--dim D] [--adam] [--folder F]     # F: where they lie, by default here

Medians of all turns but the first, in processor time and by the clock. A save leaves nothing in the system's cache, so
the restore behind it reads the disk. A plain copy is what the machine can do: the files of the checkpoint, which are in
the cache by then, written to the same disk one after the other, each flushed. The last lines say what part of its
speed a save and a restore have. A merge is of the checkpoint and its copy. Behind "|" are the stages of a save and a
restore, measured by themselves. To compare two versions of kvjax, run it with each in turns.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax

import kvjax
from kvjax._formats.atomic import flush
from kvjax._table import loads
from kvjax.checkpoint._chains.catalog import write_manifest
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._tables.write import freeze, write

TURNS = 6


class Clock:
    """Seconds of the processor and of the clock of each stage, by its name."""

    def __init__(self) -> None:
        self.turns: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        self.turns[name].append((time.process_time() - cpu, time.perf_counter() - wall))
        return result

    def show(self, rows: int) -> None:
        for name, turns in self.turns.items():
            cpu, wall = (statistics.median(x) for x in zip(*turns[1:], strict=True))
            rate = f"{rows / wall / 1e6:8.2f} million rows/s"
            print(f"{name:20} {1e3 * cpu:6.0f} ms of the processor, {1e3 * wall:6.0f} ms by the clock, {rate}")
        copies = self.turns["plain copy"][1:]
        for name in ("save", "restore"):  # turn by turn, so that both of a ratio meet the same disk
            parts = [copy[1] / turn[1] for copy, turn in zip(copies, self.turns[name][1:], strict=True)]
            listed = ", ".join(f"{part:.2f}" for part in sorted(parts))
            print(f"{name}: {statistics.median(parts):.2f} of the speed of a plain copy (turns: {listed})")


def copy(folder: Path, to: Path) -> None:
    """Each file, flushed as a checkpoint's are."""
    shutil.copytree(folder, to)
    for path in to.rglob("*"):
        flush(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--adam", action="store_true", help="with the slots of Adam")
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, args.rows)
    rows = rng.normal(size=(args.rows, args.dim)).astype(np.float32)
    table = kvjax.get_table("t", dim=args.dim).upsert(keys, rows)
    if args.adam:
        for at in range(0, args.rows, 1 << 18):
            part = keys[at : at + (1 << 18)]
            table, _ = table.apply(optax.adam(0.1), kvjax.SparseRows(part, rows[at : at + (1 << 18)]))
    handler, clock = kvjax.orbax.TableHandler(), Clock()
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder, stages = Path(name) / "whole", Path(name) / "stages"
            saved, wanted = kvjax.orbax.TableSave({"t": table}), kvjax.orbax.TableRestore({"t": table})
            clock("save", lambda: handler.save(folder, saved))  # noqa: B023
            clock("restore", lambda: handler.restore(folder, wanted))  # noqa: B023
            clock("plain copy", lambda: copy(folder, Path(name) / "copy"))  # noqa: B023
            for rule in ("newest", "mean"):  # of two that have all keys in common
                both = [folder, Path(name) / "copy"]
                clock(f"merge, {rule}", lambda: kvjax.checkpoint.merge(both, Path(name) / rule, rule))  # noqa: B023
            table = table.refresh()
            stored = clock("| freeze", lambda: freeze("t", table, None, None))  # noqa: B023
            clock("| copy, write and flush", lambda: write(stages, [stored]))  # noqa: B023
            clock("| manifest", lambda: write_manifest(stages))  # noqa: B023
            source = ChainRows(Chain(stages), "t").source()
            clock("| read and check", lambda: sum(1 for _ in source.rows()))  # noqa: B023
            rows_of = loads.checked(table.spec, table.snapshot())
            load = clock("| fill a table", lambda: loads.prepare_load(table, lambda: rows_of))  # noqa: B023
            table = clock("| exchange", load)
    clock.show(args.rows)


if __name__ == "__main__":
    main()
