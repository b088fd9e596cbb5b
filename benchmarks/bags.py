"""Pooled lookups beside ``nn.Embed``'s gather and ``jax.ops.segment_sum`` on the same keys.

    python benchmarks/bags.py               # batch 2048, 20 keys a bag on average, dims 16 and 64

Milliseconds a call, medians of calls in turns in one process. The ids of the dense way are numbered beforehand; kvjax
hashes them to 64 bits. "gradient" is by the looked-up rows: a dense array for ``nn.Embed``, merged `SparseRows` here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import kvjax


def filled(dim: int, rows: int) -> kvjax.Table:
    table = kvjax.get_table(f"bags{dim}", dim=dim, initializer=kvjax.initializers.normal(1.0))
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
    for ids in np.array_split(np.arange(rows), 16):
        table = insert(table, kvjax.keys(kvjax.hash_keys(ids)))
    return jax.block_until_ready(table)


def calls(dim: int, rows: int, bags: int) -> dict[str, tuple[Callable, Callable]]:
    """The dense way and kvjax's, by what is measured; all take (ids, keys, lengths, weights)."""
    table, embedding = filled(dim, rows), jnp.ones((rows, dim))

    def dense(embedding, ids, lengths, weights):
        segments = jnp.repeat(jnp.arange(bags), lengths, total_repeat_length=len(ids))
        sums = jax.ops.segment_sum(embedding[ids] * weights[:, None], segments, bags, indices_are_sorted=True)
        return sums / jax.ops.segment_sum(weights, segments, bags, indices_are_sorted=True)[:, None]

    def ours(table, keys, lengths, weights):
        return kvjax.lookup_bag(table, keys, lengths=lengths, weights=weights)

    def squares(way):
        return lambda *args: jnp.sum(way(*args) ** 2)

    def merged(*args):
        return kvjax.merge(kvjax.grad(squares(ours))(*args))

    dense_call, ours_call = jax.jit(dense), jax.jit(ours)
    dense_grad, ours_grad = jax.jit(jax.grad(squares(dense))), jax.jit(merged)
    return {
        "forward": (lambda i, _, n, w: dense_call(embedding, i, n, w), lambda _, k, n, w: ours_call(table, k, n, w)),
        "gradient": (lambda i, _, n, w: dense_grad(embedding, i, n, w), lambda _, k, n, w: ours_grad(table, k, n, w)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--bags", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    report = Table("dim", "call", "nn.Embed + segment_sum", "lookup_bag", "ratio", title="milliseconds a call")
    for dim in args.dims:
        functions = calls(dim, args.rows, args.bags)
        seconds = {(name, way): [] for name in functions for way in (0, 1)}
        for turn in range(args.turns):
            lengths = rng.integers(0, 40, args.bags).astype(np.int32)
            ids = rng.integers(0, args.rows, 40 * args.bags)[: 20 * args.bags + 4096]
            lengths[np.cumsum(lengths) > len(ids)] = 0
            weights = jnp.asarray(rng.random(len(ids), np.float32))
            operands = (jnp.asarray(ids.astype(np.int32)), kvjax.keys(kvjax.hash_keys(ids)), lengths, weights)
            for (name, way), measured in seconds.items():
                began = time.perf_counter()
                jax.block_until_ready(functions[name][way](*operands))
                if turn > 2:  # the first turns compile
                    measured.append(time.perf_counter() - began)
        for name in functions:
            dense, ours = (float(np.median(seconds[name, way])) * 1e3 for way in (0, 1))
            report.add_row(str(dim), name, f"{dense:.1f}", f"{ours:.1f}", f"{dense / ours:.2f}")
    Console().print(report)


if __name__ == "__main__":
    main()
