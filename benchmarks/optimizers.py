"""What a training write costs by optimizer: in a table, in a dense array, and by hand on the rows of a batch.

    python benchmarks/optimizers.py [--rows 200000] [--keys 16384] [--dims 16 64 128] [--calls 15] [--only adam ...]

A batch has distinct keys, all known. "dense" is optax on an array of all rows with a gradient that is zero but for the
batch, as static tables train: its time grows with the rows. "by hand" gathers the rows of the batch from an array,
updates them by the optimizer's formula and scatters them, jitted and donated, ids known: no keys, no counts, no
admission. "plain" is what catch_up goes around, in a table of its own; rows were touched ``rows / keys`` steps ago in
the mean. Ways take turns; times are medians, of the wall clock and of the process's CPU.
"""

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table as Grid

import kvjax

RATE = 0.01
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "adagrad": lambda: optax.adagrad(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE),
    "adam": lambda: optax.adam(RATE),
    "adamw": lambda: optax.adamw(RATE),
    "lion": lambda: optax.lion(RATE),
    "lamb": lambda: optax.lamb(RATE),
    "adafactor": lambda: optax.adafactor(RATE),
    "ftrl": lambda: kvjax.optax.ftrl(RATE, l1=0.01),
    "cowclip + adam": lambda: optax.chain(kvjax.optax.scale_by_cowclip(), optax.adam(RATE)),
    "segments": lambda: kvjax.optax.segments({"bias": (0, optax.sgd(RATE))}, rest=optax.adagrad(RATE)),
    "catch_up(momentum)": lambda: kvjax.optax.catch_up(optax.sgd(RATE, momentum=0.9)),
    "catch_up(adam)": lambda: kvjax.optax.catch_up(optax.adam(RATE)),
    "catch_up(adamw)": lambda: kvjax.optax.catch_up(optax.adamw(RATE)),
}

PLAIN = {name: name.removeprefix("catch_up(").removesuffix(")") for name in TRANSFORMS if name.startswith("catch_up")}
"""The transform of each that makes up for missed steps."""


# ---- by hand: rows, slots and gradients (n, dim) to rows and slots -----------------------------------------


def _adam(w: Any, g: Any, mu: Any, nu: Any, n: Any) -> Any:
    mu, nu, n = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g * g, n + 1
    steps = n[:, None].astype(jnp.float32)
    rate = RATE * jnp.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
    return w - rate * mu / (jnp.sqrt(nu) + 1e-8), mu, nu, n


def _adagrad(w: Any, g: Any, s: Any) -> Any:
    s = s + g * g
    return w - RATE * g * jax.lax.rsqrt(s + 1e-7), s


def _momentum(w: Any, g: Any, m: Any) -> Any:
    m = 0.9 * m + g
    return w - RATE * m, m


def _rmsprop(w: Any, g: Any, nu: Any) -> Any:
    nu = 0.9 * nu + 0.1 * g * g
    return w - RATE * g * jax.lax.rsqrt(nu + 1e-8), nu


BY_HAND = {
    "sgd": (lambda w, g: (w - RATE * g,), ()),
    "momentum": (_momentum, ("row",)),
    "adagrad": (_adagrad, ("row",)),
    "rmsprop": (_rmsprop, ("row",)),
    "adam": (_adam, ("row", "row", "count")),
}


# ---- the ways ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Way:
    """A step by ids and gradients, which keeps its state; and its times."""

    step: Callable[[Any, Any, Any, Any], Any]
    state: Any
    keys: Callable[[np.ndarray], Any]
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def run(self, ids: np.ndarray, grads: Any, counts: bool) -> None:
        keys = jax.block_until_ready(self.keys(ids))
        wall, cpu = time.perf_counter(), time.process_time()
        self.state = jax.block_until_ready(self.step(self.state, keys, grads, len(ids)))
        if counts:
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)


def _table_name(name: str, dim: int) -> str:
    return "".join(x if x.isalnum() else "_" for x in f"{name} {dim}")


def table_way(name: str, rows: int, dim: int) -> Way:
    tx = TRANSFORMS[name]()
    table = kvjax.get_table(_table_name(name, dim), dim=dim, capacity=rows, seed=0)
    table = table.upsert(kvjax.hash_keys(np.arange(rows)), np.zeros((rows, dim), np.float32))
    step = jax.jit(lambda state, keys, grads: state[0].apply(tx, kvjax.SparseRows(keys, grads), state[1]))
    rowwise = tx if isinstance(tx, kvjax.optax.Rowwise) else kvjax.optax.rowwise(tx)
    state = (table, rowwise.init(dim))
    return Way(lambda s, k, g, n: step(s, k, g), state, lambda ids: kvjax.keys(kvjax.hash_keys(ids)))


def dense_way(name: str, rows: int, dim: int) -> Way:
    tx: Any = TRANSFORMS[name]()
    params = jnp.zeros((rows, dim))

    def step(state: Any, ids: Any, grads: Any) -> Any:
        params, inner = state
        whole = jnp.zeros_like(params).at[ids].set(grads)
        updates, inner = tx.update(whole, inner, params)
        return optax.apply_updates(params, updates), inner

    jitted = jax.jit(step, donate_argnums=0)
    return Way(lambda s, k, g, n: jitted(s, k, g), (params, tx.init(params)), jnp.asarray)


def hand_way(name: str, rows: int, dim: int) -> Way:
    formula, slots = BY_HAND[name]
    state = [jnp.zeros((rows, dim))]
    state += [jnp.zeros((rows, dim)) if slot == "row" else jnp.zeros(rows, jnp.int32) for slot in slots]

    def step(state: Any, ids: Any, grads: Any) -> Any:
        w, *kept = (x[ids] for x in state)
        return [x.at[ids].set(new, unique_indices=True) for x, new in zip(state, formula(w, grads, *kept), strict=True)]

    jitted = jax.jit(step, donate_argnums=0)
    return Way(lambda s, k, g, n: jitted(s, k, g), state, jnp.asarray)


def ways_of(name: str, rows: int, dim: int) -> dict[str, Way]:
    ways = {"table": table_way(name, rows, dim)}
    if name in PLAIN:
        ways["plain"] = table_way(PLAIN[name], rows, dim)
    if name != "cowclip + adam" and name not in PLAIN:  # which dense arrays have not
        ways["dense"] = dense_way(name, rows, dim)
    if name in BY_HAND:
        ways["by hand"] = hand_way(name, rows, dim)
    return ways


def measure(name: str, rows: int, dim: int, keys: int, calls: int) -> dict[str, Way]:
    rng, ways = np.random.default_rng(0), ways_of(name, rows, dim)
    for turn in range(calls + 2):
        ids, grads = rng.choice(rows, keys, replace=False), jnp.asarray(rng.normal(size=(keys, dim)), jnp.float32)
        for way in ways.values():
            way.run(ids, grads, turn >= 2)  # the first compile
    for one in kvjax.tables():
        kvjax.drop_table(one)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in [("rows", 200_000), ("keys", 16_384), ("calls", 15)]:
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--only", nargs="+", choices=TRANSFORMS, default=list(TRANSFORMS))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.keys, args.calls, args.dims = 256, 64, 2, args.dims[:1]
    warnings.filterwarnings("ignore", "kvjax: rows depend")  # norms are those of rows here
    grid = Grid(title=f"nanoseconds a touched row: wall clock (CPU); {args.keys} of {args.rows} rows a step")
    others = ("dense", "by hand", "plain")
    for column in ("transform", "dim", "table", *others, *(f"{other} / table" for other in others)):
        grid.add_column(column, justify="left" if column == "transform" else "right")
    for name in args.only:
        for dim in args.dims:
            ways = measure(name, args.rows, dim, args.keys, args.calls)
            wall = {way: statistics.median(w.wall) / args.keys * 1e9 for way, w in ways.items()}
            cpu = {way: statistics.median(w.cpu) / args.keys * 1e9 for way, w in ways.items()}
            figures = [f"{wall[way]:.0f} ({cpu[way]:.0f})" if way in wall else "" for way in ("table", *others)]
            ratios = [
                f"{wall[way] / wall['table']:.2f} ({cpu[way] / cpu['table']:.2f})" if way in wall else ""
                for way in others
            ]
            grid.add_row(name, str(dim), *figures, *ratios)
    Console(width=150).print(grid)


if __name__ == "__main__":
    main()
