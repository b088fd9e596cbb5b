"""Given rows: what a caller brings to be written, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from kvjax._keys.keys import Keys
from kvjax._table.handle import Handle
from kvjax._values.arrays import aligned_copy, array_of, check_real, uncut_dtype
from kvjax._values.dtypes import too_large
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
    check_real(rows, table.name, op, "real values")
    # Those of a device are not waited for, and those of a program are not known.
    if isinstance(given, np.ndarray) or (isinstance(given, Sequence) and not isinstance(rows, Tracer)):
        _check_range(table, op, np.asarray(given), dtype)
    return aligned_copy(rows, dtype) if isinstance(rows, np.ndarray) else rows.astype(dtype)


def _taken(table: Handle, op: str, given: Any) -> Any:
    """Rows as an array of JAX's, or of NumPy's where a program takes those: JAX's conversion copies them once more, and
    compiles a program for each shape."""
    if type(given) is np.ndarray and given.dtype != object and table.spec.placement is None:
        with np.errstate(over="ignore"):  # which `_check_range` says
            return given.astype(uncut_dtype(given), copy=False)
    return array_of(given, table.name, op, "real values")


def _check_range(table: Handle, op: str, given: np.ndarray, dtype: Any) -> None:
    """Whether numbers of the host are finite in the dtype of the rows, as far as they are so."""
    if np.can_cast(given.dtype, dtype):
        return
    lost = too_large(given, dtype)
    if lost.any():
        raise fail(
            ValueError, table.name, op, f"values that {np.dtype(dtype)} can hold", f"{given[lost][0]}",
            "scale them, or make the table with another dtype=",
        )  # fmt: skip
