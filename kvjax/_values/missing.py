"""Missing rows: what keys without a row read as, if a lookup gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail

T = TypeVar("T")

Missing: TypeAlias = Literal["init", "zeros"] | ArrayLike
"""The initial row of each key, zeros, or one row for all."""


def missing_row(missing: Any, dim: int, zeros: T, array: Callable[[Any], Any], table: str, op: str) -> T:
    """What keys without a row read as, where that is the same for all.

    Args:
      missing: "zeros" or a row ``(dim,)``.
      dim: width of a row.
      zeros: what "zeros" is.
      array: makes an array of a row.
      table: its name, for errors.
      op: for errors.

    Raises:
      ValueError: it is neither.
    """
    if isinstance(missing, str):
        if missing != "zeros":
            raise fail(ValueError, table, op, "missing='init', 'zeros' or a row", repr(missing), "choose one")
        return zeros
    row = array(missing)
    if row.shape != (dim,):
        raise fail(ValueError, table, op, f"a missing row ({dim},)", str(row.shape), "give one row")
    return row
