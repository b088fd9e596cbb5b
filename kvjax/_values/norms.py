"""Norms: looked-up rows, scaled down to a greatest norm; over NumPy or over JAX."""

from __future__ import annotations

from typing import Any

from kvjax._values.errors import fail
from kvjax._values.numbers import is_real


def clip_norm(xp: Any, rows: Any, max_norm: float | None, table: str, op: str) -> Any:
    """Rows ``(..., dim)`` scaled down to at most this Euclidean norm, if there is one.

    The gradient at a zero row is the identity. A row whose squared norm float32 cannot hold becomes zeros: to look for
    it would take a second pass over each row (it doubles the time of `kvjax.constraints.max_norm`).

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      rows: of any dtype of a table, which stays.
      max_norm: a positive number, or None.
      table: its name, for errors.
      op: for errors.

    Raises:
      ValueError: the norm is no positive number.
    """
    if max_norm is None:
        return rows
    if not is_real(max_norm) or max_norm <= 0:
        raise fail(ValueError, table, op, "max_norm > 0", repr(max_norm), "leave it out for rows of any norm")
    limit = float(max_norm)
    squares = xp.sum(xp.square(rows.astype(xp.float32)), -1, keepdims=True)
    longer = squares > limit * limit
    scale = xp.where(longer, limit / xp.sqrt(xp.where(longer, squares, 1)), 1)
    return (rows.astype(xp.float32) * scale).astype(rows.dtype)
