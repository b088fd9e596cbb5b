"""What lazy rows, catching up and 16 bits cost in quality, in two tasks.

    python benchmarks/quality.py items [--data lightgcn_split.npz] [--users 4000]   # Recall@20 over all items
    python benchmarks/quality.py clicks [--data topn.npz] [--examples 200000]       # AUC of a factorisation machine

A gradient that comes alone moves a row of dense Adam by 1 / sqrt(1 - b2) = 32 times the rate in all, most of it in the
ten steps after, and a lazy row by the rate: so rows that are rarely touched want a rate in between.

The data of items has CSR arrays train_ptr, train_item, test_ptr, test_item; that of clicks logs of ten columns, train
and test, to which wrong apps are drawn. Without it both are made up. Compared are dense Adam on arrays, tables with
catch_up(adam) and gap_adam at its rate, optax.adam in tables at multiples of it, and the best of these with
bfloat16 rows, rounded to nearest and stochastically. For one seed all start from the same rows and see the same
batches.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quality_tasks
from quality_tasks import Task
from rich.console import Console
from rich.table import Table as Grid

import kvjax


def made(task: Task, dim: int, seed: int, **options: Any) -> dict[str, Any]:
    start = kvjax.initializers.normal(task.spread)
    return {
        name: kvjax.get_table(f"quality_{name}", dim=dim, initializer=start, seed=2 * seed + i, **options)
        for i, name in enumerate(task.rows)
    }


def scored(task: Task, tables: dict[str, Any], dense: Any) -> float:
    rows = {name: np.asarray(tables[name].lookup(np.arange(n)), np.float32) for name, n in task.rows.items()}
    return task.score(rows, dense)


def dropped() -> None:
    for table in list(kvjax.tables()):
        kvjax.drop_table(table)


def on_arrays(task: Task, dim: int, seed: int, rate: float) -> float:
    arrays = {name: table.lookup(np.arange(task.rows[name])) for name, table in made(task, dim, seed).items()}
    jax.block_until_ready(arrays)
    dropped()
    params: Any = {"rows": arrays, "dense": task.dense}
    tx = optax.adam(rate)

    def step(params: Any, state: Any, ids: Any, beside: Any) -> Any:
        def of(p: Any) -> Any:
            return task.loss({name: p["rows"][name][x] for name, x in ids.items()}, p["dense"], beside)

        updates, state = tx.update(jax.grad(of)(params), state, params)
        return optax.apply_updates(params, updates), state

    run, state = jax.jit(step, donate_argnums=(0, 1)), tx.init(params)
    for batch in task.batches(seed):
        params, state = run(params, state, *batch)
    return task.score({name: np.asarray(x) for name, x in params["rows"].items()}, params["dense"])


def in_tables(task: Task, dim: int, seed: int, rows: Any, **options: Any) -> float:
    """By a transform of rows; dense parameters by Adam, in any case."""
    params: Any = {"rows": made(task, dim, seed, **options), "dense": task.dense}
    tx = kvjax.optax.partition(dense=optax.adam(task.rate), tables=rows)

    def step(params: Any, state: Any, ids: Any, beside: Any) -> Any:
        def of(p: Any) -> Any:
            read = {name: p["rows"][name].lookup(x).astype(jnp.float32) for name, x in ids.items()}
            return task.loss(read, p["dense"], beside)

        grads = kvjax.grad(of)(kvjax.optax.caught_up(params, state, rows))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run, state = jax.jit(step), tx.init(params)
    for ids, beside in task.batches(seed):
        params, state = run(params, state, {name: kvjax.keys(x) for name, x in ids.items()}, beside)
    params = kvjax.optax.caught_up(params, state, rows)
    result = scored(task, params["rows"], params["dense"])
    dropped()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["items", "clicks"])
    parser.add_argument("--data")
    defaults = [("users", 4000), ("examples", 200_000), ("epochs", 8), ("seeds", 3), ("dim", 32), ("batch", 1024)]
    for option, default in defaults:
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--rate", type=float, help="of dense Adam, by default that of the task")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 3.0, 10.0], help="multiples of the dense rate")
    parser.add_argument("--count", choices=["auto", "global"], default="auto", help="of lazy Adam, as in rowwise")
    args = parser.parse_args()
    size = args.users if args.task == "items" else args.examples
    task = getattr(quality_tasks, args.task)(args.data, size, args.batch, args.epochs)
    task = dataclasses.replace(task, rate=args.rate or task.rate)
    steps = sum(1 for _ in task.batches(0))
    print(f"{args.task}: rows {task.rows}, {steps} steps of {args.batch}, Adam at {task.rate:g}")
    grid = Grid(title=f"{task.metric} of {args.seeds} seeds")
    for column in ("", *map(str, range(args.seeds)), "mean", "deviation", "seconds"):
        grid.add_column(column, justify="right" if column else "left")

    def row(name: str, run: Any) -> float:
        started = time.perf_counter()
        found = [run(seed) for seed in range(args.seeds)]
        numbers = [f"{x:.4f}" for x in (*found, np.mean(found), np.std(found))]
        grid.add_row(name, *numbers, f"{time.perf_counter() - started:.0f}")
        print(name, *numbers, flush=True)
        return float(np.mean(found))

    row("dense Adam", lambda seed: on_arrays(task, args.dim, seed, task.rate))
    rows = kvjax.optax.catch_up(optax.adam(task.rate))
    row("catch_up(adam), the same rate", lambda seed: in_tables(task, args.dim, seed, rows))
    own = kvjax.optax.gap_adam(task.rate)
    row("gap_adam, the same rate", lambda seed: in_tables(task, args.dim, seed, own))
    lazy = {m: kvjax.optax.rowwise(optax.adam(m * task.rate), args.count) for m in args.rates}
    found = {
        m: row(f"lazy Adam, {m:g} times the rate", lambda seed, tx=tx: in_tables(task, args.dim, seed, tx))
        for m, tx in lazy.items()
    }
    best = max(found, key=lambda m: found[m])
    for rounding in ("nearest", "stochastic"):
        options = {"dtype": "bfloat16", "rounding": rounding}
        row(
            f"{best:g} times the rate, bfloat16, {rounding}",
            lambda seed, options=options: in_tables(task, args.dim, seed, lazy[best], **options),
        )
    Console(width=110).print(grid)


if __name__ == "__main__":
    main()
