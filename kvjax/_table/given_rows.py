"""Given rows: what a caller brings to be written, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._keys.keys import Keys
from kvjax._table.handle import Handle
from kvjax._values.arrays import array_of
from kvjax._values.dtypes import too_large
from kvjax._values.errors import fail


def given_rows(table: Handle, op: str, keys: Keys, given: Any, dtype: Any) -> jax.Array:
    """``(..., dim)`` of `dtype`, a row for each key.

    Raises:
      ValueError: there are not as many, or the host has a number that `dtype` cannot hold.
      TypeError: they are no real numbers.
    """
    rows = array_of(given, table.name, op, "real values")
    if rows.shape != (*keys.shape, table.dim):
        raise fail(
            ValueError, table.name, op, f"values {(*keys.shape, table.dim)}", f"{rows.shape}",
            "give one row per key",
        )  # fmt: skip
    if not jnp.issubdtype(rows.dtype, jnp.floating) and not jnp.issubdtype(rows.dtype, jnp.integer):
        raise fail(TypeError, table.name, op, "real values", f"{rows.dtype}", "convert them first")
    # Those of a device are not waited for, and those of a program are not known.
    if isinstance(given, np.ndarray) or (isinstance(given, Sequence) and not isinstance(rows, Tracer)):
        _check_range(table, op, np.asarray(given), dtype)
    return rows.astype(dtype)


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
