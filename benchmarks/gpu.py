"""Tables on a GPU: keys a second beside what its memory allows, and a training step beside one on static tables.

    python benchmarks/gpu.py [--json PATH]      # wants a GPU with 80 GB of memory
    python benchmarks/gpu.py --smoke            # tiny, on whatever there is: only to see that it runs
    python benchmarks/gpu.py --show PATH        # figures that were written before

**Calls** of 2**20 keys each, on a table that fills its index of 2**25 cells to half or three quarters (and once one of
2**27, whose index no cache holds). Their keys are

* known: distinct, and all in the table, another of eight batches each time;
* missing: as many that are not;
* zipf: those that the table holds, as often as 1 / rank, so with many duplicates;
* tenth new: known but for a tenth, which no call has had before;
* full: the same at `max_capacity`, so that as many rows are evicted.

Times are of calls that are queued some at a time and waited for ("wall"), and of as many calls in one program
("inside"), where the host has no part. "bytes" are those that a perfect kernel moves for a key: the row that is read
and written; for apply the value and its slot, read and written, and the gradient, read. "ratio" is the time inside a
program per time of a device-to-device copy of as many bytes, measured beside it. Gradients are arguments, and random.

**Step**: 10 tables of dim 128, 65,536 samples with a key each, Adam, and little else: the features' inner products
and a small dense net. Beside it the same on static arrays that hold the rows of all ids: a gather, and optax's Adam on
the touched rows alone, where gradients of equal ids are added up by `jnp.unique`, or without it by a scatter to the
first place of each id. All count Adam's steps for a table and not for a row, so that they train the same, which
`tests/project/test_benchmarks.py` checks.

**Tiers**: finding 2**20 keys of a table in `kvjax.storage.Hybrid` that keeps a quarter of its rows on the GPU:
keys that it was trained with, whose rows are there, and keys whose rows are in pinned host memory.

**Deltas**: what has changed in a table of 8 times 2**20 rows of which a hundredth was trained since a cursor, found by
reading all rows on the GPU, and copied to the host; putting a cursor; and beside them a copy of the whole table.

Medians; whatever is compared is run in turns in one process. A case that fails is an error in the figures, and the next
one runs. Besides, `--only kernels` makes a few calls of each kind, for a profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the rest is the tables'

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import in_turns, zipf
from gpu_sizes import SMOKE, Size, filled
from gpu_step import DIM, TABLES, measure_step
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax
from kvjax._table.changes import changes_since, close_cursor, open_cursor


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls to measure; goal: billions of keys a second on an H200, or below 0 the highest ratio."""

    call: str
    dim: int
    keys: str = "known"
    load: float = 0.5
    goal: float | None = None
    beyond_cache: bool = False

    @property
    def bytes(self) -> int:
        """What a perfect kernel moves for a key."""
        return 4 * self.dim * (5 if self.call == "apply" else 2)


FIND, INSERT, APPLY = "lookup", "lookup_or_insert", "apply"
CASES = [
    *(Case(FIND, dim, load=load, goal=goal) for dim, goal in ((8, 5.0), (32, 4.0), (64, 3.0)) for load in (0.5, 0.75)),
    Case(FIND, 8, beyond_cache=True),
    Case(FIND, 32, "missing"),
    Case(FIND, 32, "zipf"),
    Case(INSERT, 32, load=0.5, goal=2.5),
    Case(INSERT, 32, load=0.75, goal=2.5),
    Case(INSERT, 32, "zipf"),
    Case(INSERT, 32, "tenth new", goal=1.2),
    Case(INSERT, 32, "full"),
    Case(APPLY, 64, load=0.5, goal=-1.5),
    Case(APPLY, 64, load=0.75, goal=-1.5),
    Case(APPLY, 64, "zipf"),
]
CASES.sort(key=lambda case: case.goal is None)  # those with goals first, if there is no time for all
STEP_GOALS = {"unique": 1.0, "best": 1.3}  # the highest ratios to the static steps


# ---- calls on one table --------------------------------------------------------------------------------------------


def batches_of(case: Case, rows: int, size: Size) -> jax.Array:
    """Some batches of keys: words ``(batches, batch, 2)``."""
    rng, n = np.random.default_rng(0), size.batch
    if case.keys == "zipf":
        ids = zipf(rng, rows, (8, n), 1.0)
    else:
        count = min(8, rows // n)
        ids = rng.permutation(rows)[: count * n].reshape(count, n)
    if case.keys == "missing":
        ids += rows
    return jnp.asarray(kvjax.keys(kvjax.hash_keys(ids.reshape(-1))).words).reshape(*ids.shape, 2)


def measure_calls(case: Case, size: Size) -> dict[str, Any]:
    rows = int(case.load * (size.most_cells if case.beyond_cache else size.cells))
    grows = case.keys in ("tenth new", "full")
    options = {"max_capacity": rows} if case.keys == "full" else {}
    table = filled("gpu", case.dim, rows, size.batch, **options)
    words = batches_of(case, rows, size)
    grads = jax.random.normal(jax.random.key(0), (size.batch, case.dim))
    new = size.batch // 10
    if grows:
        size = dataclasses.replace(size, turns=min(size.turns, 4))  # a table that gets ever larger is another table
    tx = optax.adagrad(0.1)

    def keys_of(words: jax.Array, number: jax.Array) -> kvjax.Keys:
        """Those of a call, by its number."""
        some = words[number % len(words)]
        if grows:
            fresh = (number * new + jnp.arange(new)).astype(jnp.uint32)
            some = some.at[:new].set(jnp.stack([fresh, jnp.full(new, 0x7777, jnp.uint32)], 1))
        return kvjax.Keys(some)

    def call(table: kvjax.Table, keys: kvjax.Keys, grads: jax.Array) -> tuple[kvjax.Table, jax.Array]:
        """The next handle, and something of the result."""
        if case.call == FIND:
            return table, table.lookup(keys)[0, 0]
        if case.call == INSERT:
            out, table = table.lookup_or_insert(keys)
            return table, out[0, 0]
        return table.apply(tx, kvjax.SparseRows(keys, grads))[0], grads[0, 0]

    @jax.jit
    def once(table: kvjax.Table, words: jax.Array, grads: jax.Array, number: jax.Array) -> Any:
        return call(table, keys_of(words, number), grads)

    @jax.jit
    def many(table: kvjax.Table, words: jax.Array, grads: jax.Array, number: jax.Array) -> Any:
        def body(i: jax.Array, carried: Any) -> Any:
            table, out = call(carried[0], keys_of(words, number + i), grads)
            return table, carried[1] + out

        return jax.lax.fori_loop(0, size.queued, body, (table, jnp.zeros(())))

    calls = 0

    def way(program: Callable[..., Any], each: int) -> Callable[[int], Any]:
        def run(_: int) -> Any:
            nonlocal table, calls
            number = jnp.asarray(calls, jnp.int32)
            calls += each
            table, out = program(table, words, grads, number)
            return table, out

        return run

    memory, copy = jnp.ones(size.copied // 4), jax.jit(jnp.copy)
    wall = in_turns({"call": way(once, 1), "copy": lambda _: copy(memory)}, size.turns, queued=size.queued)
    inside = in_turns({"program": way(many, size.queued)}, size.turns)["program"] / size.queued
    bandwidth = 2 * size.copied / wall["copy"]
    load = table.stats().load
    kvjax.drop_table(table.name)
    return {
        **dataclasses.asdict(case), "bytes": case.bytes, "load": load, "wall_seconds": wall["call"], "seconds": inside,
        "billion_keys_per_second": size.batch / inside / 1e9, "ratio": inside * bandwidth / (case.bytes * size.batch),
        "copy_bytes_per_second": bandwidth,
    }  # fmt: skip


# ---- for a profiler ------------------------------------------------------------------------------------------------


def call_kernels(size: Size) -> dict[str, Any]:
    """Calls whose third kernel of each kind is one of a table that is in use: the rows come in one call."""
    dim, rows, new = 64, 4 * size.batch, size.batch // 10
    table = filled("kernels", dim, rows, rows)
    grads, tx, calls = jax.random.normal(jax.random.key(0), (size.batch, dim)), optax.adagrad(0.1), 4
    lookup = jax.jit(lambda table, keys: table.lookup(keys))
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys))
    apply = jax.jit(lambda table, keys, grads: table.apply(tx, kvjax.SparseRows(keys, grads))[0])
    for call in range(calls):
        known = np.random.default_rng(call).permutation(rows)[: size.batch]
        some = known.copy()
        some[:new] = rows + call * new + np.arange(new)
        jax.block_until_ready(lookup(table, kvjax.keys(kvjax.hash_keys(known))))
        _, table = jax.block_until_ready(insert(table, kvjax.keys(kvjax.hash_keys(some))))
        table = jax.block_until_ready(apply(table, kvjax.keys(kvjax.hash_keys(known)), grads))
    kvjax.drop_table(table.name)
    return {"calls_of_each": calls}


# ---- rows in two memories ------------------------------------------------------------------------------------------


def measure_tiers(size: Size) -> dict[str, Any]:
    dim, rows = 64, 8 * size.batch
    storage = kvjax.storage.Hybrid(rows * 4 * dim // 4) if kvjax.ffi.on_device() else None
    table = filled("tiers", dim, rows, size.batch, storage=storage)
    # The first rows to come are on the GPU, and some of those have to go for the hot ones.
    begins = {"hot": rows - size.batch, "cold": rows // 2}
    keys = {name: kvjax.keys(kvjax.hash_keys(np.arange(i, i + size.batch))) for name, i in begins.items()}
    grads, tx = jax.random.normal(jax.random.key(0), (size.batch, dim)), optax.sgd(1e-3)
    apply = jax.jit(lambda table, keys, grads: table.apply(tx, kvjax.SparseRows(keys, grads))[0])
    for _ in range(2 * rows // size.batch):  # as many keys as there are rows, and once more
        table = apply(table, keys["hot"], grads)
    lookup = jax.jit(lambda table, keys: table.lookup(keys))
    ways = {name: lambda _, k=k: lookup(table, k) for name, k in keys.items()}
    seconds = in_turns(ways, size.turns, queued=size.queued)
    kvjax.drop_table(table.name)
    return {
        "hot_seconds": seconds["hot"],
        "cold_seconds": seconds["cold"],
        "ratio": seconds["cold"] / seconds["hot"],
        "cold_bytes_per_second": size.batch * 4 * dim / seconds["cold"],
    }


# ---- what has changed ---------------------------------------------------------------------------------------------


def measure_deltas(size: Size) -> dict[str, Any]:
    dim, rows, tx = 64, 8 * size.batch, optax.adagrad(0.1)
    table = filled("deltas", dim, rows, size.batch)
    few = kvjax.keys(kvjax.hash_keys(np.arange(0, rows, 100)))
    apply = jax.jit(lambda table, keys, grads: table.apply(tx, kvjax.SparseRows(keys, grads))[0])
    grads = jax.random.normal(jax.random.key(0), (len(few), dim))
    table = apply(table, few, grads)
    mark = open_cursor(table)
    table = jax.block_until_ready(apply(table, few, grads))

    def cursor(_: int) -> None:
        close_cursor(table, open_cursor(table))

    ways = {"cursor": cursor, "delta": lambda _: changes_since(table, mark), "whole": lambda _: table.snapshot()}
    seconds = in_turns(ways, size.turns)
    changes = changes_since(table, mark)
    assert changes is not None and len(changes.rows.rows) == len(few)
    close_cursor(table, mark)
    kvjax.drop_table(table.name)
    return {f"{name}_seconds": of for name, of in seconds.items()} | {"rows": rows, "changed": len(few)}


# ---- the report ----------------------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(f"{report['device']}, jax {report['jax']}, {report['date']}")
    for figures in (*report.get("calls", ()), *(report.get(part, {}) for part in PARTS)):
        if error := figures.get("error"):
            what = ", ".join(f"{name} {figures[name]}" for name in ("call", "keys", "dim", "load") if name in figures)
            console.print(f"failed: {what or 'a part'}: {error[:300]}", markup=False)
    if calls := [c for c in report.get("calls", ()) if "error" not in c]:
        table = Table("call", "keys", "dim", "load", "wall ms", "inside ms", "G keys/s", "bytes", "ratio", "goal")
        for c in calls:
            goal = "" if c["goal"] is None else f">= {c['goal']} G" if c["goal"] > 0 else f"ratio <= {-c['goal']}"
            table.add_row(
                c["call"], c["keys"] + (", 2^27" if c["beyond_cache"] else ""), str(c["dim"]), f"{c['load']:.2f}",
                f"{c['wall_seconds'] * 1e3:.3f}", f"{c['seconds'] * 1e3:.3f}", f"{c['billion_keys_per_second']:.2f}",
                str(c["bytes"]), f"{c['ratio']:.2f}", goal,
            )  # fmt: skip
        bandwidth = float(np.median([c["copy_bytes_per_second"] for c in calls]))
        console.print(table, f"copy: {bandwidth / 1e9:.1f} GB/s, read and written")
    if "seconds" in (s := report.get("step", {})):
        table = Table("kvjax, ms", "static with unique", "without", "to unique", "to the best", "goals",
                      title=f"step of {TABLES} tables of dim {DIM}, adam")  # fmt: skip
        times = (f"{s[name] * 1e3:.3f}" for name in ("seconds", "static_unique_seconds", "static_seconds"))
        ratios = (f"{s['ratio_to_unique']:.2f}", f"{s['ratio_to_best']:.2f}")
        table.add_row(*times, *ratios, f"<= {STEP_GOALS['unique']} and {STEP_GOALS['best']}")
        console.print(table)
    if "ratio" in (t := report.get("tiers", {})):
        table = Table("rows on the GPU, ms", "in host memory, ms", "ratio", "GB/s from there", title="find of dim 64")
        table.add_row(
            f"{t['hot_seconds'] * 1e3:.3f}", f"{t['cold_seconds'] * 1e3:.3f}", f"{t['ratio']:.2f}",
            f"{t['cold_bytes_per_second'] / 1e9:.1f}",
        )  # fmt: skip
        console.print(table)
    if "delta_seconds" in (d := report.get("deltas", {})):
        table = Table("a delta, ms", "a cursor, ms", "all rows, ms",
                      title=f"{d['changed']} of {d['rows']} rows of dim 64 have changed")  # fmt: skip
        table.add_row(*(f"{d[f'{name}_seconds'] * 1e3:.3f}" for name in ("delta", "cursor", "whole")))
        console.print(table)


def check_there_is_a_gpu() -> None:
    state = kvjax.backends()["cuda"]
    if jax.default_backend() != "gpu" or state != "loaded":
        sys.exit(
            "benchmarks/gpu.py measures tables on a GPU. Here JAX runs programs on "
            f"{jax.default_backend()!r}, and kvjax.backends()['cuda'] is {state!r}: see docs/cuda.md. "
            "--smoke runs it in tiny sizes anywhere."
        )


PARTS: dict[str, Callable[[Size], dict[str, Any]]] = {
    "step": measure_step,
    "tiers": measure_tiers,
    "deltas": measure_deltas,
}


def tried(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Figures, or why there are none; then its tables are no others' burden."""
    try:
        return measure(*args)
    except Exception as error:
        traceback.print_exc()
        for name in kvjax.tables():
            with contextlib.suppress(Exception):  # a device that has failed
                kvjax.drop_table(name)
        return {"error": f"{type(error).__name__}: {error}"}


def measure_all(parts: list[str], size: Size, report: dict[str, Any], save: Callable[[], None]) -> bool:
    """Adds the figures of the parts to a report, which is saved after each; whether there are all."""
    for part in parts:
        if part == "calls":
            report[part] = []
            for case in track(CASES, part):
                report[part].append(dataclasses.asdict(case) | tried(measure_calls, case, size))
                save()
        else:
            report[part] = tried(PARTS[part], size)
            save()
    return not any(
        "error" in figures for part in parts for figures in (report[part] if part == "calls" else [report[part]])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any backend; the times mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures, each as soon as it is there")
    parser.add_argument("--show", type=Path, metavar="PATH", help="only show figures that have been written")
    parser.add_argument("--only", choices=["calls", *PARTS, "kernels"], help="one part")
    parser.add_argument("--turns", type=int, help="how often, instead of as often as it takes")
    args = parser.parse_args()
    if args.show:
        return show(json.loads(args.show.read_text()))
    if not args.smoke:
        check_there_is_a_gpu()
    size = SMOKE if args.smoke else Size()
    if args.turns:
        size = dataclasses.replace(size, turns=args.turns)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "size": dataclasses.asdict(size),
    }
    if args.only == "kernels":
        return print(call_kernels(size))

    def save() -> None:  # a run that is stopped leaves what it has
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")

    complete = measure_all([args.only] if args.only else ["calls", *PARTS], size, report, save)
    show(report)
    if not complete:
        sys.exit("benchmarks/gpu.py: some figures are missing; the errors are above.")


if __name__ == "__main__":
    main()
