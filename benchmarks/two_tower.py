"""Step time of the two-tower example, dynamic against dense, as the tables grow.

    python benchmarks/two_tower.py              # the README's table
    python benchmarks/two_tower.py --rows 70839 --batch 2048

Both models are the example's own, with its batch, loss and Adam. The dense one has `nn.Embed` tables of as many rows as
the dynamic ones hold; ids are drawn uniformly. Steps are taken in turns, so that what else the machine does meets
both, and the medians of the turns are printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.table import Table

import kvjax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import two_tower

TURNS, STEPS = 15, 20


def wide(ids: np.ndarray) -> np.ndarray:
    return kvjax.hash_keys(ids)


def make(rows: int, dense: bool, args: argparse.Namespace) -> Any:
    """A state whose tables hold `rows` rows together, and its step on (users, items)."""
    kinds = {"user": rows // 2, "item": rows - rows // 2}
    net = two_tower.TwoTower(args.features, kinds if dense else None)
    probe = np.zeros(1, np.int32) if dense else kvjax.keys(np.zeros(1, np.int64))
    params = net.init(jax.random.key(0), probe, probe)["params"]
    adam = optax.adam(3e-3)
    tx = adam if dense else kvjax.optax.partition(dense=adam, tables=adam)
    if not dense:
        params = jax.tree.map(lambda t: fill(t, kinds) if is_table(t) else t, params, is_leaf=is_table)
    state = TrainState.create(apply_fn=net.apply, params=nn.unbox(params), tx=tx)
    run = two_tower.Run(argparse.Namespace(dense=dense, temperature=0.1), None, net, state, 0)
    return state, two_tower.make_step(run), kinds


def is_table(x: Any) -> bool:
    return isinstance(x, kvjax.Table)


def fill(table: kvjax.Table, kinds: dict[str, int]) -> kvjax.Table:
    for ids in np.array_split(np.arange(kinds[table.name]), max(1, kinds[table.name] // 65536)):
        table = table.lookup_or_insert(wide(ids))[1]
    return table


def measure(rows: int, args: argparse.Namespace) -> dict[bool, float]:
    """Median seconds per step, by dense or not."""
    rng = np.random.default_rng(0)
    models = {dense: list(make(rows, dense, args)) for dense in (True, False)}
    kinds = models[True][2]
    batches = [
        (rng.integers(0, kinds["user"], args.batch), rng.integers(0, kinds["item"], args.batch)) for _ in range(8)
    ]
    extra = [
        (np.unique(i, return_inverse=True)[1].astype(np.int32), np.full(args.batch, -8, np.float32)) for _, i in batches
    ]
    ready = {
        True: [(u.astype(np.int32), i.astype(np.int32)) for u, i in batches],
        False: [(kvjax.keys(wide(u)), kvjax.keys(wide(i))) for u, i in batches],
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS + 1):
        for dense, model in models.items():
            for k in range(STEPS):
                began = time.perf_counter()
                model[0], loss = model[1](model[0], *ready[dense][k % 8], *extra[k % 8])
                jax.block_until_ready((loss, model[0].params))
                if turn > 0:  # the first turn compiles
                    seconds[dense].append(time.perf_counter() - began)
    for name in list(kvjax.tables()):
        kvjax.drop_table(name)
    return {dense: float(np.median(s)) for dense, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[70_839, 500_000, 2_000_000])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--features", type=int, default=64)
    args = parser.parse_args()
    table = Table(
        "rows",
        "nn.Embed, ms",
        "kvjax, ms",
        "ratio",
        "kvjax keys/s",
        title=f"batch {args.batch}, dim {args.features}, adam",
    )
    for rows in args.rows:
        s = measure(rows, args)
        cells = (
            f"{rows:,}",
            f"{s[True] * 1e3:.1f}",
            f"{s[False] * 1e3:.1f}",
            f"{s[True] / s[False]:.2f}",
            f"{2 * args.batch / s[False]:,.0f}",
        )
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
