"""Sources: columns of rows that are read in pieces, from memory or from a disk."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")

Type: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype of a column, and the shape of what one row has of it."""

PIECE_BYTES = 1 << 24
"""About so many bytes of a column are in memory at once."""


class Column(Protocol):
    """An array of which a range of rows is read when it is asked for, as ``column[start:stop]``."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """Columns of equally many rows.

    Attributes:
      types: of each column.
      num_rows: of each column.
      read: from names of columns and a range of rows, as ``start, stop``, to their arrays ``(stop - start, ...)``.
      meta: what is said of all rows together, as text.
      widths: bytes that are read for a row of a column, where these are not what it has.
    """

    types: dict[str, Type]
    num_rows: int
    read: Callable[[Sequence[str], int, int], dict[str, np.ndarray]]
    meta: Mapping[str, str]
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @classmethod
    def of(cls, columns: Mapping[str, Column], meta: Mapping[str, str]) -> Source:
        """The source of arrays in memory or in files."""
        types = {name: (native(array.dtype), array.shape[1:]) for name, array in columns.items()}

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            return {name: columns[name][start:stop].astype(types[name][0], copy=False) for name in names}

        return cls(types, next(iter(columns.values())).shape[0], read, meta)

    @property
    def row_bytes(self) -> int:
        """Of all columns of a row."""
        return sum(map(row_bytes, self.types.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole column."""
        return (self.num_rows, *self.types[name][1])

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A whole column, in pieces that follow each other; C-contiguous and little-endian."""
        for start, stop in ranges(self.num_rows, self._width(name)):
            yield as_written(self.read([name], start, stop)[name])

    def _width(self, name: str) -> int:
        """Bytes that are read for a row of a column."""
        return self.widths.get(name, row_bytes(self.types[name]))

    def where(self, keep: np.ndarray) -> Source:
        """The rows where `keep`, ``(num_rows,)`` bool, is true. However few these are, what is read for them is in
        memory a piece at a time."""
        block = 1 << 16
        before = offsets_of([part.sum() for part in _blocks(keep, block)])

        def place(row: int) -> int:
            """Of a row that is kept, among all."""
            begin = int(np.searchsorted(before, row, "right")) - 1
            kept = np.flatnonzero(keep[begin * block : (begin + 1) * block])
            return begin * block + int(kept[row - int(before[begin])])

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            if start >= stop:
                return self.read(names, 0, 0)
            begin, end = place(start), place(stop - 1) + 1
            found: list[dict[str, np.ndarray]] = []
            for low, high in ranges(end - begin, sum(map(self._width, names))):
                part = self.read(names, begin + low, begin + high)
                found.append({name: array[keep[begin + low : begin + high]] for name, array in part.items()})
            return concat(found)

        return dataclasses.replace(self, num_rows=int(before[-1]), read=read)

    def slices(self, ranges: Sequence[tuple[int, int]]) -> Source:
        """The rows of some ranges, which is all that is read."""
        ends = np.cumsum([stop - start for start, stop in ranges], dtype=np.int64).tolist()

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            found: list[dict[str, np.ndarray]] = []
            for (low, high), end in zip(ranges, ends, strict=True):
                first, last = max(start + high - end, low), min(stop + high - end, high)
                if first < last or (end == ends[-1] and not found):
                    found.append(self.read(names, first, max(first, last)))
            return concat(found)

        return dataclasses.replace(self, num_rows=ends[-1], read=read)

    def only(self, names: list[str]) -> Source:
        """Some of the columns."""
        return dataclasses.replace(self, types={name: self.types[name] for name in names})

    def changed(
        self, name: str, dtype: np.dtype[Any], change: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> Source:
        """The rows with what `change` makes of a column and of the keys, of this dtype."""

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            if name not in names:
                return self.read(names, start, stop)
            found = self.read(list(dict.fromkeys([*names, "keys"])), start, stop)
            found[name] = change(found[name], found["keys"])
            return {each: found[each] for each in names}

        return dataclasses.replace(self, types=self.types | {name: (dtype, self.types[name][1])}, read=read)

    def rows(self) -> Iterator[dict[str, np.ndarray]]:
        """All columns, in pieces of whole rows that follow each other."""
        names = list(self.types)
        return (self.read(names, start, stop) for start, stop in ranges(self.num_rows, self.row_bytes))


_IDLE: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_IDLE.clear)  # whose threads are not there


def ahead(items: Iterator[T]) -> Generator[T]:
    """The items, each of which is made by another thread while the one before is used.

    Threads are kept for the next call: malloc gives a new thread memory of its own, and keeps what is freed there.
    """
    try:
        thread = _IDLE.pop()
    except IndexError:
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvjax_ahead")
    process, maker = os.getpid(), 0

    def make() -> T | None:
        nonlocal maker
        maker = threading.get_ident()
        return next(items, None)

    coming = thread.submit(make)
    try:
        while (item := coming.result()) is not None:
            coming = thread.submit(make)
            yield item
    finally:
        # Not in a forked child, which has no such thread, nor in the thread itself, where garbage may be collected.
        if os.getpid() == process and threading.get_ident() != maker:
            coming.exception()  # waits
            _IDLE.append(thread)


def concat(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of several parts, which have the same columns, one after the other; arrays of one part as they are."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same in the byte order of the machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _blocks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(array), size):
        yield array[start : start + size]


def ranges(num_rows: int, bytes_of_row: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover all rows, each of about `PIECE_BYTES`."""
    step = max(1, PIECE_BYTES // max(1, bytes_of_row))
    for start in range(0, num_rows, step):
        yield start, min(num_rows, start + step)


def offsets_of(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The first of each of some ranges of so many rows ``(n,)``, and the end of the last: ``(n + 1,)`` int64."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def row_bytes(kind: Type) -> int:
    """Bytes of one row's part of a column; Python's number, as a forged shape may have more than NumPy's hold."""
    dtype, shape = kind
    return dtype.itemsize * math.prod(shape)


def digest_of(name: str, kind: object, rows: int) -> int:
    """CRC-32 of what a column is, from which that of its bytes goes on."""
    return zlib.crc32(f"{name} {kind} {rows}".encode())


def as_written(array: np.ndarray) -> np.ndarray:
    """The array as the formats have it: C-contiguous and little-endian."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array)


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array as it is written."""
    return as_written(array).reshape(-1).view(np.uint8).data
