"""Storages side by side: lookup and apply on a million rows of dim 64, all tables in turns in one process.

    python benchmarks/storage.py [--rows N] [--dim D] [--folder F]     # F: where the file lies, by default here

"Host, 4 KiB" is the host's memory without huge pages.
Milliseconds a call of 65,536 uniform keys, medians; `filling` is seconds for the rows from nothing, and MiB is what the
process grew by meanwhile, of which the file's share is page cache that the system may take back.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import kvjax

BATCH, TURNS = 65_536, 40


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    storages = {
        "Host, 4 KiB": kvjax.storage.Host(huge_pages=False),
        "Host": kvjax.storage.Host(),
        "Mmap": kvjax.storage.Mmap(args.folder),
    }
    grads = jnp.ones((BATCH, args.dim))
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
    calls = {"lookup": jax.jit(lambda table, keys: table.lookup(keys))}
    for name, tx in (("sgd", optax.sgd(0.1)), ("adam", optax.adam(1e-3))):
        calls[f"apply, {name}"] = jax.jit(lambda t, keys, tx=tx: t.apply(tx, kvjax.SparseRows(keys, grads))[0])
    report = Table("storage", "filling, s", "MiB", *calls, title="milliseconds a call")
    filling, mebibytes = {}, {}
    for name, storage in storages.items():
        table = kvjax.get_table(name, dim=args.dim, storage=storage)
        jax.block_until_ready(insert.lower(table, kvjax.keys(np.arange(BATCH))).compile())
        before, began = resident(), time.perf_counter()
        for start in range(0, args.rows, BATCH):
            table = insert(table, kvjax.keys(kvjax.hash_keys(np.arange(start, min(args.rows, start + BATCH)))))
        jax.block_until_ready(table)
        filling[name], mebibytes[name] = time.perf_counter() - began, resident() - before
    rng = np.random.default_rng(0)
    seconds = {(storage, call): [] for storage in storages for call in calls}
    for turn in range(TURNS):
        keys = jax.block_until_ready(kvjax.keys(kvjax.hash_keys(rng.integers(0, args.rows, BATCH))))
        for storage, call in seconds:
            table = kvjax.get_table(storage)
            began = time.perf_counter()
            jax.block_until_ready(calls[call](table, keys))
            if turn > 2:  # the first turns compile and make the slots
                seconds[storage, call].append(time.perf_counter() - began)
    for name in storages:
        medians = (f"{np.median(seconds[name, call]) * 1e3:.1f}" for call in calls)
        report.add_row(name, f"{filling[name]:.2f}", f"{mebibytes[name]:.0f}", *medians)
    Console().print(report)


if __name__ == "__main__":
    main()
