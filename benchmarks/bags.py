"""Pooled lookups beside ``nn.Embed``'s gather and ``jax.ops.segment_sum`` on the same keys.

    python benchmarks/bags.py               # batch 2048, 20 keys a bag on average, dims 16 and 64

Milliseconds a call, medians of calls in turns in one process. The ids of the dense way are numbered beforehand; kvjax
hashes them to 64 bits. "gradient" is by the looked-up rows: a dense array for ``nn.Embed``, merged `SparseRows` here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import filled, in_turns
from rich.console import Console
from rich.table import Table

import kvjax


def calls(dim: int, rows: int, bags: int) -> dict[str, tuple[Callable, Callable]]:
    """The dense way and kvjax's, by what is measured; all take (ids, keys, lengths, weights)."""
    table = kvjax.get_table(f"bags{dim}", dim=dim, initializer=kvjax.initializers.normal(1.0))
    table, embedding = filled(table, rows), jnp.ones((rows, dim))

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


def batch(args: argparse.Namespace, rng: np.random.Generator) -> tuple[Any, ...]:
    """What each call takes."""
    lengths = rng.integers(0, 40, args.bags).astype(np.int32)
    ids = rng.integers(0, args.rows, 20 * args.bags + 4096)
    lengths[np.cumsum(lengths) > len(ids)] = 0
    weights = jnp.asarray(rng.random(len(ids), np.float32))
    return jnp.asarray(ids.astype(np.int32)), kvjax.keys(kvjax.hash_keys(ids)), lengths, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--bags", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    batches = [batch(args, np.random.default_rng(seed)) for seed in range(8)]
    report = Table("dim", "call", "nn.Embed + segment_sum", "lookup_bag", "ratio", title="milliseconds a call")
    for dim in args.dims:
        ways = {
            f"{name}, {way}": lambda t, call=call: call(*batches[t % 8])
            for name, both in calls(dim, args.rows, args.bags).items()
            for way, call in zip(("dense", "ours"), both, strict=True)
        }
        seconds = in_turns(ways, args.turns)
        for name in ("forward", "gradient"):
            dense, ours = (1e3 * seconds[f"{name}, {way}"] for way in ("dense", "ours"))
            report.add_row(str(dim), name, f"{dense:.1f}", f"{ours:.1f}", f"{dense / ours:.2f}")
    Console().print(report)


if __name__ == "__main__":
    main()
