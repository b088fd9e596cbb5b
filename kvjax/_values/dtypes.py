"""Dtypes that rows and keys may have, and what NumPy does not say of ml_dtypes'."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kvjax._values.errors import fail

ROW_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype, or what was given if it is none."""
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return dtype


def row_dtype(dtype: Any, table: str, op: str) -> str:
    """The name of a dtype that rows may have.

    Raises:
      ValueError: they may not.
    """
    name = dtype_name(dtype)
    if name not in ROW_DTYPES:
        stored = "rows of int8 are for files: quantise='int8' of exports and of FrozenTable.write"
        mend = stored if name == "int8" else "choose one"
        raise fail(ValueError, table, op, f"dtype in {ROW_DTYPES}", repr(name), mend)
    return name


def check_result(dtype: Any, table: str, op: str) -> None:
    """Whether rows may be given in this dtype, or None.

    Raises:
      TypeError: it is no dtype of floats.
    """
    try:
        fits = dtype is None or is_float(np.dtype(dtype))
    except TypeError:
        fits = False
    if not fits:
        raise fail(TypeError, table, op, "a dtype of floats for the rows", f"{dtype!r:.50}", "leave dtype= out")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are floats; bfloat16 is one, too, and a complex number none."""
    return dtype.kind != "c" and (np.issubdtype(dtype, np.floating) or _knows(ml_dtypes.finfo, dtype))


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are numbers."""
    return np.issubdtype(dtype, np.number) or _knows(ml_dtypes.finfo, dtype) or _knows(ml_dtypes.iinfo, dtype)


def too_large(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Which finite numbers another dtype cannot hold."""
    with np.errstate(over="ignore"):
        return np.isfinite(values) & ~np.isfinite(values.astype(dtype))


def cast(rows: np.ndarray, dtype: Any, keys: np.ndarray, table: str, op: str) -> np.ndarray:
    """Rows ``(n, dim)`` in another dtype.

    Raises:
      ValueError: an element is too large for it.
    """
    if rows.dtype == dtype:
        return rows
    lost = np.flatnonzero(too_large(rows, dtype).any(axis=1))
    if len(lost):
        want, got = (
            f"values that {np.dtype(dtype)} can hold",
            f"larger ones in {len(lost)} rows, for instance of key {keys[lost[0]]}",
        )
        raise fail(ValueError, table, op, want, got, "give a dtype with a larger range, such as bfloat16")
    return rows.astype(dtype)


def _knows(info: Callable[[Any], Any], dtype: np.dtype[Any]) -> bool:
    try:
        info(dtype)
    except (TypeError, ValueError):
        return False
    return True
