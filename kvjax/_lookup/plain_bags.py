"""Bags in plain JAX, for frozen tables: the sums and maxima of `sums.py` without a custom call."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """See `kvjax._ops.bags.bag_sum`; so below."""
    return jax.ops.segment_sum(weights[:, None] * rows, _inside(bags, ids), bags)


def bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    ids = _inside(bags, ids)
    most = jax.ops.segment_max(rows, ids, bags)  # of none the least that there is
    filled = jax.ops.segment_sum(jnp.ones(ids.shape, jnp.int32), ids, bags) > 0
    return jnp.where(filled[:, None], most, jnp.float32(0))


def bag_ids(lengths: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The ids ``(n,)`` of bags that stand one after the other, then -1; and whether the lengths fit, ``()`` bool."""
    # As numbers of 32 bits the first sum that is more than n is exact, whatever comes after it.
    ends = jnp.cumsum(jnp.clip(lengths, 0, n).astype(jnp.uint32))
    fit = jnp.all((lengths >= 0) & (lengths <= n) & (ends <= jnp.asarray(n, jnp.uint32)))
    ended = jnp.zeros((n,), jnp.int32).at[ends].add(1, mode="drop")
    ids = jnp.cumsum(ended, dtype=jnp.int32)  # how many bags have ended before each key
    return jnp.where(ids < lengths.shape[0], ids, jnp.int32(-1)), fit


def _inside(bags: int, ids: jax.Array) -> jax.Array:
    """Ids of which those outside the bags are dropped, where JAX would count negative ones from the end."""
    return jnp.where((ids >= 0) & (ids < bags), ids, jnp.int32(bags))
