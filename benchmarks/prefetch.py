"""Prefetching: a training step that reads the next batch's rows before its write, beside one that does not.

    python benchmarks/prefetch.py [--rows N] [--dim D] [--batch B] [--devices K]

The table lies in one place, and sharded over K host devices; steps in turns, medians of milliseconds. `repeats` is
the share of a batch's keys that the batch before had too, which are read again. `step` is the whole training step,
`read` the part of it that must wait for the step before: the lookup once the write is done. Host devices have no
network between them and share the processors with the computation, so nothing overlaps here: the steps show what
looking ahead costs, the reads what it takes off the way from one step to the next.
"""

from __future__ import annotations

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=200_000)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--batch", type=int, default=16_384)
parser.add_argument("--devices", type=int, default=4)
args = parser.parse_args()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(args.devices))
os.environ.setdefault("NPROC", str(8 * args.devices))

import jax  # noqa: E402  (after the devices have been asked for)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import kvjax  # noqa: E402

TURNS, HIDDEN = 24, 256


def loss_of(w: jax.Array, v: jax.Array):
    def loss(table: kvjax.Table, keys: kvjax.Keys | kvjax.Prefetched) -> jax.Array:
        return jnp.mean(jnp.square(jax.nn.relu(table.lookup(keys) @ w) @ v - 1.0))

    return loss


def batches(repeats: float, rng: np.random.Generator):
    """Keys of one batch after another, of which a share is that of the batch before."""
    keys = rng.integers(0, args.rows, args.batch)
    while True:
        yield jax.block_until_ready(kvjax.keys(keys))
        again = rng.random(args.batch) < repeats
        keys = np.where(again, keys, rng.integers(0, args.rows, args.batch))


def main() -> None:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(args.dim, HIDDEN)) / 8, jnp.float32)
    v = jnp.asarray(rng.normal(size=(HIDDEN,)) / 16, jnp.float32)
    loss, tx = loss_of(w, v), optax.adagrad(0.1)

    @jax.jit
    def plain(table, keys):
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        return table.apply(tx, grads)[0], value

    @jax.jit
    def ahead(table, keys, following):
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        read, table = kvjax.prefetch(table, following)
        return table.apply(tx, grads)[0], read, value

    read_rows = jax.jit(lambda table, keys: table.lookup(keys))
    mesh = jax.make_mesh((args.devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    places = {"one place": {}, f"{args.devices} devices": {"mesh": mesh}}
    columns = ("step", "step, ahead", "read", "read, ahead")
    report = Table("table", "repeats", *columns, title="milliseconds")
    for place, options in places.items():
        for repeats in (0.0, 0.1, 0.5):
            tables = {
                kind: kvjax.get_table(f"{place} {kind} {repeats}", dim=args.dim, **options)
                for kind in ("plain", "ahead")
            }
            for start in range(0, args.rows, args.batch):
                keys = kvjax.keys(np.arange(start, start + args.batch) % args.rows)
                tables = {kind: jax.block_until_ready(t.lookup_or_insert(keys)[1]) for kind, t in tables.items()}
            stream = batches(repeats, rng)
            keys = next(stream)
            read, tables["ahead"] = kvjax.prefetch(tables["ahead"], keys)
            seconds = {column: [] for column in columns}
            for turn in range(TURNS):
                following = next(stream)
                times = [time.perf_counter()]
                jax.block_until_ready(read_rows(tables["plain"], keys))
                times.append(time.perf_counter())
                jax.block_until_ready(read_rows(tables["ahead"], read))
                times.append(time.perf_counter())
                tables["plain"], a = jax.block_until_ready(plain(tables["plain"], keys))
                times.append(time.perf_counter())
                tables["ahead"], read, b = jax.block_until_ready(ahead(tables["ahead"], read, following))
                times.append(time.perf_counter())
                np.testing.assert_allclose(a, b, rtol=1e-5)
                if turn > 2:  # the first turns compile
                    order = ("read", "read, ahead", "step", "step, ahead")
                    for column, took in zip(order, np.diff(times), strict=True):
                        seconds[column].append(took)
                keys = following
            report.add_row(place, f"{repeats:.0%}", *(f"{np.median(seconds[c]) * 1e3:.1f}" for c in columns))
            for kind in tables:
                kvjax.drop_table(f"{place} {kind} {repeats}")
    Console().print(report)


if __name__ == "__main__":
    main()
