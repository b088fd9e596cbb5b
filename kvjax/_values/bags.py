"""Bags: the arguments of ``lookup_bag`` beside the keys, and the rules by which rows become bags; NumPy or JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from kvjax._values.arguments import is_integer
from kvjax._values.errors import fail

OP = "lookup_bag"

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn", "max"]
COMBINERS = get_args(Combiner)


class Bags(NamedTuple):
    """Bags of keys ``(n,)``, which have lengths or ids.

    Attributes:
      number: how many.
      lengths: ``(b,)`` int32, of bags that stand one after the other; those below 0 are -1.
      ids: ``(n,)`` int32, the bag of each key, in any order; those outside the bags mark padding.
    """

    number: int
    lengths: Any = None
    ids: Any = None


def bags_of(
    lengths: Any, segment_ids: Any, num_segments: Any, shape: tuple[int, ...], table: str, op: str = OP
) -> Bags | None:
    """The bags of keys of a shape; None where it says them, ``(..., L)``.

    Args:
      lengths: None, or an array.
      segment_ids: None, or an array.
      num_segments: as it was given.
      shape: of the keys.
      table: its name, for errors.
      op: for errors, as in the functions that follow.

    Raises:
      TypeError, ValueError: they do not fit each other or the keys. Whether lengths fit, `lengths_error` is for.
    """
    if lengths is not None and segment_ids is not None:
        raise fail(ValueError, table, op, "lengths or segment_ids", "both", "each of them says which keys make a bag")
    if (segment_ids is None) != (num_segments is None):
        raise fail(ValueError, table, op, "segment_ids and num_segments together", "one of them", "give both or none")
    if lengths is None and segment_ids is None:
        if not shape:
            mend = "give a bag an axis, or lengths, or segment_ids"
            raise fail(ValueError, table, op, "keys (..., L)", "a single key", mend)
        return None
    if len(shape) != 1:
        want = "keys (n,) beside lengths or segment_ids"
        raise fail(ValueError, table, op, want, f"keys {shape}", "flatten them, or pad and mask")
    if lengths is not None:
        lengths = _int32(lengths, "lengths", 2**31 - 1, table, op)
        if lengths.ndim != 1:
            raise fail(ValueError, table, op, "lengths (b,)", f"{lengths.shape}", "give one length a bag")
        return Bags(lengths.shape[0], lengths=lengths)
    if not is_integer(num_segments) or not 0 <= num_segments < 2**31:
        want = "an integer num_segments in 0..2**31 - 1"
        raise fail(ValueError, table, op, want, repr(num_segments), "it is a shape, known outside jit")
    ids = _int32(segment_ids, "segment_ids", int(num_segments), table, op)
    if ids.shape != shape:
        raise fail(ValueError, table, op, f"segment_ids {shape}", f"{ids.shape}", "give one bag per key")
    return Bags(int(num_segments), ids=ids)


def _int32(values: Any, name: str, high: int, table: str, op: str) -> Any:
    """Integers as int32; those below 0 become -1 and those above `high` become it, so that none is cut."""
    if values.size == 0 and isinstance(values, np.ndarray):
        values = values.astype(np.int32)  # an empty list has no type of its own
    if values.dtype.kind not in "iu":
        mend = (
            "convert them first, and where some are missing (a list that is null has length 0), fill those before that"
        )
        raise fail(TypeError, table, op, f"integer {name}", f"{values.dtype}", mend)
    info = np.iinfo(values.dtype)
    return values.clip(max(info.min, -1), min(info.max, high)).astype(np.int32)


def lengths_error(lengths: np.ndarray, n: int, table: str, op: str = OP) -> Exception:
    """The error of lengths that do not fit n keys."""
    want = f"lengths of at least 0 that sum to at most {n}"
    return fail(ValueError, table, op, want, str(lengths.tolist()), "each key belongs to one bag")


def check_combiner(combiner: Any, weights: Any, shape: tuple[int, ...], table: str, op: str = OP) -> None:
    """Whether a combiner is one, and an array of weights, if there is one, fits it and keys of a shape.

    Raises:
      ValueError: it does not.
    """
    if combiner not in COMBINERS:
        raise fail(ValueError, table, op, f"combiner in {COMBINERS}", repr(combiner), "choose one")
    if weights is None:
        return
    if combiner == "max":
        raise fail(ValueError, table, op, "no weights for combiner 'max'", "weights", "a mask leaves keys out")
    if weights.shape != shape:
        raise fail(ValueError, table, op, f"real weights {shape}", f"{weights.shape}", "give one number per key")


def check_empty(empty: Any, dim: int, table: str, op: str = OP) -> None:
    """Whether a row for empty bags, as an array or as it was given, is one.

    Raises:
      ValueError: it is not.
    """
    want = f"a row ({dim},) for empty bags"
    if isinstance(empty, str):
        mend = "only EmbedBag learns one by itself: make a parameter and give that"
        raise fail(ValueError, table, op, want, repr(empty), mend)
    if np.shape(empty) != (dim,):
        raise fail(ValueError, table, op, want, f"{np.shape(empty)}", "give one row")


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
