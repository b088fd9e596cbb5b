"""Padding: what masks and the id of padding must be, for the keys of a call; by NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax._values.errors import fail

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
