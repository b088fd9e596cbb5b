"""The cost of a key as a table grows from 1e5 to 5e7 rows, beside raw reads and writes of memory of the same size.

    python benchmarks/growth.py [--rows 100000 1000000 ...] [--plot docs/growth.png]    # 4 minutes, 13 GB at 5e7 rows
    python benchmarks/growth.py --smoke

Nanoseconds a key: medians of calls of 65,536 uniform keys, dim 16, on all cores. The raw gather copies rows of an array
by their numbers. The raw update reads and writes back records of a value and Adam's two moments, and computes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import in_turns
from rich.console import Console
from rich.progress import track
from rich.table import Table
from score_pairs import Loop, Size, filled, keys_of, uniform

import kvjax

DIM = 16
ROWS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 50_000_000)


def cost(size: Size, call: Callable[[int], Any]) -> float:
    """Nanoseconds a key."""
    return 1e9 * in_turns({"call": call}, size.turns)["call"] / size.keys


def raw(size: Size, batches: list[np.ndarray], columns: int, writes: bool) -> float:
    """What memory allows: NumPy on as many threads as there are cores, each with its part of a batch."""
    threads = len(os.sched_getaffinity(0))
    rows = np.ones((size.rows, columns), np.float32)
    held = np.empty((threads, size.keys, columns), np.float32)
    parts = [np.array_split(ids, threads) for ids in batches]

    def work(thread: int, ids: np.ndarray) -> None:
        into = held[thread, : len(ids)]
        np.take(rows, ids, axis=0, out=into, mode="clip")
        if writes:
            rows[ids] = into

    with ThreadPoolExecutor(threads) as pool:
        return cost(size, lambda t: list(pool.map(work, range(threads), parts[t % len(parts)])))


def table(size: Size, batches: list[np.ndarray]) -> dict[str, float]:
    """A lookup, and a whole training step under jit: lookup, loss, gradients, Adam."""
    keys = [keys_of(ids) for ids in batches]
    tx = kvjax.optax.partition(dense=optax.set_to_zero(), tables=optax.adam(1e-2))
    made = filled("growth", DIM, size.rows)
    look = jax.jit(lambda table, keys: table.lookup(keys))
    found = {"lookup": cost(size, lambda t: look(made, keys[t % len(keys)]))}

    def step(params: Any, state: Any, keys: Any) -> Any:
        value, grads = kvjax.value_and_grad(lambda p: jnp.sum(p["table"].lookup(keys) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    train = Loop(step, {"table": made}, tx.init({"table": made}))
    found["training step, Adam"] = cost(size, lambda t: train(keys[t % len(keys)]))
    kvjax.drop_table("growth")
    return found


def measured(rows: int, keys: int = 65_536, turns: int = 25) -> dict[str, float]:
    size, rng = Size(rows=rows, keys=keys, turns=turns), np.random.default_rng(0)
    batches = [uniform(rng, size) for _ in range(16)]
    floors = {"raw gather": raw(size, batches, DIM, False), "raw update": raw(size, batches, 3 * DIM, True)}
    return {**floors, **table(size, batches)}


def caches() -> dict[str, int]:
    """Bytes of the caches of a core, largest level last; empty where Linux does not say."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            kib = (index / "size").read_text().strip().removesuffix("K")
            found["L" + (index / "level").read_text().strip()] = int(kib) * 1024
    return found


def draw(costs: dict[int, dict[str, float]], to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, style in (
        ("raw gather", "C0--"), ("lookup", "C0-"), ("raw update", "C1--"), ("training step, Adam", "C1-"),
    ):  # fmt: skip
        axes.plot(list(costs), [c[name] for c in costs.values()], style, marker="o", label=name)
    for name, size in caches().items():
        if min(costs) < (rows := size / (4 * DIM)) < max(costs):
            axes.axvline(rows, color="grey", linewidth=0.8, linestyle=":")
            axes.annotate(f"values fill {name}", (rows, axes.get_ylim()[0]), rotation=90, fontsize=7, color="grey")
    axes.set(
        xscale="log", yscale="log", xlabel="rows of the table", ylabel="ns a key", title=f"Cost of a key, dim {DIM}"
    )
    axes.legend(frameon=False)
    figure.savefig(to, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    how = {"keys": 256, "turns": 3} if args.smoke else {}
    rows = (300, 1_000) if args.smoke else args.rows
    costs = {n: measured(n, **how) for n in track(rows, "measuring", console=Console(stderr=True))}
    grid = Table("rows", *costs[rows[0]], "lookup / gather", "step / update", title="ns a key, medians")
    for n, c in costs.items():
        ratios = c["lookup"] / c["raw gather"], c["training step, Adam"] / c["raw update"]
        grid.add_row(f"{n:,}", *(f"{x:.1f}" for x in c.values()), *(f"{r:.2f}" for r in ratios))
    Console(width=120).print(grid)
    if args.plot:
        draw(costs, args.plot)


if __name__ == "__main__":
    main()
