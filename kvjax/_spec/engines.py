"""Engines: the C++ side's calls into a user's engine, with rows typed and checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._values.errors import warn
from kvjax.storage import Column, External


class Calls:
    """What the C++ side calls for the rows of a table.

    Args:
      spec: of the table.
      given: its storage as the user gave it, which this keeps as long as the table lives.
    """

    def __init__(self, spec: TableSpec, given: External) -> None:
        self._spec, self._given, self._engine = spec, given, given.engine

    def get(self, column: Column, keys: np.ndarray, width: int) -> np.ndarray:
        """Rows ``(n * width,)`` uint8."""
        with PROCESS.calling_out():
            got = np.asarray(self._engine.get(column, keys))
            shape, dtype = self._type(len(keys), column, width)
            if got.shape != shape or got.dtype != dtype:
                raise ValueError(f"kvjax: storage: want {column} {shape} {dtype} from get, got {got.shape} {got.dtype}")
            return np.ascontiguousarray(got).view(np.uint8).reshape(-1)

    def put(self, column: Column, keys: np.ndarray, width: int, rows: np.ndarray) -> None:
        """Rows ``(n * width,)`` uint8."""
        shape, dtype = self._type(len(keys), column, width)
        with PROCESS.calling_out(), _Refusing(self._spec.name, "takes rows", "they stay in memory"):
            self._engine.put(column, keys, rows.view(dtype).reshape(shape))

    def delete(self, keys: np.ndarray) -> None:
        with PROCESS.calling_out(), _Refusing(self._spec.name, "deletes rows", "it may have them still"):
            self._engine.delete(keys)

    def _type(self, n: int, column: Column, width: int) -> tuple[tuple[int, int], np.dtype[Any]]:
        if column == "slots":
            return (n, width), np.dtype(np.uint8)
        return (n, self._spec.dim), self._spec.row_dtype


class _Refusing:
    """Says once for each error what becomes of rows of which an engine takes no call. The table's ends all the same.

    Args:
      name: of the table.
      want: what the engine should have done.
      then: what becomes of the rows.
    """

    def __init__(self, name: str, want: str, then: str) -> None:
        self._name, self._want, self._then = name, want, then

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            warn(
                f"kvjax: table {self._name!r}, storage: want an engine that {self._want}, got "
                f"{type(error).__name__}: {error}; {self._then}, and the next write tries again before it begins"
            )
