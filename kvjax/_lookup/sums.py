"""Sums and maxima of rows for bags: by custom calls, differentiable in both modes, to any order; or in plain JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._lookup.form import Form
from kvjax._ops import bags as bag_ops
from kvjax._values.bags import Sums


def _taken(bags: int, ids: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
    """Bags ``(bags, dim)``: the elements of the rows at their positions; 0 where there is none."""
    if rows.shape[0] == 0:
        return jnp.zeros(positions.shape, rows.dtype)
    return jnp.where(positions < 0, 0, jnp.take_along_axis(rows, jnp.maximum(positions, 0), 0))


# Sums, their expansion and their inner products; see ``kvjax/ffi/core/bag.h``.
_WEIGHTED = Form(
    "kvjax_weighted_bags",
    {
        "weights": ("kvjax_bag_dot", lambda bags, *operands: bag_ops.bag_dot(*operands)),
        "rows": ("kvjax_bag_expand", lambda bags, *operands: bag_ops.bag_expand(*operands)),
        "bags": ("kvjax_bag_sum", bag_ops.bag_sum),
    },
)

# Of rows at certain positions.
_PLACED = Form(
    "kvjax_placed_bags",
    {
        "rows": ("kvjax_bag_place", lambda bags, *operands: bag_ops.bag_place(*operands)),
        "bags": ("", _taken),
    },
)


def _bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    return _WEIGHTED.bags(bags, ids, weights, rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return bag_ops.bag_max(bags, ids, rows)[0]


@_bag_max.defjvp
def _bag_max_jvp(bags: int, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    ids, rows = primals
    positions = bag_ops.bag_max(bags, ids, jax.lax.stop_gradient(rows))[1]
    # XLA makes one call of the two.
    return _bag_max(bags, ids, rows), _PLACED.bags(bags, ids, positions, tangents[1])


def _plain_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(weights[:, None] * rows, _inside(bags, ids), bags)


def _plain_max(bags: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    ids = _inside(bags, ids)
    most = jax.ops.segment_max(rows, ids, bags)  # of none the least that there is
    filled = jax.ops.segment_sum(jnp.ones(ids.shape, jnp.int32), ids, bags) > 0
    return jnp.where(filled[:, None], most, jnp.float32(0))


def plain_bag_ids(lengths: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
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


CALLS = Sums(_bag_sum, _bag_max)
"""By custom calls, which add in the order of the rows."""

PLAIN = Sums(_plain_sum, _plain_max)
"""In plain JAX, wherever it runs."""
