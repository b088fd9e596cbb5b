"""What lazy rows and 16 bits cost in quality: a factorisation with an in-batch softmax, Recall@20 over all items.

    python benchmarks/quality.py [--data lightgcn_split.npz] [--users 4000] [--epochs 15] [--seeds 3] [--rates 1 10 30]

A gradient that comes alone moves a row of dense Adam by 1 / sqrt(1 - b2) = 32 times the rate in all, most of it in the
ten steps after, and a lazy row by the rate: so rows that are rarely touched want a rate in between.

The data has CSR arrays train_ptr, train_item, test_ptr, test_item; without it groups of users and items are made up.
Compared are dense Adam on arrays, lazy Adam in tables at multiples of its rate, and the best of these with bfloat16
rows, rounded to nearest and stochastically. All start from rows of the same distribution.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table as Grid

import kvjax

RATE, TEMPERATURE, TOP = 3e-3, 0.1, 20


@dataclasses.dataclass
class Data:
    """Pairs ``(n, 2)`` of user and item."""

    users: int
    items: int
    train: np.ndarray
    test: np.ndarray


def real(path: str, users: int) -> Data:
    """The first users of a split."""
    arrays = np.load(path)

    def pairs(part: str) -> np.ndarray:
        ptr = arrays[f"{part}_ptr"][: users + 1].astype(np.int64)
        return np.stack([np.repeat(np.arange(users), np.diff(ptr)), arrays[f"{part}_item"][: ptr[-1]]], 1)

    users = min(users, len(arrays["train_ptr"]) - 1)
    return Data(users, int(arrays["num_items"]), pairs("train"), pairs("test"))


def made_up(users: int, items: int = 3000, groups: int = 30, each: int = 20) -> Data:
    """Users like the items of two groups, some items more than others."""
    rng = np.random.default_rng(0)
    group, liked = rng.integers(0, groups, items), rng.integers(0, groups, (users, 2))
    fame = rng.pareto(1.2, items) + 0.1
    chosen = []
    for user in range(users):
        weight = fame * np.isin(group, liked[user])
        chosen.append(rng.choice(items, each, replace=False, p=weight / weight.sum()))
    pairs = np.stack([np.repeat(np.arange(users), each), np.concatenate(chosen)], 1)
    test = np.tile(np.arange(each) < each // 5, users)
    return Data(users, items, pairs[~test], pairs[test])


def loss(user: Any, item: Any, log_popularity: Any) -> Any:
    """Of rows ``(batch, dim)``: each pair against the items of the batch, corrected by how often these are drawn."""
    user, item = (x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) for x in (user, item))
    logits = user @ item.T / TEMPERATURE - log_popularity[None]
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def recall(data: Data, user: np.ndarray, item: np.ndarray) -> float:
    """Mean over users of the part of their test items among the first `TOP` that are not in training."""
    item = item / (np.linalg.norm(item, axis=1, keepdims=True) + 1e-6)
    found, total = 0.0, 0
    for begin in range(0, data.users, 500):
        rows = np.arange(begin, min(begin + 500, data.users))
        scores = user[rows] @ item.T
        some = (data.train[:, 0] >= begin) & (data.train[:, 0] < begin + 500)
        scores[data.train[some, 0] - begin, data.train[some, 1]] = -np.inf
        top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
        for row in rows:
            wanted = data.test[data.test[:, 0] == row, 1]
            if len(wanted):
                found, total = found + np.isin(wanted, top[row - begin]).sum() / len(wanted), total + 1
    return found / max(total, 1)


def batches(data: Data, size: int, epochs: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    count = np.bincount(data.train[:, 1], minlength=data.items).astype(np.float32)
    popularity = np.log(np.maximum(count, 1) / len(data.train))
    for _ in range(epochs):
        order = rng.permutation(len(data.train))
        for begin in range(0, len(order) - size + 1, size):
            pairs = data.train[order[begin : begin + size]]
            yield pairs[:, 0], pairs[:, 1], popularity[pairs[:, 1]]


def dense(data: Data, dim: int, args: Any, seed: int, rate: float) -> float:
    keys = jax.random.split(jax.random.key(seed))
    params = [0.1 * jax.random.normal(key, (n, dim)) for key, n in zip(keys, (data.users, data.items), strict=True)]
    tx = optax.adam(rate)

    def step(params: Any, state: Any, user: Any, item: Any, popularity: Any) -> Any:
        grads = jax.grad(lambda p: loss(p[0][user], p[1][item], popularity))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run, state = jax.jit(step, donate_argnums=(0, 1)), tx.init(params)
    for batch in batches(data, args.batch, args.epochs, seed):
        params, state = run(params, state, *batch)
    return recall(data, *map(np.asarray, params))


def tables(data: Data, dim: int, args: Any, seed: int, rate: float, options: Any = None) -> float:
    start = kvjax.initializers.normal(0.1)
    params: Any = {
        name: kvjax.get_table(f"quality_{name}", dim=dim, initializer=start, seed=2 * seed + i, **(options or {}))
        for i, name in enumerate(("user", "item"))
    }
    tx = kvjax.optax.partition(dense=optax.sgd(rate), tables=optax.adam(rate))

    def step(params: Any, state: Any, user: Any, item: Any, popularity: Any) -> Any:
        def of(p: Any) -> Any:
            user_rows, item_rows = (p[n].lookup(k).astype(jnp.float32) for n, k in (("user", user), ("item", item)))
            return loss(user_rows, item_rows, popularity)

        updates, state = tx.update(kvjax.grad(of)(params), state, params)
        return optax.apply_updates(params, updates), state

    run, state = jax.jit(step), tx.init(params)
    for user, item, popularity in batches(data, args.batch, args.epochs, seed):
        params, state = run(params, state, kvjax.keys(user), kvjax.keys(item), popularity)
    rows = [params[n].lookup(np.arange(m)) for n, m in (("user", data.users), ("item", data.items))]
    result = recall(data, *(np.asarray(x, np.float32) for x in rows))
    for table in params.values():
        kvjax.drop_table(table.name)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    for option, default in [("users", 4000), ("epochs", 15), ("seeds", 3), ("dim", 32), ("batch", 1024)]:
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0, 30.0], help="multiples of the dense rate")
    args = parser.parse_args()
    data = real(args.data, args.users) if args.data else made_up(args.users)
    print(f"{data.users} users, {data.items} items, {len(data.train)} pairs, {len(data.test)} to be found")
    grid = Grid(title=f"Recall@{TOP}, mean and standard deviation of {args.seeds} seeds")
    for column in ("", "mean", "deviation", "seconds"):
        grid.add_column(column, justify="right" if column else "left")

    def row(name: str, run: Any) -> float:
        started = time.perf_counter()
        found = [run(seed) for seed in range(args.seeds)]
        grid.add_row(name, f"{np.mean(found):.4f}", f"{np.std(found):.4f}", f"{time.perf_counter() - started:.0f}")
        print(name, *(f"{x:.4f}" for x in found), flush=True)
        return float(np.mean(found))

    row("dense Adam", lambda seed: dense(data, args.dim, args, seed, RATE))
    found = {
        m: row(f"lazy Adam, {m:g} times the rate", lambda seed, m=m: tables(data, args.dim, args, seed, m * RATE))
        for m in args.rates
    }
    best = max(found, key=lambda m: found[m])
    for rounding in ("nearest", "stochastic"):
        options = {"dtype": "bfloat16", "rounding": rounding}
        row(
            f"{best:g} times the rate, bfloat16, {rounding}",
            lambda seed, options=options: tables(data, args.dim, args, seed, best * RATE, options),
        )
    Console(width=100).print(grid)


if __name__ == "__main__":
    main()
