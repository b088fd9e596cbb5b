"""What evictions cost: a training step of full tables, beside the same table without a limit, in turns.

    python benchmarks/eviction.py [--rows 1000000] [--keys 8000] [--dim 16] [--devices 1] [--queued 64] [--turns 3]

One key of eight is new, so as many rows leave a full table. Most steps find them by lists; one now and then scans all
rows to fill these. So `step` is the median of single steps, and `mean` that of turns of `--queued` steps, which should
be so many that each turn has a scan.
"""

import argparse
import dataclasses
import functools
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
DEFAULTS = {"rows": 1_000_000, "keys": 8_000, "dim": 16, "devices": 1, "queued": 64, "turns": 3}
for option, default in DEFAULTS.items():
    parser.add_argument(f"--{option}", type=int, default=default)
args = parser.parse_args()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(args.devices))
os.environ.setdefault("NPROC", str(8 * args.devices))

import jax  # noqa: E402  (after the devices have been asked for)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from common import filled, in_turns  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table as Grid  # noqa: E402

import kvjax  # noqa: E402
from kvjax import evict  # noqa: E402

FIRST, STEPS = 2, 20  # single steps: those that compile, and those that count
NO_LIMIT = "no limit"
POLICIES = {
    "the least recent": None,
    "LeastFrequent()": evict.LeastFrequent(),
    "LeastFrequent(half_life=100)": evict.LeastFrequent(half_life=100.0),
    "two half-lives": evict.LeastFrequent(half_life=100.0) | evict.LeastFrequent(half_life=1000.0),
    "MaxAge(1000)": evict.MaxAge(1000),
    "MinFrequency(2)": evict.MinFrequency(2),
    "MaxAge(1000) | LeastRecent()": evict.MaxAge(1000) | evict.LeastRecent(),
}


def main() -> None:
    options = {NO_LIMIT: {}}
    for name, policy in POLICIES.items():
        options[name] = {"max_capacity": args.rows, "on_full": "evict", "evict": policy}
    if args.devices > 1:
        mesh = jax.make_mesh((args.devices,), ("x",))
        options = {name: {"mesh": mesh, **chosen} for name, chosen in options.items()}
    rng = np.random.default_rng(0)
    history = {"freqs": 2 + rng.integers(0, 9, args.rows), "versions": rng.integers(0, 1001, args.rows)}
    tables = {}
    for name, chosen in options.items():
        table = filled(kvjax.get_table(name, dim=args.dim, **chosen), args.rows)
        tables[name] = table.load(dataclasses.replace(table.export(), **history, last_step=1000))

    grads, batches = jnp.ones((args.keys, args.dim)), []
    for number in range(FIRST + STEPS + (1 + args.turns) * args.queued):
        ids = rng.integers(0, args.rows, args.keys)
        new = ids[::8]
        new[:] = args.rows + number * len(new) + np.arange(len(new))
        batches.append(kvjax.keys(kvjax.hash_keys(ids)))
    step = jax.jit(lambda table, keys: table.apply(optax.sgd(0.1), kvjax.SparseRows(keys, grads))[0])

    def train(name: str, after: int, number: int) -> kvjax.Table:
        tables[name] = step(tables[name], batches[after + number])
        return tables[name]

    single = in_turns({name: functools.partial(train, name, 0) for name in tables}, STEPS, first=FIRST)
    ways = {name: functools.partial(train, name, FIRST + STEPS) for name in tables}
    mean = in_turns(ways, args.turns, first=1, queued=args.queued)
    grid = Grid("full table", "step, ms", "/ no limit", "mean, ms", "/ no limit", "evicted")
    for name, table in tables.items():
        figures = [text for x in (single, mean) for text in (f"{1e3 * x[name]:.2f}", f"{x[name] / x[NO_LIMIT]:.2f}")]
        grid.add_row(name, *figures, f"{sum(table.stats().evicted.values()):,}")
    Console(width=120).print(grid)


if __name__ == "__main__":
    main()
