"""Bags: what the arguments of ``lookup_bag`` must be beside the keys, of NumPy or of JAX; by NumPy alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvjax._values.combiners import COMBINERS
from kvjax._values.errors import fail
from kvjax._values.numbers import is_integer

OP = "lookup_bag"


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


def bags_of(lengths: Any, segment_ids: Any, num_segments: Any, shape: tuple[int, ...], table: str) -> Bags | None:
    """The bags of keys of a shape; None where it says them, ``(..., L)``.

    Args:
      lengths: None, or an array.
      segment_ids: None, or an array.
      num_segments: as it was given.
      shape: of the keys.
      table: its name, for errors.

    Raises:
      TypeError, ValueError: they do not fit each other or the keys. Whether lengths fit, `lengths_error` is for.
    """
    if lengths is not None and segment_ids is not None:
        raise bag_error(table, "lengths or segment_ids", "both", "each of them says which keys make a bag")
    if (segment_ids is None) != (num_segments is None):
        raise bag_error(table, "segment_ids and num_segments together", "one of them", "give both or none")
    if lengths is None and segment_ids is None:
        if not shape:
            raise bag_error(table, "keys (..., L)", "a single key", "give a bag an axis, or lengths, or segment_ids")
        return None
    if len(shape) != 1:
        raise bag_error(
            table, "keys (n,) beside lengths or segment_ids", f"keys {shape}", "flatten them, or pad and mask"
        )
    if lengths is not None:
        lengths = _int32(lengths, "lengths", 2**31 - 1, table)
        if lengths.ndim != 1:
            raise bag_error(table, "lengths (b,)", f"{lengths.shape}", "give one length a bag")
        return Bags(lengths.shape[0], lengths=lengths)
    if not is_integer(num_segments) or not 0 <= num_segments < 2**31:
        want = "an integer num_segments in 0..2**31 - 1"
        raise bag_error(table, want, repr(num_segments), "it is a shape, known outside jit")
    ids = _int32(segment_ids, "segment_ids", int(num_segments), table)
    if ids.shape != shape:
        raise bag_error(table, f"segment_ids {shape}", f"{ids.shape}", "give one bag per key")
    return Bags(int(num_segments), ids=ids)


def _int32(values: Any, name: str, high: int, table: str) -> Any:
    """Integers as int32; those below 0 become -1 and those above `high` become it, so that none is cut."""
    if values.size == 0 and isinstance(values, np.ndarray):
        values = values.astype(np.int32)  # an empty list has no type of its own
    if values.dtype.kind not in "iu":
        raise bag_error(table, f"integer {name}", f"{values.dtype}", "convert them first", TypeError)
    info = np.iinfo(values.dtype)
    return values.clip(max(info.min, -1), min(info.max, high)).astype(np.int32)


def lengths_error(lengths: np.ndarray, n: int, table: str) -> Exception:
    """The error of lengths that do not fit n keys."""
    want = f"lengths of at least 0 that sum to at most {n}"
    return bag_error(table, want, str(lengths.tolist()), "each key belongs to one bag")


def check_combiner(combiner: Any, weights: Any, shape: tuple[int, ...], table: str) -> None:
    """Whether a combiner is one, and an array of weights, if there is one, fits it and keys of a shape.

    Raises:
      ValueError: it does not.
    """
    if combiner not in COMBINERS:
        raise bag_error(table, f"combiner in {COMBINERS}", repr(combiner), "choose one")
    if weights is None:
        return
    if combiner == "max":
        raise bag_error(table, "no weights for combiner 'max'", "weights", "a mask leaves keys out")
    if weights.shape != shape or weights.dtype.kind in "bcOSU":
        got = f"{weights.shape} {weights.dtype}"
        raise bag_error(table, f"real weights {shape}", got, "give one number per key")


def check_empty(empty: Any, dim: int, table: str) -> None:
    """Whether a row for empty bags, as an array or as it was given, is one.

    Raises:
      ValueError: it is not.
    """
    want = f"a row ({dim},) for empty bags"
    if isinstance(empty, str):
        raise bag_error(table, want, repr(empty), "only EmbedBag learns one by itself")
    if np.shape(empty) != (dim,):
        raise bag_error(table, want, f"{np.shape(empty)}", "give one row")


def bag_error(table: str, want: str, got: str, mend: str, kind: type[Exception] = ValueError) -> Exception:
    return fail(kind, table, OP, want, got, mend)
