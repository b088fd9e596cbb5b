"""Columns: arrays of which a range of rows is read, or made of others, when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.errors import FileError
from kvjax._formats.regular import check_regular
from kvjax._formats.source import Column, row_bytes


class Lazy(Mapping[str, Column]):
    """Columns by name, each of which is opened when it is asked for."""

    def __init__(self, names: Sequence[str], opened: Callable[[str], Column]) -> None:
        self._names, self._opened = dict.fromkeys(names), opened

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(name)
        return self._opened(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # and opens nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Concatenated:
    """Columns, one after the other, as one; of the same type."""

    def __init__(self, parts: Sequence[Column]) -> None:
        self._parts, self.dtype = parts, parts[0].dtype
        self._ends = np.cumsum([part.shape[0] for part in parts])
        self.shape = (int(self._ends[-1]), *parts[0].shape[1:])

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        found = [self._parts[0][:0]]
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            begin = end - part.shape[0]
            if start < end and stop > begin:
                found.append(part[max(start - begin, 0) : min(stop, end) - begin])
        return found[1] if len(found) == 2 else np.concatenate(found)


class MappedColumn:
    """A column of which a function makes another of the same dtype, row by row."""

    def __init__(
        self, column: Column, function: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...] | None = None
    ) -> None:
        self.dtype, self.shape = column.dtype, column.shape if shape is None else shape
        self._column, self._function = column, function

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._function(self._column[rows])


class Repeated:
    """A column that has the same number in each row."""

    def __init__(self, value: np.number[Any], num_rows: int) -> None:
        self.dtype, self.shape, self._value = value.dtype, (num_rows,), value

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.full(len(range(*rows.indices(self.shape[0]))), self._value)


class InFile:
    """A bare array in a file, little-endian, of which rows are read when they are asked for.

    Args:
      path: of the file.
      dtype: of its elements.
      shape: of the array.
      offset: of its first byte.
    """

    def __init__(
        self, path: str | os.PathLike[str], dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0
    ) -> None:
        check_regular(path, "an array in a file")
        self.dtype, self.shape, self._path, self._offset = dtype, shape, path, offset

    def of_shape(self, shape: tuple[int, ...]) -> InFile:
        """The same elements as an array of another shape."""
        return InFile(self._path, self.dtype, shape, self._offset)

    def whole(self) -> np.ndarray:
        """All of it; one without rows has one element."""
        return self[:] if self.shape else self.of_shape((1,))[:].reshape(())

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        size = row_bytes((self.dtype, self.shape[1:]))
        count = max(stop - start, 0) * (size // self.dtype.itemsize)
        found = np.fromfile(self._path, self.dtype, count, offset=self._offset + start * size)
        if len(found) != count:
            raise FileError(self._path, f"{count} elements at {self._offset + start * size}", f"{len(found)}")
        return found.reshape(max(stop - start, 0), *self.shape[1:])
