"""Given rows: what a caller brings to be written, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax._keys.keys import Keys
from kvjax._table.handle import Handle
from kvjax._values.arrays import aligned_copy, array_of, check_reals, uncut_dtype
from kvjax._values.errors import fail


def given_rows(table: Handle, op: str, keys: Keys, given: Any, dtype: Any) -> Any:
    """``(..., dim)`` of `dtype`, a row for each key; an array of NumPy's that is nobody else's, or of JAX's.

    Raises:
      ValueError: there are not as many, or the host has a number that `dtype` cannot hold.
      TypeError: they are no real numbers.
    """
    rows = _taken(table, op, given)
    if rows.shape != (*keys.shape, table.dim):
        raise fail(
            ValueError, table.name, op, f"values {(*keys.shape, table.dim)}", f"{rows.shape}",
            "give one row per key",
        )  # fmt: skip
    check_reals(given, rows, dtype, table.name, op, "real values")
    return aligned_copy(rows, dtype) if isinstance(rows, np.ndarray) else rows.astype(dtype)


def _taken(table: Handle, op: str, given: Any) -> Any:
    """Rows as an array of JAX's, or of NumPy's where a program takes those: JAX's conversion copies them once more, and
    compiles a program for each shape."""
    with np.errstate(over="ignore"):  # which `check_reals` says
        if type(given) is np.ndarray and given.dtype != object and table.spec.placement is None:
            return given.astype(uncut_dtype(given), copy=False)
        return array_of(given, table.name, op, "real values")
