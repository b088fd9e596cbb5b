"""Deltas: what a cursor costs a training step, and deltas of some rows beside a save of all.

    python benchmarks/deltas.py [--rows N] [--dim D] [--batch B] [--chain N]

In processor time, which a busy machine changes least; steps of two tables, of which one has a cursor, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax
from kvjax.checkpoint import compact, restore, save

TX = optax.adagrad(0.1)
TURNS = 12


def seconds(call: Callable[[], Any]) -> float:
    begin = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - begin


def filled(name: str, rows: int, dim: int) -> kvjax.Table:
    table = kvjax.get_table(name, dim=dim, capacity=rows)
    for start in range(0, rows, 250_000):
        keys = np.arange(start, min(start + 250_000, rows))
        table = table.upsert(keys, np.ones((len(keys), dim), np.float32))
    return table


@jax.jit
def step(table: kvjax.Table, keys: kvjax.Keys, gradients: jax.Array) -> kvjax.Table:
    return table.apply(TX, kvjax.SparseRows(keys, gradients))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 1_000_000), ("dim", 64), ("batch", 50_000), ("chain", 240)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng, gradients = np.random.default_rng(0), jnp.ones((args.batch, args.dim))
    tables = {name: filled(name, args.rows, args.dim) for name in ("without", "with")}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        for turn in range(TURNS + 1):
            if turn == 1:  # all is compiled, and rows have slots
                full = seconds(lambda: save(folder / "base", {"t": tables["with"]}, cursor="c"))
                times: dict[str, list[float]] = {name: [] for name in tables}
            keys = kvjax.keys(rng.integers(0, args.rows, args.batch))
            for name in tables:
                begin = time.process_time()
                tables[name] = step(tables[name], keys, gradients)
                tables[name].version.block_until_ready()
                if turn:
                    times[name].append(time.process_time() - begin)
        print("step, ms:", {name: round(1e3 * statistics.median(of), 2) for name, of in times.items()})
        table = tables["with"]
        save(folder / "steps", {"t": table}, since="c")
        print(f"save of {args.rows} rows: {full:.3f} s, {size(folder / 'base') / 1e6:.1f} MB")
        for rows in (args.rows // 1000, args.rows // 100, args.rows // 10):
            table = table.upsert(np.arange(rows), np.zeros((rows, args.dim), np.float32)).remove(np.arange(rows // 10))
            path = folder / str(rows)
            took = seconds(lambda path=path, table=table: save(path, {"t": table}, since="c"))
            print(f"delta of {rows} rows: {took:.3f} s, {size(path) / 1e6:.1f} MB")
        print(f"restore of all: {seconds(lambda: restore(folder / 'base', {'t': table})['t'].version):.2f} s")
        print(f"of base and four deltas: {seconds(lambda: restore(path, {'t': table})['t'].version):.2f} s")
        print(f"compact: {seconds(lambda: compact(path, folder / 'whole')):.2f} s")
        small, took = filled("small", min(args.rows, 20_000), 8), []
        save(folder / "chain/0", {"t": small}, cursor="chain")
        for link in range(1, args.chain + 1):
            small = small.upsert(rng.integers(0, len(small), 256), np.ones((256, 8), np.float32))
            now, path = small, folder / f"chain/{link}"
            took.append(seconds(lambda now=now, path=path: save(path, {"t": now}, since="chain")))
        first, last = statistics.median(took[:10]), statistics.median(took[-10:])
        print(
            f"delta of 256 rows: {1e3 * first:.1f} ms as link 1 to 10, {1e3 * last:.1f} as the last ten of {len(took)}"
        )


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
