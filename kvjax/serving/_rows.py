"""Rows as a frozen table stores them: in float32, float16 or bfloat16, or as int8 with a scale for each row.

NumPy has no bfloat16, so its rows are their 16 bits here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax._formats.int8 import to_int8

DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "int8": np.dtype("i1")}
"""What an element is in the file, by the name of the dtype."""


@dataclasses.dataclass
class Error:
    """What storing rows in fewer bits has changed, as far as it has been added up.

    Attributes:
      largest: difference of any element.
      squares: sum of the squared differences.
      total: sum of the squared elements.
    """

    largest: float = 0.0
    squares: float = 0.0
    total: float = 0.0

    def add(self, rows: np.ndarray, stored: np.ndarray) -> None:
        """Adds rows ``(n, dim)`` float32 and what they read as."""
        # What is not finite is stored as it is, or not at all.
        wide = np.where(np.isfinite(rows), rows, 0).astype(np.float64)
        difference = np.where(np.isfinite(rows), stored, 0) - wide
        if rows.size:
            self.largest = max(self.largest, float(np.abs(difference).max()))
        self.squares += float((difference**2).sum())
        self.total += float((wide**2).sum())


def to_float32(rows: Any) -> np.ndarray:
    """Rows of any dtype that a table has, as float32, which holds them exactly."""
    rows = np.asarray(rows)
    return decode(rows.view(np.uint16), None, "bfloat16") if rows.dtype.name == "bfloat16" else rows.astype(np.float32)


def encode(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows in fewer bits, rounded to the nearest value, ties to the even one.

    Args:
      rows: ``(n, dim)`` float32; finite for int8.
      dtype: one of `DTYPES`.

    Returns:
      Codes ``(n, dim)``, and for int8 the scale of each row ``(n,)`` float32.
    """
    if dtype == "bfloat16":
        return _to_bfloat16(rows), None
    if dtype == "int8":
        return to_int8(rows)
    with np.errstate(over="ignore"):
        return rows.astype(DTYPES[dtype]), None


def decode(codes: np.ndarray, scales: np.ndarray | None, dtype: str) -> np.ndarray:
    """What `encode` was given, as far as it is left: ``(..., dim)`` float32."""
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    rows = codes.astype(np.float32)
    if scales is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # of a file that is damaged
            rows *= scales[..., None]
    return rows


def rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rows with the values that a table of a dtype would have."""
    return rows if dtype == "float32" else decode(*encode(rows, dtype), dtype)


def _to_bfloat16(rows: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(rows)  # stays one
    return (np.where(nan, bits | np.uint32(0x400000), even) >> np.uint32(16)).astype(np.uint16)
