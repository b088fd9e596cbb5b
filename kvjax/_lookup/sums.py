"""Sums and maxima of rows for the bags of `kvjax._values.combiners`, differentiable in both modes, to any order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._lookup import plain_bags
from kvjax._lookup.form import Form
from kvjax._ops import bags as bag_ops
from kvjax._values.combiners import Sums


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
    return _WEIGHTED.derivative("bags", bags, ids, weights, rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return bag_ops.bag_max(bags, ids, rows)[0]


@_bag_max.defjvp
def _bag_max_jvp(bags: int, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    ids, rows = primals
    positions = bag_ops.bag_max(bags, ids, jax.lax.stop_gradient(rows))[1]
    # XLA makes one call of the two.
    return _bag_max(bags, ids, rows), _PLACED.derivative("bags", bags, ids, positions, tangents[1])


CALLS = Sums(_bag_sum, _bag_max)
"""By custom calls, which add in the order of the rows."""

PLAIN = Sums(plain_bags.bag_sum, plain_bags.bag_max)
"""In plain JAX, wherever it runs."""
