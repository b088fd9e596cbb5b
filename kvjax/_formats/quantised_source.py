"""Quantised sources: columns whose rows are quantised as they are read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from kvjax._formats.choices import Quantised
from kvjax._formats.errors import FileError
from kvjax._formats.quantise import STORED, Quantiser, check_quantised, decode, to_float32
from kvjax._formats.source import Source, row_bytes

SCALES = "scales"
"""The column of scales: ``values * scales[:, None]`` is the row."""
META = "quantised"
"""What `Source.meta` says of how rows are stored."""


def quantised(source: Source, dtype: Quantised, file: str) -> tuple[Source, Quantiser]:
    """The source with its rows quantised, and what adds up what that changes: its values are to be read once.

    Args:
      source: with a column "values" of floats.
      dtype: of the rows.
      file: for errors.

    Raises:
      FileError: `dtype` is none that rows are quantised to, or they are already; so does whoever reads an element that
        the dtype cannot hold.
    """
    check_quantised(dtype, file)
    kind, shape = source.types["values"]
    quantiser = Quantiser(dtype, file, kind.itemsize)
    if META in source.meta:
        raise FileError(file, "rows that are not quantised yet", f"{source.meta[META]}", "quantise an export once")
    stored = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else STORED[dtype]
    types = dict(source.types) | {"values": (stored, shape)}
    if dtype == "int8":
        types[SCALES] = np.dtype(np.float32), ()

    def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        wanted = dict.fromkeys("values" if name == SCALES else name for name in names)
        wanted |= dict.fromkeys(["keys"] if "values" in wanted and "keys" in source.types else [])
        found = source.read(list(wanted), start, stop)
        if "values" in found:
            counts = quantiser if "values" in names else Quantiser(dtype, file)
            rows = to_float32(found["values"], f"file {os.fspath(file)!r}, write")
            codes, scales = counts.encode(rows, found.get("keys"))
            found["values"] = codes.view(stored)
            if scales is not None:
                found[SCALES] = scales
        return {name: found[name] for name in names}

    widths = dict.fromkeys(("values", SCALES), row_bytes(source.types["values"]))
    said = {**source.meta, META: dtype}
    return dataclasses.replace(source, types=types, read=read, meta=said, widths=widths), quantiser


def restored(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rows that stored columns stand for: ``(n, dim)`` float32, or as they are where there are no scales."""
    if SCALES not in columns:
        return columns["values"]
    return decode(columns["values"], columns[SCALES].astype(np.float32), "int8")
