"""Dtypes that rows and keys may have, and what NumPy does not say of ml_dtypes'."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

KEY_DTYPES = ("int64", "uint64", "int32", "uint32")
ROW_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype, or what was given if it is none."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are floats; bfloat16 is one, too."""
    return np.issubdtype(dtype, np.floating) or _knows(ml_dtypes.finfo, dtype)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are numbers."""
    return np.issubdtype(dtype, np.number) or _knows(ml_dtypes.finfo, dtype) or _knows(ml_dtypes.iinfo, dtype)


def _knows(info: Callable[[Any], Any], dtype: np.dtype[Any]) -> bool:
    try:
        info(dtype)
    except (TypeError, ValueError):
        return False
    return True
