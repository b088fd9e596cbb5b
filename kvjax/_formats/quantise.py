"""Quantised rows: fewer bits for what is only read, and what that changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np

from kvjax._formats.errors import FileError
from kvjax._formats.int8 import to_int8
from kvjax._formats.source import Source, ranges, row_bytes

Quantised: TypeAlias = Literal["float16", "bfloat16", "int8"]
"""How rows are stored: rounded to a dtype, or as int8 times a scale of each row."""

SCALES = "scales"
"""The column of scales: ``values * scales[:, None]`` is the row."""
QUANTISED = "quantised"
"""What `Source.meta` says of how rows are stored."""

_FLOATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class QuantisationReport:
    """What quantisation has changed, over all rows of an export.

    Attributes:
      dtype: of the rows in the file: "float16", "bfloat16" or "int8".
      rows: so many.
      bytes_before: of the values in the table.
      bytes_after: of the values in the file, scales included.
      max: the largest change of an element.
      rms: the root of the mean square of the changes.
      cosine: the least cosine between a row and what is stored of it, of rows that are not zero; 1 if there are none.
      overflows: elements that the dtype cannot hold, which are infinite in the file.
    """

    dtype: str
    rows: int
    bytes_before: int
    bytes_after: int
    max: float
    rms: float
    cosine: float
    overflows: int


def quantise(source: Source, dtype: Quantised, file: str) -> tuple[Source, QuantisationReport]:
    """The source with its rows quantised, and what that changes.

    Args:
      source: with a column "values" of floats.
      dtype: of the rows.
      file: for errors.

    Raises:
      FileError: `dtype` is none of these, the rows are quantised already, or int8 meets one that is not finite.
    """
    if dtype not in ("int8", *_FLOATS):
        raise FileError(file, "quantise as float16, bfloat16 or int8", f"{dtype!r}", "choose one of these")
    if QUANTISED in source.meta:
        raise FileError(file, "rows that are not quantised yet", f"{source.meta[QUANTISED]}", "quantise an export once")
    error = _error(source, dtype, file)
    _, shape = source.types["values"]
    types = dict(source.types) | {"values": (_FLOATS.get(dtype, np.dtype(np.int8)), shape)}
    if dtype == "int8":
        types[SCALES] = np.dtype(np.float32), ()

    def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        found = source.read(list(dict.fromkeys("values" if name == SCALES else name for name in names)), start, stop)
        if "values" in found:
            found |= stored_as(found["values"], dtype)
        return {name: found[name] for name in names}

    widths = dict.fromkeys(("values", SCALES), row_bytes(source.types["values"]))
    said = {**source.meta, QUANTISED: dtype}
    return dataclasses.replace(source, types=types, read=read, meta=said, widths=widths), error


def stored_as(values: np.ndarray, dtype: Quantised) -> dict[str, np.ndarray]:
    """What is stored of some rows: their values, and of int8 the scales. ``(n, dim)`` floats."""
    if dtype != "int8":
        with np.errstate(over="ignore"):
            return {"values": values.astype(_FLOATS[dtype])}
    codes, scales = to_int8(values.astype(np.float32))
    return {"values": codes, SCALES: scales}


def restored(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rows that stored columns stand for: ``(n, dim)`` float32, or as they are where there are no scales."""
    if SCALES not in columns:
        return columns["values"]
    return columns["values"].astype(np.float32) * columns[SCALES].astype(np.float32)[:, None]


def _error(source: Source, dtype: Quantised, file: str) -> QuantisationReport:
    largest, squares, cosine, overflows = 0.0, 0.0, 1.0, 0
    kind, (dim,) = source.types["values"]
    for start, stop in ranges(source.num_rows, row_bytes(source.types["values"]) * 4):
        given = source.read(["values"], start, stop)["values"]
        before = given.astype(np.float32)
        finite = np.isfinite(before)
        if dtype == "int8" and not finite.all():
            bad = start + int(np.argmin(finite.all(axis=1)))
            raise FileError(
                file, "finite rows for int8", f"row {bad} with an element that is not", "float16 keeps these"
            )
        after = restored(stored_as(given, dtype)).astype(np.float32)
        lost = finite & ~np.isfinite(after)
        overflows += int(lost.sum())
        if overflows or not finite.all():  # what is not finite has no distance
            before, after = (np.where(finite & ~lost, array, 0) for array in (before, after))
        change = after - before
        largest = max(largest, float(np.abs(change).max(initial=0)))
        squares += float(np.einsum("ij,ij->", change, change, dtype=np.float64))
        pairs = (before, after), (before, before), (after, after)
        dots, own, stored = (np.einsum("ij,ij->i", x, y, dtype=np.float64) for x, y in pairs)
        # A row of which nothing is left has no direction: 0.
        cosines = dots / np.sqrt(np.where(stored > 0, own * stored, 1))
        cosine = min(cosine, float(cosines[own > 0].min(initial=1.0)))
    elements = source.num_rows * dim
    width = 1 if dtype == "int8" else 2
    return QuantisationReport(
        dtype=dtype,
        rows=source.num_rows,
        bytes_before=elements * kind.itemsize,
        bytes_after=elements * width + (4 * source.num_rows if dtype == "int8" else 0),
        max=largest,
        rms=float(np.sqrt(squares / elements)) if elements else 0.0,
        cosine=cosine,
        overflows=overflows,
    )
