"""One function per FFI target of pooling; see `kvjax._ops`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._ops import array, read


def bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Bags ``(bags, dim)``: weighted sums of rows ``(n, dim)``; ids ``(n,)`` int32 outside the bags are padding."""
    return read("kvjax_bag_sum", array((bags, rows.shape[1]), jnp.float32), ids, weights, rows)


def bag_spread(ids: jax.Array, weights: jax.Array, bags: jax.Array) -> jax.Array:
    """Rows ``(n, dim)``: the bag of each, times its weight."""
    return read("kvjax_bag_expand", array((ids.shape[0], bags.shape[1]), jnp.float32), ids, weights, bags)


def bag_dot(ids: jax.Array, rows: jax.Array, bags: jax.Array) -> jax.Array:
    """Weights ``(n,)``: the inner product of each row and its bag."""
    return read("kvjax_bag_dot", array(ids.shape, jnp.float32), ids, rows, bags)


def bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bags ``(bags, dim)``, the largest of each column, and the positions ``(bags, dim)`` int32 they come from."""
    shape = (bags, rows.shape[1])
    return read("kvjax_bag_max", (array(shape, jnp.float32), array(shape, jnp.int32)), ids, rows)


def bag_place(ids: jax.Array, positions: jax.Array, bags: jax.Array) -> jax.Array:
    """Rows ``(n, dim)``: the elements of the bags at their positions, 0 elsewhere."""
    return read("kvjax_bag_place", array((ids.shape[0], bags.shape[1]), jnp.float32), ids, positions, bags)


def bag_ids(name: str, lengths: jax.Array, n: int, spread: bool) -> tuple[jax.Array, jax.Array]:
    """Ids ``(n,)`` int32 of bags that stand one after the other, then -1; and status.

    Lengths that do not fit are refused, or if `spread` says that other devices make the same call, told by the status.
    """
    results = (array((n,), jnp.int32), array((), jnp.uint32))
    return read("kvjax_bag_ids", results, lengths, table=name, sharded=np.bool_(spread))
