"""Quantised rows: fewer bits for what is only read, and what that changes; by NumPy alone.

NumPy has no bfloat16, so rows of it are their 16 bits here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax._formats.choices import QUANTISED
from kvjax._formats.errors import FileError

STORED = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "int8": np.dtype("i1")}
"""What an element is once it is stored, by the name of the dtype."""


@dataclasses.dataclass(frozen=True)
class QuantisationReport:
    """What quantisation has changed, over all rows.

    Attributes:
      dtype: of the rows in the file: "float16", "bfloat16" or "int8".
      rows: so many.
      bytes_before: of the values in the table.
      bytes_after: of the values in the file, scales included.
      max: the largest change of an element.
      rms: the root of the mean square of the changes.
      cosine: the least cosine between a row and what is stored of it, of finite rows that are not zero; 1 if there are
        none.
    """

    dtype: str
    rows: int
    bytes_before: int
    bytes_after: int
    max: float
    rms: float
    cosine: float


def check_quantised(dtype: object, what: str) -> None:
    """Whether rows can be quantised to this.

    Raises:
      FileError: they cannot.
    """
    if dtype not in QUANTISED:
        raise FileError(what, f"quantise= as one of {list(QUANTISED)}", f"{dtype!r}", "choose one of these")


class Quantiser:
    """Stores blocks of rows, and adds up what that changes.

    Args:
      dtype: one of `STORED`; "float32" changes nothing.
      what: is stored, for errors.
      itemsize: bytes of an element in the table.

    """

    def __init__(self, dtype: str, what: str, itemsize: int = 4) -> None:
        self.dtype, self.what, self.itemsize = dtype, what, itemsize
        self.rows = self._elements = 0
        self._largest, self._squares, self._cosine = 0.0, 0.0, 1.0

    def encode(self, rows: np.ndarray, keys: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """As `encode` does.

        Args:
          rows: as there.
          keys: ``(n,)``, for errors.

        Raises:
          FileError: the dtype cannot hold an element; int8 none that is not finite.
        """
        codes, scales = encode(rows, self.dtype)
        stored = decode(codes, scales, self.dtype)
        finite = np.isfinite(rows)
        lost = ~finite if self.dtype == "int8" else finite & ~np.isfinite(stored)
        if lost.any():
            row, column = np.argwhere(lost)[0]
            where = "a row of no key" if keys is None else f"the row of key {keys[row]}"
            raise FileError(
                self.what, f"rows that {self.dtype} can hold", f"{rows[row, column]} in {where}",
                "choose another dtype, or mend such rows",
            )  # fmt: skip
        self.rows, self._elements = self.rows + len(rows), self._elements + rows.size
        if self.dtype != "float32":
            self._add(np.where(finite, rows, 0), np.where(finite, stored, 0))
        return codes, scales

    def _add(self, before: np.ndarray, after: np.ndarray) -> None:
        change = after - before
        self._largest = max(self._largest, float(np.abs(change).max(initial=0)))
        self._squares += float(np.einsum("ij,ij->", change, change, dtype=np.float64))
        pairs = (before, after), (before, before), (after, after)
        dots, own, stored = (np.einsum("ij,ij->i", x, y, dtype=np.float64) for x, y in pairs)
        # A row of which nothing is left has no direction: 0.
        cosines = dots / np.sqrt(np.where(stored > 0, own * stored, 1))
        self._cosine = min(self._cosine, float(cosines[own > 0].min(initial=1.0)))

    def report(self) -> QuantisationReport | None:
        """What has changed by now; None for "float32"."""
        if self.dtype == "float32":
            return None
        scales = 4 * self.rows if self.dtype == "int8" else 0
        return QuantisationReport(
            dtype=self.dtype,
            rows=self.rows,
            bytes_before=self._elements * self.itemsize,
            bytes_after=self._elements * STORED[self.dtype].itemsize + scales,
            max=self._largest,
            rms=(self._squares / max(self._elements, 1)) ** 0.5,
            cosine=self._cosine,
        )


def encode(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows in fewer bits, rounded to the nearest value, ties to the even one.

    Args:
      rows: ``(n, dim)`` float32.
      dtype: one of `STORED`.

    Returns:
      Codes ``(n, dim)``, and of int8 the scale of each row ``(n,)`` float32; without sense for rows that are not
      finite.
    """
    if dtype == "bfloat16":
        return _to_bfloat16(rows), None
    if dtype == "int8":
        return _to_int8(rows)
    with np.errstate(over="ignore"):
        return rows.astype(STORED[dtype]), None


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


def to_float32(rows: Any, what: str, want: str = "rows of real numbers") -> np.ndarray:
    """Rows as float32, which holds those of any dtype that a table has exactly.

    Args:
      rows: of any numbers.
      what: what they are for, for the error: "table 'user', update".
      want: in the error, if they are no rows.

    Raises:
      TypeError: they are no real numbers.
      ValueError: they are of another dtype, and too large.
    """
    try:
        rows = np.asarray(rows)
    except ValueError:
        got = "lists that make no array"
        raise TypeError(f"kvjax: {what}: want {want}, got {got}; convert them first") from None
    if rows.dtype.name == "bfloat16":
        return decode(rows.view(np.uint16), None, "bfloat16")
    if rows.dtype.kind not in "iuf":
        raise TypeError(f"kvjax: {what}: want {want}, got {rows.dtype}; convert them first")
    with np.errstate(over="ignore"):
        out = rows.astype(np.float32)
    if rows.dtype.itemsize > 4 and rows.dtype.kind == "f" and (np.isinf(out) & np.isfinite(rows)).any():
        largest = np.abs(rows[np.isfinite(rows)]).max()
        raise ValueError(f"kvjax: {what}: want values that float32 can hold, got {largest:g}; scale them down")
    return out


def _to_bfloat16(rows: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(rows)  # stays one
    return (np.where(nan, bits | np.uint32(0x400000), even) >> np.uint32(16)).astype(np.uint16)


def _to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the scale of each row, of which its largest element is 127. A row so small that its scale would be 0
    becomes zeros.

    Source: symmetric quantisation by rows, as of FBGEMM's row-wise tables.
    """
    with np.errstate(invalid="ignore"):
        scales = np.max(np.abs(rows), axis=1, initial=0) / np.float32(127)
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        return np.clip(np.rint(rows / divisor), -127, 127).astype(np.int8), scales
