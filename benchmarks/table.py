"""One table by itself: calls on a million rows beside a dense gather, and growth from nothing.

    python benchmarks/table.py              # lookup, also of initial rows, merge and apply at dim 16 and 64
    python benchmarks/table.py --grow       # 30 million rows of dim 4, with no hint of the size

Milliseconds a call of 65,536 uniform keys, medians; all calls of a dim are taken in turns in one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import filled, in_turns
from rich.console import Console
from rich.table import Table

import kvjax

TURNS = 40


def made(dim: int, rows: int, batch: int) -> kvjax.Table:
    table = kvjax.get_table(f"dim{dim}", dim=dim, initializer=kvjax.initializers.normal(1.0))
    return filled(table, -(-rows // batch) * batch, batch)


def calls(dim: int, rows: int, batch: int) -> dict[str, Callable]:
    """Each measured call, as a function of dense ids and keys."""
    grads, dense = jnp.ones((batch, dim)), jnp.ones((rows, dim))
    lookup = jax.jit(lambda table, keys: table.lookup(keys))
    merge = jax.jit(lambda keys, grads: kvjax.merge(kvjax.SparseRows(keys, grads)).rows)
    take = jax.jit(lambda dense, ids: dense[ids])
    first = made(dim, rows, batch)
    absent = kvjax.keys(kvjax.hash_keys(np.arange(rows + batch, rows + 2 * batch)))  # behind the last batch
    out = {
        "dense gather": lambda ids, keys: take(dense, ids),
        "lookup": lambda ids, keys: lookup(kvjax.get_table(first.name), keys),
        "lookup of no rows": lambda ids, keys: lookup(kvjax.get_table(first.name), absent),
        "merge": lambda ids, keys: merge(keys, grads),
    }
    for name, tx in (("apply, sgd", optax.sgd(0.1)), ("apply, adam", optax.adam(1e-3))):
        step = jax.jit(lambda table, keys, tx=tx: table.apply(tx, kvjax.SparseRows(keys, grads))[0])
        out[name] = lambda ids, keys, step=step: step(kvjax.get_table(first.name), keys)
    return out


def compare(dims: list[int], rows: int, batch: int) -> None:
    rng, report = np.random.default_rng(0), None
    for dim in dims:
        functions = calls(dim, rows, batch)
        report = report or Table("dim", *functions, title="milliseconds a call")
        batches = [rng.integers(0, rows, batch) for _ in range(8)]
        operands = [(jnp.asarray(ids.astype(np.int32)), kvjax.keys(kvjax.hash_keys(ids))) for ids in batches]
        ways = {name: lambda t, call=call: call(*operands[t % 8]) for name, call in functions.items()}  # noqa: B023
        report.add_row(str(dim), *(f"{s * 1e3:.1f}" for s in in_turns(ways, TURNS).values()))
    Console().print(report)


def grow() -> None:
    began, rows = time.perf_counter(), 30_000_000 // 2**18 * 2**18
    table = made(4, rows, 2**18)
    seconds, resident = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{len(table):,} rows in {seconds:.1f} s, {rows / seconds / 1e6:.1f} M rows/s, {resident / rows:.0f} B a row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=65_536, help="keys a call")
    args = parser.parse_args()
    grow() if args.grow else compare(args.dims, args.rows, args.batch)


if __name__ == "__main__":
    main()
