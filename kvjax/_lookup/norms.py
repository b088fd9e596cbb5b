"""Norms: looked-up rows, scaled down to a greatest norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._lookup.readable import Readable
from kvjax._values.errors import fail
from kvjax._values.numbers import is_real


def clip_norm(table: Readable, op: str, rows: jax.Array, max_norm: float | None) -> jax.Array:
    """Rows ``(..., dim)`` scaled down to at most this Euclidean norm, if there is one; `op` is for errors.

    The gradient at a zero row is the identity.
    """
    if max_norm is None:
        return rows
    if not is_real(max_norm) or max_norm <= 0:
        raise fail(ValueError, table.name, op, "max_norm > 0", repr(max_norm), "leave it out for rows of any norm")
    limit = float(max_norm)
    squares = jnp.sum(jnp.square(rows.astype(jnp.float32)), -1, keepdims=True)
    longer = squares > limit * limit
    scale = jnp.where(longer, limit / jnp.sqrt(jnp.where(longer, squares, 1)), 1)
    return (rows.astype(jnp.float32) * scale).astype(rows.dtype)
