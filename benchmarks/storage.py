"""Storages side by side: lookup and apply on a million rows of dim 64, all tables in turns in one process.

    python benchmarks/storage.py [--rows N] [--dim D] [--folder F]     # F: where the file lies, by default here
    python benchmarks/storage.py --cold 0.1    # before each call, a tenth of the file is put out of memory

"Host, 4 KiB" is the host's memory without huge pages.
Milliseconds a call of 65,536 uniform keys, medians; `filling` is seconds for the rows from nothing, and MiB is what the
process grew by meanwhile, of which the file's share is page cache that the system may take back.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import kvjax

BATCH, TURNS, SLAB, MADV_PAGEOUT = 65_536, 40, 2 << 20, 21


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def put_out(folder: str, share: float, rng: np.random.Generator) -> None:
    """Writes the files that this process has mapped in a folder to the disk, and frees the pages of some slabs."""
    for fd in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", fd)
        if path.is_symlink() and os.readlink(path).startswith(folder):
            os.fsync(int(fd))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if folder not in line:
            continue
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        for slab in range(start, end, SLAB):
            if rng.random() < share:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(slab), ctypes.c_size_t(SLAB), MADV_PAGEOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--cold", type=float, default=0.0)
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
    for turn in range(6 if args.cold else TURNS):
        keys = jax.block_until_ready(kvjax.keys(kvjax.hash_keys(rng.integers(0, args.rows, BATCH))))
        for storage, call in seconds:
            table = kvjax.get_table(storage)
            if args.cold and storage == "Mmap":
                put_out(os.path.abspath(args.folder) + "/kvjax-", args.cold, rng)
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
