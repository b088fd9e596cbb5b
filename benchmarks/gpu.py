"""Tables on a GPU: keys a second beside what its memory allows, and a training step beside one on static tables.

    python benchmarks/gpu.py [--json PATH]      # wants a GPU with 40 GB of memory
    python benchmarks/gpu.py --smoke            # tiny, on whatever there is: only to see that it runs

**Calls**: 2**20 distinct keys that the table holds, at two loads of an index of 2**24 cells. "bytes" are those of a
key's row, read and written: into the result for reads; for apply in the table, with its slots. "ratio" is the time of
the call per time of a device-to-device copy of as many bytes, which is measured between the calls. Calls are queued
some at a time and then waited for, as in training.

**Step**: 10 tables of dim 128, 65,536 samples with a key each, Adam, and little else: the features' inner products
and a small dense net. Beside it the same on static arrays that hold the rows of all ids: a gather, and optax's Adam on
the touched rows alone, gradients of equal ids added up first. Both count Adam's steps for a table and not for a row, so
that they train the same, which `tests/project/test_benchmarks.py` checks.

**Tiers**: finding 2**20 keys of a table in `kvjax.storage.Hybrid` that keeps a quarter of its rows on the GPU:
keys that it was trained with, whose rows are there, and keys whose rows are in pinned host memory.

Medians; whatever is compared is run in turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the rest is the tables'

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax

TABLES, DIM = 10, 128  # of the step
LOADS = (0.5, 0.75)
# Goals on an H200: billions of keys a second, or the highest ratio.
FASTER = {("find", 8): 5.0, ("find", 32): 4.0, ("find", 64): 3.0, ("lookup_or_insert", 32): 2.5}
BELOW = {"apply": 1.5, "step": 1.3}


@dataclasses.dataclass(frozen=True)
class Size:
    cells: int = 2**24  # of the index
    batch: int = 2**20  # keys a call
    copied: int = 2**30  # bytes
    rows: int = 2**20  # of each table of the step
    samples: int = 2**16
    turns: int = 25
    queued: int = 10  # calls before they are waited for


SMOKE = Size(cells=2**12, batch=2**8, copied=2**16, rows=2**9, samples=2**6, turns=2, queued=2)


def medians(ways: dict[str, Callable[[int], Any]], size: Size) -> dict[str, float]:
    """Seconds a call of each of the ways, taken in turns; a way gets the number of its call."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(size.turns + 2):
        for name, way in ways.items():
            began, out = time.perf_counter(), None
            for number in range(size.queued):
                out = way(turn * size.queued + number)
            jax.block_until_ready(out)
            if turn >= 2:  # the first ones compile and make the slots
                seconds[name].append((time.perf_counter() - began) / size.queued)
    return {name: float(np.median(s)) for name, s in seconds.items()}


# ---- calls on one table --------------------------------------------------------------------------------------------


def filled(name: str, dim: int, rows: int, batch: int, **options: Any) -> kvjax.Table:
    """A table of the ids 0 .. rows - 1, its index made for just as many."""
    table = kvjax.get_table(name, dim=dim, initializer=kvjax.initializers.normal(1.0), **options).reserve(rows)
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
    for start in range(0, rows, batch):
        table = insert(table, kvjax.keys(kvjax.hash_keys(np.arange(start, min(rows, start + batch)))))
    return jax.block_until_ready(table)


def measure_calls(dim: int, load: float, size: Size) -> list[dict[str, Any]]:
    """Finding at this dim and load, and the write that there is a goal for, if any."""
    rows, tx = int(load * size.cells), optax.adagrad(0.1)
    table = filled(f"gpu{dim}", dim, rows, size.batch)
    chosen = np.random.default_rng(0).permutation(rows)
    batches = [chosen[i * size.batch : (i + 1) * size.batch] for i in range(min(8, rows // size.batch))]
    keys = jax.block_until_ready([kvjax.keys(kvjax.hash_keys(ids)) for ids in batches])
    memory, grads = jnp.ones(size.copied // 4), jnp.ones((size.batch, dim))

    copy, lookup = jax.jit(jnp.copy), jax.jit(lambda table, keys: table.lookup(keys))
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[::-1])
    apply = jax.jit(lambda table, keys: (table.apply(tx, kvjax.SparseRows(keys, grads))[0],))

    def read(number: int) -> Any:
        return lookup(table, keys[number % len(keys)])

    def write(step: Callable[..., Any], number: int) -> Any:
        nonlocal table
        table, *rest = step(table, keys[number % len(keys)])
        return table, rest

    ways: dict[str, Callable[[int], Any]] = {"copy": lambda _: copy(memory), "find": read}
    if dim == 32:
        ways["lookup_or_insert"] = functools.partial(write, insert)
    if dim == 64:
        ways["apply"] = functools.partial(write, apply)
    seconds = medians(ways, size)
    bandwidth = 2 * size.copied / seconds["copy"]
    got = table.stats().load
    kvjax.drop_table(table.name)
    report = []
    for name in ways:
        if name != "copy":
            moved = 2 * 4 * dim * (2 if name == "apply" else 1)
            report.append({
                "call": name, "dim": dim, "load": got, "seconds": seconds[name],
                "billion_keys_per_second": size.batch / seconds[name] / 1e9, "bytes": moved,
                "ratio": seconds[name] * bandwidth / (moved * size.batch), "copy_bytes_per_second": bandwidth,
            })  # fmt: skip
    return report


# ---- rows in two memories ------------------------------------------------------------------------------------------


def measure_tiers(size: Size) -> dict[str, Any]:
    dim, rows = 64, 8 * size.batch
    storage = kvjax.storage.Hybrid(rows * 4 * dim // 4) if kvjax.ffi.on_device() else None
    table = filled("tiers", dim, rows, size.batch, storage=storage)
    # The first rows to come are on the GPU, and some of those have to go for the hot ones.
    begins = {"hot": rows - size.batch, "cold": rows // 2}
    keys = {name: kvjax.keys(kvjax.hash_keys(np.arange(i, i + size.batch))) for name, i in begins.items()}
    grads, tx = jnp.ones((size.batch, dim)), optax.sgd(1e-3)
    apply = jax.jit(lambda table, keys: table.apply(tx, kvjax.SparseRows(keys, grads))[0])
    for _ in range(2 * rows // size.batch):  # as many keys as there are rows, and once more
        table = apply(table, keys["hot"])
    lookup = jax.jit(lambda table, keys: table.lookup(keys))
    seconds = medians({name: lambda _, k=k: lookup(table, k) for name, k in keys.items()}, size)
    kvjax.drop_table(table.name)
    return {
        "hot_seconds": seconds["hot"],
        "cold_seconds": seconds["cold"],
        "ratio": seconds["cold"] / seconds["hot"],
        "cold_bytes_per_second": size.batch * 4 * dim / seconds["cold"],
    }


# ---- a training step -----------------------------------------------------------------------------------------------

Params = dict[str, Any]


def dense_net(key: jax.Array) -> Params:
    pairs = TABLES * (TABLES - 1) // 2
    return {"hidden": jax.random.normal(key, (pairs, 64)) * 0.1, "out": jnp.zeros((64, 1))}


def loss_of(net: Params, rows: list[jax.Array], labels: jax.Array) -> jax.Array:
    features = jnp.stack(rows, 1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    above = np.triu_indices(TABLES, 1)
    logits = jax.nn.relu(products[:, *above] @ net["hidden"]) @ net["out"]
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()


def ours(size: Size, tx: optax.GradientTransformation) -> tuple[Callable[..., Any], Any]:
    """A step of ``((params, state), keys, labels)``, and what it begins with."""
    both = kvjax.optax.partition(dense=tx, tables=kvjax.optax.rowwise(tx, count="global"))

    def loss(params, keys, labels):
        return loss_of(params["net"], [t.lookup(k) for t, k in zip(params["tables"], keys, strict=True)], labels)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carried, keys, labels):
        params, state = carried
        value, grads = kvjax.value_and_grad(loss)(params, keys, labels)
        updates, state = both.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    tables = [filled(f"step{i}", DIM, size.rows, size.rows) for i in range(TABLES)]
    params = {"net": dense_net(jax.random.key(0)), "tables": tables}
    return step, (params, both.init(params))


def static(tables: list[jax.Array], tx: optax.GradientTransformation) -> tuple[Callable[..., Any], Any]:
    """The same of ``((params, state), ids, labels)``, where tables are arrays ``(rows, dim)``."""

    def touched(table, state, ids, grads):
        """The array and its state after a step on the rows of these ids alone."""
        unique, places = jnp.unique(ids, return_inverse=True, size=len(ids), fill_value=len(table))
        merged = jax.ops.segment_sum(grads, places, len(ids))
        by_row = jax.tree.map(lambda x: x.ndim == 2, state)
        some = jax.tree.map(lambda x, yes: x.at[unique].get(mode="clip") if yes else x, state, by_row)
        updates, some = tx.update(merged, some)

        def put(whole, part, yes):
            return whole.at[unique].set(part, mode="drop", unique_indices=True) if yes else part

        table = table.at[unique].add(updates, mode="drop", unique_indices=True)
        return table, jax.tree.map(put, state, some, by_row)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carried, ids, labels):
        params, state = carried
        rows = [table[i] for table, i in zip(params["tables"], ids, strict=True)]
        value, (net_grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(params["net"], rows, labels)
        updates, net_state = tx.update(net_grads, state["net"], params["net"])
        pairs = [touched(*each) for each in zip(params["tables"], state["tables"], ids, row_grads, strict=True)]
        params = {"net": optax.apply_updates(params["net"], updates), "tables": [table for table, _ in pairs]}
        return (params, {"net": net_state, "tables": [each for _, each in pairs]}), value

    params = {"net": dense_net(jax.random.key(0)), "tables": tables}
    return step, (params, {"net": tx.init(params["net"]), "tables": [tx.init(t) for t in tables]})


def rows_of(tables: list[kvjax.Table], size: Size) -> list[jax.Array]:
    """The rows of all ids, for the static arrays to begin with."""
    everything = kvjax.keys(kvjax.hash_keys(np.arange(size.rows)))
    return [table.lookup(everything) for table in tables]


def in_chain(step: Callable[..., Any], state: Any, *operands: list[Any]) -> Callable[[int], Any]:
    """A way in which each call takes the first thing that the call before it has given."""

    def way(number: int) -> Any:
        nonlocal state
        state, *rest = step(state, *(o[number % len(o)] for o in operands))
        return state, rest

    return way


def measure_step(size: Size) -> dict[str, Any]:
    rng, tx = np.random.default_rng(0), optax.adam(1e-3)
    ids = [rng.integers(0, size.rows, (TABLES, size.samples)) for _ in range(8)]
    labels = [jnp.asarray(rng.integers(0, 2, size.samples), jnp.float32) for _ in ids]
    keys = [[kvjax.keys(kvjax.hash_keys(i)) for i in each] for each in ids]
    numbers = [[jnp.asarray(i, jnp.int32) for i in each] for each in ids]
    begin = ours(size, tx)
    arrays = rows_of(begin[1][0]["tables"], size)
    ways = {"static": in_chain(*static(arrays, tx), numbers, labels), "kvjax": in_chain(*begin, keys, labels)}
    seconds = medians(ways, size)
    for name in list(kvjax.tables()):
        kvjax.drop_table(name)
    return {
        "seconds": seconds["kvjax"],
        "static_seconds": seconds["static"],
        "ratio": seconds["kvjax"] / seconds["static"],
    }


# ---- the report ----------------------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    calls = Table("call", "dim", "load", "ms", "G keys/s", "bytes", "ratio", "goal", title=f"{report['device']}")
    for c in report["calls"]:
        faster, below = FASTER.get((c["call"], c["dim"])), BELOW.get(c["call"])
        goal = f">= {faster} G" if faster else f"ratio <= {below}" if below else ""
        calls.add_row(
            c["call"], str(c["dim"]), f"{c['load']:.2f}", f"{c['seconds'] * 1e3:.3f}",
            f"{c['billion_keys_per_second']:.2f}", str(c["bytes"]), f"{c['ratio']:.2f}", goal,
        )  # fmt: skip
    s = report["step"]
    step = Table("static arrays, ms", "kvjax, ms", "ratio", "goal", title=f"step of {TABLES} tables of dim {DIM}, adam")
    times = (f"{s[name] * 1e3:.3f}" for name in ("static_seconds", "seconds"))
    step.add_row(*times, f"{s['ratio']:.2f}", f"ratio <= {BELOW['step']}")
    t = report["tiers"]
    tiers = Table("rows on the GPU, ms", "in host memory, ms", "ratio", "GB/s from there", title="find of dim 64")
    tiers.add_row(
        f"{t['hot_seconds'] * 1e3:.3f}", f"{t['cold_seconds'] * 1e3:.3f}", f"{t['ratio']:.2f}",
        f"{t['cold_bytes_per_second'] / 1e9:.1f}",
    )  # fmt: skip
    bandwidth = float(np.median([c["copy_bytes_per_second"] for c in report["calls"]]))
    Console().print(calls, tiers, step, f"copy: {bandwidth / 1e9:.1f} GB/s, read and written; jax {report['jax']}")


def check_there_is_a_gpu() -> None:
    state = kvjax.backends()["cuda"]
    if jax.default_backend() != "gpu" or state != "loaded":
        sys.exit(
            "benchmarks/gpu.py measures tables on a GPU. Here JAX runs programs on "
            f"{jax.default_backend()!r}, and kvjax.backends()['cuda'] is {state!r}: see docs/cuda.md. "
            "--smoke runs it in tiny sizes anywhere."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on any backend; the times mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    args = parser.parse_args()
    if not args.smoke:
        check_there_is_a_gpu()
    size = SMOKE if args.smoke else Size()
    cases = [(dim, load) for dim in (8, 32, 64) for load in LOADS]
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "calls": [call for case in track(cases, "calls") for call in measure_calls(*case, size)],
        "tiers": measure_tiers(size),
        "step": measure_step(size),
        "size": dataclasses.asdict(size),
    }
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
