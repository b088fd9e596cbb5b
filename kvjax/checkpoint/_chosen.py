"""Choices of a restore: which keys are taken from a checkpoint, and in which dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import as_keys
from kvjax._values.snapshot import ADMISSION_COLUMNS, WAITING_COLUMNS, take
from kvjax.checkpoint._format import POOL, REMOVED
from kvjax.checkpoint._overlay import among, words


def only(arrays: dict[str, np.ndarray], wanted: Any) -> dict[str, np.ndarray]:
    """Of the arrays of a table what belongs to some keys: their rows, and what is counted of those that wait."""
    keys = np.unique(np.asarray(as_keys(wanted, "restore(keys=)")).reshape(-1).view(np.int64))
    of_rows = {name: array for name, array in arrays.items() if name not in (*ADMISSION_COLUMNS, POOL, REMOVED)}
    out = arrays | take(of_rows, among(words(arrays["keys"]), keys))
    if "pending_keys" in arrays:
        waiting = {name: arrays[name] for name in WAITING_COLUMNS}
        out |= take(waiting, among(arrays["pending_keys"], keys))
    return out


def converted(values: np.ndarray, keys: np.ndarray, dtype: str, table: str) -> np.ndarray:
    """Values ``(n, dim)`` in another dtype.

    Raises:
      ValueError: one is too large for it.
    """
    with np.errstate(over="ignore"):  # which is found below
        out = values.astype(np.float32).astype(jnp.dtype(dtype))
    lost = np.flatnonzero((np.isinf(out.astype(np.float32)) & ~np.isinf(values.astype(np.float32))).any(axis=1))
    if len(lost):
        raise ValueError(
            f"kvjax: table {table!r}, restore: want values that {dtype} can hold, got larger ones in {len(lost)} rows, "
            f"for instance of key {keys[lost[0]]}; give a dtype with a larger range, such as bfloat16"
        )
    return out
