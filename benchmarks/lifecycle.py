"""What admission, capacity and eviction cost: the training write of tables that differ in nothing else, in turns.

    python benchmarks/lifecycle.py [--rows 1000000] [--keys 65536] [--dim 16] [--calls 20]

Each step trains `keys` keys of which a tenth are new; the tables are full from the start where they have a limit.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import in_turns
from rich.console import Console
from rich.table import Table as Grid

import kvjax
from kvjax import admit, evict

KINDS = {
    "no rules": {},
    "MinCount(2)": {"admit": admit.MinCount(2)},
    "Sketch(2)": {"admit": admit.Sketch(2)},
    "Probability(0.5)": {"admit": admit.Probability(0.5)},
    "full, exactly what is needed": {"on_full": "evict"},
    "full, LeastRecent(n) ahead": {"on_full": "evict", "evict": "ahead"},
    "full, LeastFrequent()": {"on_full": "evict", "evict": evict.LeastFrequent()},
    "MaxAge every step": {"evict": evict.MaxAge(10**9).every(1)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("rows", 1_000_000), ("keys", 65_536), ("dim", 16), ("calls", 20)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng, grads = np.random.default_rng(0), jnp.ones((args.keys, args.dim))
    step = jax.jit(lambda table, keys: table.apply(optax.sgd(0.1), kvjax.SparseRows(keys, grads))[0])

    tables = {}
    for kind, options in KINDS.items():
        options = dict(options)
        if options.get("evict") == "ahead":
            options["evict"] = evict.LeastRecent(args.rows // 16)
        if "on_full" in options:
            options["max_capacity"] = args.rows
        table = kvjax.get_table(kind, dim=args.dim, **options)
        tables[kind] = table.upsert(np.arange(args.rows), np.ones((args.rows, args.dim), np.float32))
    new = args.keys // 10
    batches = []
    for turn in range(args.calls + 1):
        keys = rng.integers(0, args.rows, args.keys)
        keys[:new] = args.rows + turn * new + np.arange(new)
        batches.append(kvjax.keys(keys))

    def train(kind: str, turn: int) -> kvjax.Table:
        tables[kind] = step(tables[kind], batches[turn])
        return tables[kind]

    seconds = in_turns({kind: functools.partial(train, kind) for kind in KINDS}, args.calls, first=1)
    grid = Grid("table", "ms a step", "rows", "evicted", "refused", "stats(), us")
    for kind, table in tables.items():
        started = time.perf_counter()
        for _ in range(20):
            stats = table.stats()
        cost = (time.perf_counter() - started) / 20
        milliseconds = f"{1e3 * seconds[kind]:.1f}"
        evicted = f"{sum(stats.evicted.values()):,}"
        grid.add_row(kind, milliseconds, f"{stats.size:,}", evicted, f"{stats.refused:,}", f"{1e6 * cost:.0f}")
    Console().print(grid)


if __name__ == "__main__":
    main()
