"""Pooling of rows into bags, differentiable: sum, mean, sqrtn and max.

Sums, their spreading and their inner products are the gradients of one form that is linear in rows, weights and bags
(see ``kvjax/ffi/core/bag.h``), so the gradients of each of them are the other two, to any order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import _bag_ops

COMBINERS = ("sum", "mean", "sqrtn", "max")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """See `_bag_ops.bag_sum`; so below."""
    return _bag_ops.bag_sum(bags, ids, weights, rows)


@jax.custom_vjp
def _spread(ids, weights, bags):
    return _bag_ops.bag_spread(ids, weights, bags)


@jax.custom_vjp
def _dot(ids, rows, bags):
    return _bag_ops.bag_dot(ids, rows, bags)


def _sum_bwd(bags, residuals, g):
    ids, weights, rows = residuals
    return None, _dot(ids, rows, g), _spread(ids, weights, g)


def _spread_bwd(residuals, g):
    ids, weights, bags = residuals
    return None, _dot(ids, g, bags), bag_sum(bags.shape[0], ids, weights, g)


def _dot_bwd(residuals, g):
    ids, rows, bags = residuals
    return None, _spread(ids, g, bags), bag_sum(bags.shape[0], ids, g, rows)


bag_sum.defvjp(lambda bags, *args: (bag_sum(bags, *args), args), _sum_bwd)
_spread.defvjp(lambda *args: (_spread(*args), args), _spread_bwd)
_dot.defvjp(lambda *args: (_dot(*args), args), _dot_bwd)


@jax.custom_vjp
def _taken(ids, positions, bags, rows):
    """The bags, as elements of the rows at these positions."""
    return bags


@jax.custom_vjp
def _place(ids, positions, bags):
    return _bag_ops.bag_place(ids, positions, bags)


def _taken_bwd(residuals, g):
    ids, positions = residuals
    return None, None, None, _place(ids, positions, g)


def _place_bwd(positions, g):
    if g.shape[0] == 0:
        return None, None, jnp.zeros(positions.shape, g.dtype)
    return None, None, jnp.where(positions < 0, 0, jnp.take_along_axis(g, jnp.maximum(positions, 0), 0))


_taken.defvjp(lambda *args: (_taken(*args), args[:2]), _taken_bwd)
_place.defvjp(lambda *args: (_place(*args), args[1]), _place_bwd)


def _bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> Any:
    out, positions = _bag_ops.bag_max(bags, ids, jax.lax.stop_gradient(rows))
    return _taken(ids, positions, out, rows)


def counts(bags: int, ids: jax.Array) -> jax.Array:
    """How many rows each bag has, ``(bags,)`` float32."""
    ones = jnp.ones(ids.shape, jnp.float32)
    return _bag_ops.bag_sum(bags, ids, ones, ones[:, None])[:, 0]


def pool(combiner: str, bags: int, ids: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Bags ``(bags, dim)`` float32 of rows ``(n, dim)`` float32; what would be divided by 0 is 0.

    ids: ``(n,)`` int32, those outside the bags mark padding; weights: ``(n,)`` float32, by default 1.
    """
    if combiner == "max":
        return _bag_max(bags, ids, rows)
    ones = jnp.ones(ids.shape, jnp.float32)
    total: Any = bag_sum(bags, ids, ones if weights is None else weights, rows)
    if combiner == "sum":
        return total
    if weights is None:
        divisor: Any = counts(bags, ids)
    else:
        terms = weights if combiner == "mean" else weights * weights
        column: Any = bag_sum(bags, ids, ones, terms[:, None])
        divisor = column[:, 0]
    # The inner where keeps the gradient of the branch that is not taken finite.
    safe = jnp.where(divisor == 0, 1, divisor)
    scale = jnp.where(divisor == 0, 0, 1 / (safe if combiner == "mean" else jnp.sqrt(safe)))
    return total * scale[:, None]


def clip_norm(rows: jax.Array, max_norm: float) -> jax.Array:
    """Rows ``(..., dim)`` scaled down to at most this Euclidean norm; the gradient at a zero row is the identity."""
    squares = jnp.sum(jnp.square(rows.astype(jnp.float32)), -1, keepdims=True)
    longer = squares > max_norm * max_norm
    scale = jnp.where(longer, max_norm / jnp.sqrt(jnp.where(longer, squares, 1)), 1)
    return (rows.astype(jnp.float32) * scale).astype(rows.dtype)
