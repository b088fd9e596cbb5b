"""A training step on kvjax's tables beside one on static arrays; `gpu.py` times it, and says what it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import in_turns
from gpu_sizes import Size, filled

import kvjax

TABLES, DIM = 10, 128

Params = dict[str, Any]


def dense_net(key: jax.Array) -> Params:
    pairs = TABLES * (TABLES - 1) // 2
    return {"hidden": jax.random.normal(key, (pairs, 64)) * 0.1, "out": jnp.zeros((64, 1))}


def loss_of(net: Params, rows: list[jax.Array], labels: jax.Array) -> jax.Array:
    features = jnp.stack(rows, 1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    above = np.triu_indices(TABLES, 1)
    logits = jax.nn.relu(products[:, *above] @ net["hidden"]) @ net["out"]
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()


def ours(size: Size, tx: optax.GradientTransformation) -> tuple[Callable[..., Any], Any]:
    """A step of ``((params, state), keys, labels)``, and what it begins with."""
    both = kvjax.optax.partition(dense=tx, tables=kvjax.optax.rowwise(tx, count="global"))

    def loss(params, keys, labels):
        return loss_of(params["net"], [t.lookup(k) for t, k in zip(params["tables"], keys, strict=True)], labels)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carried, keys, labels):
        params, state = carried
        value, grads = kvjax.value_and_grad(loss)(params, keys, labels)
        updates, state = both.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    tables = [filled(f"step{i}", DIM, size.rows, size.rows) for i in range(TABLES)]
    params = {"net": dense_net(jax.random.key(0)), "tables": tables}
    return step, (params, both.init(params))


def static(tables: list[jax.Array], tx: optax.GradientTransformation, unique: bool) -> tuple[Callable[..., Any], Any]:
    """The same of ``((params, state), ids, labels)``, where tables are arrays ``(rows, dim)``."""

    def merged(table, ids, grads):
        """Row ids to be written, and the sum of each one's gradients; without `unique` equal ids are there as often as
        before, all with the sum."""
        if unique:
            distinct, places = jnp.unique(ids, return_inverse=True, size=len(ids), fill_value=len(table))
            return distinct, jax.ops.segment_sum(grads, places, len(ids))
        first = jnp.full(len(table), len(ids)).at[ids].min(jnp.arange(len(ids)))[ids]
        return ids, jnp.zeros_like(grads).at[first].add(grads)[first]

    def touched(table, state, ids, grads):
        """The array and its state after a step on the rows of these ids alone."""
        rows, sums = merged(table, ids, grads)
        by_row = jax.tree.map(lambda x: x.ndim == 2, state)
        some = jax.tree.map(lambda x, yes: x.at[rows].get(mode="clip") if yes else x, state, by_row)
        updates, some = tx.update(sums, some)

        def put(whole, part, yes):
            return whole.at[rows].set(part, mode="drop", unique_indices=unique) if yes else part

        table = put(table, table.at[rows].get(mode="clip") + updates, True)
        return table, jax.tree.map(put, state, some, by_row)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carried, ids, labels):
        params, state = carried
        rows = [table[i] for table, i in zip(params["tables"], ids, strict=True)]
        value, (net_grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(params["net"], rows, labels)
        updates, net_state = tx.update(net_grads, state["net"], params["net"])
        pairs = [touched(*each) for each in zip(params["tables"], state["tables"], ids, row_grads, strict=True)]
        params = {"net": optax.apply_updates(params["net"], updates), "tables": [table for table, _ in pairs]}
        return (params, {"net": net_state, "tables": [each for _, each in pairs]}), value

    params = {"net": dense_net(jax.random.key(0)), "tables": tables}
    return step, (params, {"net": tx.init(params["net"]), "tables": [tx.init(t) for t in tables]})


def rows_of(tables: list[kvjax.Table], size: Size) -> list[jax.Array]:
    """The rows of all ids, for the static arrays to begin with."""
    everything = kvjax.keys(kvjax.hash_keys(np.arange(size.rows)))
    return [table.lookup(everything) for table in tables]


def in_chain(step: Callable[..., Any], state: Any, *operands: list[Any]) -> Callable[[int], Any]:
    """A way in which each call takes the first thing that the call before it has given."""

    def way(number: int) -> Any:
        nonlocal state
        state, *rest = step(state, *(o[number % len(o)] for o in operands))
        return state, rest

    return way


def measure_step(size: Size) -> dict[str, Any]:
    rng, tx = np.random.default_rng(0), optax.adam(1e-3)
    ids = [rng.integers(0, size.rows, (TABLES, size.samples)) for _ in range(8)]
    labels = [jnp.asarray(rng.integers(0, 2, size.samples), jnp.float32) for _ in ids]
    keys = [[jax.device_put(kvjax.keys(kvjax.hash_keys(i))) for i in each] for each in ids]
    numbers = [[jnp.asarray(i, jnp.int32) for i in each] for each in ids]
    begin = ours(size, tx)
    ways = {"kvjax": in_chain(*begin, keys, labels)}
    for name, unique in (("static, unique", True), ("static", False)):
        arrays = rows_of(begin[1][0]["tables"], size)
        ways[name] = in_chain(*static(arrays, tx, unique), numbers, labels)
    seconds = in_turns(ways, size.turns, queued=size.queued)
    for name in list(kvjax.tables()):
        kvjax.drop_table(name)
    best = min(seconds["static"], seconds["static, unique"])
    return {
        "seconds": seconds["kvjax"],
        "static_seconds": seconds["static"],
        "static_unique_seconds": seconds["static, unique"],
        "ratio_to_unique": seconds["kvjax"] / seconds["static, unique"],
        "ratio_to_best": seconds["kvjax"] / best,
    }
