"""What a call outside of `jit` costs with arrays of a new shape: processor time, and memory that stays.

python benchmarks/shapes.py [--shapes 20]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from common import anonymous
from rich.console import Console
from rich.table import Table

import kvjax


def calls() -> dict[str, Callable[[int], object]]:
    """Each of a number, which makes its shapes."""
    table, array = kvjax.get_table("shapes", dim=4), jnp.ones((1000, 4))

    def loss(table, keys):
        return jnp.sum(table.lookup(keys))

    def bags(table, keys):
        return jnp.sum(kvjax.lookup_bag(table, keys))

    def dense(array, ids):
        return jnp.sum(jnp.take(array, ids, axis=0))

    return {
        "jax.grad of jnp.take": lambda n: jax.grad(dense)(array, np.arange(n)),
        "lookup": lambda n: table.lookup(np.arange(n)),
        "lookup_bag": lambda n: kvjax.lookup_bag(table, np.arange(3 * n).reshape(3, n)),
        "lookup_bag(lengths=, weights=)": lambda n: kvjax.lookup_bag(
            table, np.arange(3 * n), lengths=[n, n, n], weights=np.ones(3 * n)
        ),
        "grad of lookup": lambda n: kvjax.grad(loss)(table, kvjax.keys(np.arange(n))),
        "grad of lookup_bag": lambda n: kvjax.grad(bags)(table, kvjax.keys(np.arange(3 * n).reshape(3, n))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=20)
    args = parser.parse_args()
    shown = Table("call", "ms of the processor", "MiB", "time, by jax.grad")
    first = None
    for name, call in calls().items():
        for n in range(5, 7):
            call(n)
        gc.collect()
        memory, began = anonymous(), time.process_time()
        for n in range(7, 7 + args.shapes):
            jax.block_until_ready(jax.tree.leaves(call(n))[0])
        seconds = (time.process_time() - began) / args.shapes
        gc.collect()
        first = first or seconds
        held = (anonymous() - memory) / args.shapes / 2**20
        shown.add_row(name, f"{1e3 * seconds:.0f}", f"{held:.1f}", f"{seconds / first:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
