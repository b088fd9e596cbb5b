"""Sums and maxima of rows that `kvjax._values.combiners` makes bags of, differentiable.

Sums, their expansion and their inner products are the gradients of one form that is linear in rows, weights and bags
(see ``kvjax/ffi/core/bag.h``), so the gradients of each of them are the other two, to any order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._lookup import plain_bags
from kvjax._ops import bags as bag_ops
from kvjax._values.combiners import Sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """See `bag_ops.bag_sum`; so below."""
    return bag_ops.bag_sum(bags, ids, weights, rows)


@jax.custom_vjp
def _expand(ids: jax.Array, weights: jax.Array, bags: jax.Array) -> jax.Array:
    return bag_ops.bag_expand(ids, weights, bags)


@jax.custom_vjp
def _dot(ids: jax.Array, rows: jax.Array, bags: jax.Array) -> jax.Array:
    return bag_ops.bag_dot(ids, rows, bags)


def _sum_bwd(bags: int, residuals: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    ids, weights, rows = residuals
    return None, _dot(ids, rows, g), _expand(ids, weights, g)


def _expand_bwd(residuals: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    ids, weights, bags = residuals
    return None, _dot(ids, g, bags), bag_sum(bags.shape[0], ids, weights, g)


def _dot_bwd(residuals: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    ids, rows, bags = residuals
    return None, _expand(ids, g, bags), bag_sum(bags.shape[0], ids, g, rows)


bag_sum.defvjp(lambda bags, *args: (bag_sum(bags, *args), args), _sum_bwd)
_expand.defvjp(lambda *args: (_expand(*args), args), _expand_bwd)
_dot.defvjp(lambda *args: (_dot(*args), args), _dot_bwd)


@jax.custom_vjp
def _taken(ids: jax.Array, positions: jax.Array, bags: jax.Array, rows: jax.Array) -> jax.Array:
    """The bags, as elements of the rows at these positions."""
    return bags


@jax.custom_vjp
def _place(ids: jax.Array, positions: jax.Array, bags: jax.Array) -> jax.Array:
    return bag_ops.bag_place(ids, positions, bags)


def _taken_bwd(residuals: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    ids, positions = residuals
    return None, None, None, _place(ids, positions, g)


def _place_bwd(positions: jax.Array, g: jax.Array) -> tuple[Any, ...]:
    if g.shape[0] == 0:
        return None, None, jnp.zeros(positions.shape, g.dtype)
    return None, None, jnp.where(positions < 0, 0, jnp.take_along_axis(g, jnp.maximum(positions, 0), 0))


_taken.defvjp(lambda *args: (_taken(*args), args[:2]), _taken_bwd)
_place.defvjp(lambda *args: (_place(*args), args[1]), _place_bwd)


def _bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> Any:
    out, positions = bag_ops.bag_max(bags, ids, jax.lax.stop_gradient(rows))
    return _taken(ids, positions, out, rows)


CALLS = Sums(bag_sum, _bag_max)
"""By custom calls, which add in the order of the rows."""

PLAIN = Sums(plain_bags.bag_sum, plain_bags.bag_max)
"""In plain JAX, wherever it runs."""
