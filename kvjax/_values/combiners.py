"""Combiners: the rules by which rows become bags, of sums and maxima that are given, over NumPy or over JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn", "max"]
COMBINERS = get_args(Combiner)


class Sums(NamedTuple):
    """How rows become bags, 0 for a bag without rows.

    Attributes:
      sum: from the number of bags, ids ``(n,)``, weights ``(n,)`` and rows ``(n, dim)`` to the weighted sums
        ``(bags, dim)``.
      max: from the number of bags, ids and rows to the largest of each column ``(bags, dim)``.
    """

    sum: Callable[[int, Any, Any, Any], Any]
    max: Callable[[int, Any, Any], Any]


def counts(xp: Any, sums: Sums, bags: int, ids: Any) -> Any:
    """How many rows each bag has, ``(bags,)`` float32."""
    ones = xp.ones(ids.shape, xp.float32)
    return sums.sum(bags, ids, ones, ones[:, None])[:, 0]


def combine(xp: Any, sums: Sums, combiner: str, bags: int, ids: Any, rows: Any, weights: Any) -> Any:
    """Bags of rows; what would be divided by 0 is 0.

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      sums: of it.
      combiner: one of `COMBINERS`.
      bags: how many.
      ids: ``(n,)`` int32, the bag of each row; what ids outside the bags mean, the sums say.
      rows: ``(n, dim)`` float32.
      weights: ``(n,)`` float32; None for 1.

    Returns:
      ``(bags, dim)`` float32.
    """
    if combiner == "max":
        return sums.max(bags, ids, rows)
    ones = xp.ones(ids.shape, xp.float32)
    total = sums.sum(bags, ids, ones if weights is None else weights, rows)
    if combiner == "sum":
        return total
    if weights is None:
        divisor = counts(xp, sums, bags, ids)
    else:
        terms = weights if combiner == "mean" else weights * weights
        divisor = sums.sum(bags, ids, ones, terms[:, None])[:, 0]
    # The inner where keeps the gradient of the branch that is not taken finite.
    safe = xp.where(divisor == 0, 1, divisor)
    scale = xp.where(divisor == 0, 0, 1 / (safe if combiner == "mean" else xp.sqrt(safe)))
    return total * scale[:, None]
