"""The pairs of ``score.py``: calls of kvjax, each with what a user of JAX or NumPy would do instead."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import zipf

import kvjax

RATE, B1, B2, EPS = 1e-2, 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int = 1_000_000
    keys: int = 65_536
    dims: tuple[int, ...] = (16, 64, 128)
    turns: int = 25


SMOKE = Size(rows=3_000, keys=256, dims=(4,), turns=3)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two calls of what is compared, `ours` and `other`; each takes the number of the turn."""

    what: str
    beside: str
    ours: Callable[[int], Any]
    other: Callable[[int], Any]


# ---- what keys come -----------------------------------------------------------------------------------------------


def uniform(rng: np.random.Generator, size: Size) -> np.ndarray:
    return rng.integers(0, size.rows, size.keys)


def keys_of(ids: np.ndarray) -> kvjax.Keys:
    return jax.block_until_ready(kvjax.keys(kvjax.hash_keys(ids)))


def filled(name: str, dim: int, rows: int, **options: Any) -> kvjax.Table:
    table = kvjax.get_table(name, dim=dim, initializer=0.0, **options)
    for ids in np.array_split(np.arange(rows), max(1, rows // 65_536)):
        table = table.upsert(keys_of(ids), np.zeros((len(ids), dim), np.float32))
    return jax.block_until_ready(table)


class Loop:
    """Steps, one after the other: `step` takes the state and a batch, and returns the next state and a result."""

    def __init__(self, step: Callable[..., Any], *state: Any) -> None:
        self.step, self.state = jax.jit(step, donate_argnums=tuple(range(len(state)))), state

    def __call__(self, *batch: Any) -> Any:
        *self.state, out = self.step(*self.state, *batch)
        return self.state, out


# ---- one table ----------------------------------------------------------------------------------------------------


def lookups(size: Size, dim: int) -> Iterator[Pair]:
    rng = np.random.default_rng(0)
    table, static = filled(f"lookup{dim}", dim, size.rows), jnp.zeros((size.rows, dim))
    ids = [uniform(rng, size) for _ in range(8)]
    ours, other = [keys_of(i) for i in ids], [jnp.asarray(i, jnp.int32) for i in ids]
    look = jax.jit(lambda table, keys: table.lookup(keys))
    take = jax.jit(lambda static, ids: static.at[ids].get(mode="promise_in_bounds"))
    yield Pair(
        f"lookup, dim {dim}", "jnp.take", lambda t: look(table, ours[t % 8]), lambda t: take(static, other[t % 8])
    )
    insert = Loop(lambda table, keys: table.lookup_or_insert(keys)[::-1], filled(f"insert{dim}", dim, size.rows))
    new = max(1, size.keys // 20)

    def with_new(turn: int) -> kvjax.Keys:
        some = ids[turn % 8].copy()
        some[:new] = size.rows + turn * new + np.arange(new)
        return keys_of(some)

    ready = [with_new(turn) for turn in range(size.turns + 2)]
    yield Pair(
        f"lookup_or_insert, 5 % new, dim {dim}",
        "jnp.take",
        lambda t: insert(ready[t]),
        lambda t: take(static, other[t % 8]),
    )


def train_steps(size: Size, dim: int) -> Iterator[Pair]:
    """Lookup, loss, gradients and Adam under jit, beside rows of a static array that are updated by hand."""
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=(size.keys, dim)), jnp.float32)
    tx = kvjax.optax.partition(dense=optax.set_to_zero(), tables=optax.adam(RATE, B1, B2, EPS))

    def step(table: Any, state: Any, keys: Any) -> Any:
        params = {"table": table}
        loss, grads = kvjax.value_and_grad(lambda p: jnp.sum(p["table"].lookup(keys) * cotangent))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates)["table"], state, loss

    def static_step(rows: jax.Array, state: Any, ids: jax.Array) -> Any:
        mu, nu, count = state
        distinct, inverse = jnp.unique(ids, return_inverse=True, size=len(ids), fill_value=len(rows))
        loss, grads = jax.value_and_grad(lambda r: jnp.sum(r[inverse] * cotangent))(rows.at[distinct].get(mode="clip"))
        count, put = count + 1, {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
        m = B1 * mu.at[distinct].get(mode="clip") + (1 - B1) * grads
        n = B2 * nu.at[distinct].get(mode="clip") + (1 - B2) * grads**2
        move = -RATE * (m / (1 - B1**count)) / (jnp.sqrt(n / (1 - B2**count)) + EPS)
        state = mu.at[distinct].set(m, **put), nu.at[distinct].set(n, **put), count
        return rows.at[distinct].add(move, **put), state, loss

    for name in ("uniform", "Zipf"):
        ids = [uniform(rng, size) if name == "uniform" else zipf(rng, size.rows, size.keys) for _ in range(8)]
        ours, other = [keys_of(i) for i in ids], [jnp.asarray(i, jnp.int32) for i in ids]
        table = filled(f"train{dim}", dim, size.rows)
        mine = Loop(step, table, tx.init({"table": table}))
        zeros = [jnp.zeros((size.rows, dim)) for _ in range(3)]
        theirs = Loop(static_step, zeros[0], (zeros[1], zeros[2], jnp.zeros((), jnp.int32)))
        yield Pair(
            f"training step, Adam, {name}, dim {dim}",
            "static array by hand",
            lambda t, mine=mine, ours=ours: mine(ours[t % 8]),
            lambda t, theirs=theirs, other=other: theirs(other[t % 8]),
        )
        kvjax.drop_table(f"train{dim}")


# ---- a model ------------------------------------------------------------------------------------------------------


def small_tables(size: Size) -> Iterator[Pair]:
    """Biased matrix factorisation with negatives: few rows, which many keys of a step share."""
    rng, users, items, dim = np.random.default_rng(2), 6_040, 3_706, 33
    batch, negatives = max(8, size.keys // 8), size.keys
    tx = optax.adam(1e-3)

    def loss(u: jax.Array, i: jax.Array, n: jax.Array) -> jax.Array:
        spread = jnp.repeat(u, negatives // batch, axis=0)
        positive = (u[:, :-1] * i[:, :-1]).sum(-1) + i[:, -1]
        negative = (spread[:, :-1] * n[:, :-1]).sum(-1) + n[:, -1]
        return jax.nn.softplus(-positive).mean() + jax.nn.softplus(negative).mean()

    both = kvjax.optax.partition(dense=tx, tables=tx)

    def step(params: Any, state: Any, u: Any, i: Any, n: Any) -> Any:
        value, grads = kvjax.value_and_grad(
            lambda p: loss(p["user"].lookup(u), p["item"].lookup(i), p["item"].lookup(n))
        )(params)
        updates, state = both.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def static_step(params: Any, state: Any, u: Any, i: Any, n: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(p["user"][u], p["item"][i], p["item"][n]))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    tables = {"user": filled("user", dim, users), "item": filled("item", dim, items)}
    arrays = {"user": jnp.zeros((users, dim)), "item": jnp.zeros((items, dim))}
    mine, theirs = Loop(step, tables, both.init(tables)), Loop(static_step, arrays, tx.init(arrays))
    ids = [
        (rng.integers(0, users, batch), rng.integers(0, items, batch), rng.integers(0, items, negatives))
        for _ in range(8)
    ]
    ours = [tuple(keys_of(x) for x in i) for i in ids]
    other = [tuple(jnp.asarray(x, jnp.int32) for x in i) for i in ids]
    yield Pair(
        "factorisation, 9,746 rows",
        "nn.Embed's arrays, optax",
        lambda t: mine(*ours[t % 8]),
        lambda t: theirs(*other[t % 8]),
    )


def many_tables(size: Size) -> Iterator[Pair]:
    """26 tables of a CTR model, beside one table that has all of their keys."""
    rng, count, dim = np.random.default_rng(3), 26, 16
    each, rows = max(1, size.keys // count), max(26, size.rows // count)
    cotangent = jnp.asarray(rng.normal(size=(count, each, dim)), jnp.float32)
    tx = kvjax.optax.partition(dense=optax.set_to_zero(), tables=optax.adam(RATE))

    def step(tables: Any, state: Any, keys: Any) -> Any:
        def loss(tables: Any) -> jax.Array:
            looked_up = [t.lookup(k) for t, k in zip(tables, keys, strict=True)]
            return sum(
                jnp.sum(r.reshape(-1, each, dim) * c) for r, c in zip(looked_up, parts[len(tables)], strict=True)
            )

        value, grads = kvjax.value_and_grad(loss)(tables)
        updates, state = tx.update(grads, state, tables)
        return optax.apply_updates(tables, updates), state, value

    parts = {1: [cotangent], count: list(cotangent[:, None])}
    several = [filled(f"feature{i}", dim, rows) for i in range(count)]
    one = [filled("features", dim, rows * count)]
    mine, theirs = Loop(step, several, tx.init(several)), Loop(step, one, tx.init(one))
    ids = [rng.integers(0, rows, (count, each)) for _ in range(8)]
    ours = [[keys_of(x) for x in i] for i in ids]
    other = [[keys_of((i + rows * np.arange(count)[:, None]).ravel())] for i in ids]
    yield Pair("26 tables", "one table of their keys", lambda t: mine(ours[t % 8]), lambda t: theirs(other[t % 8]))


def eviction(size: Size) -> Iterator[Pair]:
    """A table at its capacity: each step a tenth of the keys is new, and as many rows leave."""
    rng, grads = np.random.default_rng(4), jnp.ones((size.keys, 16))
    sgd = optax.sgd(0.1)

    def step(table: Any, keys: Any) -> Any:
        return table.apply(sgd, kvjax.SparseRows(keys, grads))[0], None

    full = Loop(step, filled("full", 16, size.rows, max_capacity=size.rows, on_full="evict"))
    free = Loop(step, filled("free", 16, size.rows))
    new = size.keys // 10

    def some(turn: int) -> kvjax.Keys:
        ids = uniform(rng, size)
        ids[:new] = size.rows + turn * new + np.arange(new)
        return keys_of(ids)

    ready = [some(turn) for turn in range(size.turns + 2)]
    yield Pair("step of a full table", "the same without a limit", lambda t: full(ready[t]), lambda t: free(ready[t]))


def small_calls(_: Size) -> Iterator[Pair]:
    table = filled("few", 16, 100)
    keys = keys_of(np.arange(8))
    look, empty = jax.jit(lambda table, keys: table.lookup(keys)), jax.jit(lambda table, keys: keys.words ^ 1)

    def often(call: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda turn: [jax.block_until_ready(call(table, keys)) for _ in range(200)][-1]

    yield Pair("200 lookups of 8 keys", "an empty function of them", often(look), often(empty))


def exports(size: Size, dim: int) -> Iterator[Pair]:
    table = filled(f"export{dim}", dim, size.rows)
    arrays = np.arange(size.rows), np.zeros((size.rows, dim), np.float32), np.zeros(size.rows), np.zeros(size.rows)
    order = np.random.default_rng(5).permutation(size.rows)
    yield Pair(
        f"export, sorted, dim {dim}", "NumPy: rows in that order", lambda t: table.export().values,
        lambda t: [a[order] for a in arrays][1],
    )  # fmt: skip


def all_of(size: Size) -> list[Callable[[], Iterator[Pair]]]:
    """In groups, whose tables are dropped before the next one."""
    groups: list[Callable[[], Iterator[Pair]]] = []
    for dim in size.dims:
        groups += [functools.partial(f, size, dim) for f in (lookups, train_steps, exports)]
    return groups + [functools.partial(f, size) for f in (small_tables, many_tables, eviction, small_calls)]
