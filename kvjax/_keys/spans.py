"""Spans: strings where they lie in the memory of Arrow or NumPy, so that no object of Python is made of each."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from kvjax.ffi import host

_STRINGS = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
"""Arrow's types whose elements are text or bytes, of any lengths."""


class Spans(NamedTuple):
    """Strings of a shape in one buffer.

    Attributes:
      data: ``(m,)`` uint8, text as UTF-8.
      begins: ``(n,)`` int64, where each string begins.
      ends: ``(n,)`` int64, where it ends.
      shape: ``(...)``, of the n strings.
    """

    data: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    shape: tuple[int, ...]

    def hashed(self, at: np.ndarray | None, salt: int) -> np.ndarray:
        """The keys ``(n,)`` int64 of all strings, or of those at some places; other threads of Python run meanwhile."""
        begins, ends = (self.begins, self.ends) if at is None else (self.begins[at], self.ends[at])
        return host.hash_spans(self.data, begins, ends, salt)


def spans_of(items: Any) -> Spans | None:
    """The strings of an array of NumPy or a column of Arrow, pandas or polars.

    None if they are something else, if some are missing, or if they lie elsewhere: then they are taken as objects.
    """
    if isinstance(items, np.ndarray):
        return _of_numpy(items)
    if isinstance(getattr(items, "dtype", None), np.dtype):
        return None  # a column of pandas that has an array of NumPy
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is None or not any(hasattr(items, name) for name in ("__arrow_c_array__", "__arrow_c_stream__")):
        return None
    try:
        return _of_arrow(arrow, items)
    except (NotImplementedError, TypeError, ValueError):  # of an older Arrow, or of objects that make no column
        return None


def _of_arrow(arrow: Any, items: Any) -> Spans | None:
    column = items if isinstance(items, (arrow.Array, arrow.ChunkedArray)) else arrow.chunked_array(items)
    if arrow.types.is_dictionary(column.type) and str(column.type.value_type) in _STRINGS:
        column = column.cast(column.type.value_type)
    if str(column.type) not in _STRINGS or column.null_count:
        return None
    column = column.cast(arrow.large_string() if "string" in str(column.type) else arrow.large_binary())
    if isinstance(column, arrow.ChunkedArray):
        column = column.combine_chunks()
    _, ends, data = column.buffers()
    if not len(column):
        return None
    ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data or b"", np.uint8)
    return Spans(data, ends[:-1], ends[1:], (len(column),))


def _of_numpy(items: np.ndarray) -> Spans | None:
    if items.dtype.kind not in "SU" or not items.size or not items.dtype.itemsize or not items.dtype.isnative:
        return None
    flat = np.ascontiguousarray(items).reshape(-1)
    units = flat.view(np.uint8 if items.dtype.kind == "S" else np.uint32)
    if items.dtype.kind == "U":
        if units.max() > 127:
            return None  # whose UTF-8 is another
        units = units.astype(np.uint8)
    begins = np.arange(len(flat)) * (len(units) // len(flat))
    return Spans(units, begins, begins + np.strings.str_len(flat), items.shape)
