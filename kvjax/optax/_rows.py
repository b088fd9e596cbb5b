"""Rows of parameters and gradients: their lengths, what is nearer to 0, and functions of each leaf of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def per_leaf(results: int, f: Callable[..., Any], tree: Any, *trees: Any) -> list[Any]:
    """Trees of what a function makes of the leaves of some trees of the same form: as many as it has results."""
    leaves, form = jax.tree.flatten(tree)
    made = [f(*each) for each in zip(leaves, *(form.flatten_up_to(t) for t in trees), strict=True)]
    return [form.unflatten([out[i] for out in made]) for i in range(results)]


def norm(rows: jax.Array) -> jax.Array:
    """The Euclidean length of each row ``(..., 1)``; of a number its size."""
    return jnp.sqrt(jnp.sum(jnp.square(rows), -1, keepdims=True)) if rows.ndim else jnp.abs(rows)


def at_least(norms: jax.Array) -> jax.Array:
    """Norms to divide by: where there is none, 1."""
    return jnp.where(norms > 0, norms, 1.0)


def soft(x: jax.Array, threshold: Any) -> jax.Array:
    """Each element nearer to 0."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0.0)


def nearer(rows: jax.Array, size: Any) -> jax.Array:
    """Rows so much nearer to 0 in their Euclidean length; those that are not as long are 0."""
    return rows * jnp.maximum(1 - size / at_least(norm(rows)), 0.0)
