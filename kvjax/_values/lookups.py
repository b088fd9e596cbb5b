"""Arguments of lookups beside the keys: masks, padding, missing rows and norms, of NumPy or of JAX; by NumPy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from kvjax._values.arguments import is_real
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail

T = TypeVar("T")

Missing: TypeAlias = Literal["init", "zeros"] | ArrayLike
"""The initial row of each key, zeros, or one row for all."""

MASK_OF = "give true for keys that count and false for padding, as mask != 0 does of numbers"
"""The mend for a mask of something else."""


def check_mask(mask: Any, shape: tuple[int, ...], table: str, op: str) -> None:
    """Whether an array of NumPy or JAX is a mask of keys of this shape.

    Raises:
      TypeError, ValueError: it is not.
    """
    if mask.dtype != np.bool_:
        raise fail(TypeError, table, op, "a mask of bool", f"{mask.dtype}", MASK_OF)
    if mask.shape != shape:
        raise fail(ValueError, table, op, f"a mask {shape}", f"{mask.shape}", "give one per key")


def check_pad(pad_id: Any, shape: tuple[int, ...], keys: Any, table: str, op: str) -> None:
    """Whether the id of padding is one, and of the keys' own kind: `Keys.salted` has made another key of it.

    Args:
      pad_id: as it was given.
      shape: of it as keys.
      keys: as they were given.
      table: its name, for errors.
      op: for errors.

    Raises:
      ValueError: it is not.
    """
    if shape != ():
        raise fail(ValueError, table, op, "one pad_id", f"{shape}", "give a mask for more")
    if getattr(keys, "has_salt", False) and not getattr(pad_id, "has_salt", False):
        raise fail(
            ValueError, table, op, "pad_id beside keys without a salt", "salted keys, in which that id is another key",
            "give mask=ids != pad_id of the ids before the salt, kvjax.keys(pad_id).salted(salt), or to a layer salt= "
            "in the place of keys.salted",
        )  # fmt: skip


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
