"""Parquet: columns for data frames and data bases, by pyarrow."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvjax._formats.atomic import replaced
from kvjax._formats.columns import Lazy
from kvjax._formats.errors import FileError, needed
from kvjax._formats.regular import Identity, identity_of
from kvjax._formats.source import Column, Source, as_written, ranges, row_bytes

WHAT = "a Parquet file"
_META = "kvjax."
_CRC = _META + "crc32"


def write(path: str | os.PathLike[str], source: Source) -> None:
    """Writes a column each; what is no number for a row is a list of a fixed size, and bfloat16 is float32.

    Raises:
      ImportError: pyarrow is not installed.
    """
    arrow, parquet = needed("pyarrow", "writing Parquet", "parquet"), needed("pyarrow.parquet", "Parquet", "parquet")
    empty = {name: _arrow(arrow, array) for name, array in source.read(list(source.types), 0, 0).items()}
    meta = {_META + key: value for key, value in source.meta.items()}
    bare = arrow.schema([(name, array.type) for name, array in empty.items()])
    schema = bare.with_metadata(meta | {_CRC: _digest(bare, source.num_rows, meta)})
    width = max(row_bytes(kind) for kind in source.types.values())
    options = {"use_dictionary": False, "write_page_checksum": True}  # rows are too different for a dictionary
    with (
        replaced(path) as part,
        _file(arrow, part, "wb") as file,
        parquet.ParquetWriter(file, schema, **options) as writer,
    ):
        for start, stop in ranges(source.num_rows, width):
            columns = source.read(list(source.types), start, stop)
            writer.write_table(arrow.table([_arrow(arrow, array) for array in columns.values()], schema=schema))


def _file(arrow: Any, path: str | os.PathLike[str], mode: str = "rb") -> Any:
    """An open file. A path that pyarrow is given is a URL to it if it has a colon, and has to be UTF-8."""
    return arrow.OSFile(os.fsencode(path), mode)


def _digest(bare: Any, rows: int, meta: dict[str, str]) -> str:
    """CRC-32 of what a file says of its columns; their pages have their own."""
    types = [(field.name, field.type, getattr(field.type, "list_size", None)) for field in bare]
    fields = [(name, f"{kind if size is None else kind.value_type}", size) for name, kind, size in types]
    return f"{zlib.crc32(repr((fields, rows, sorted(meta.items()))).encode()):08x}"


def _arrow(arrow: Any, array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.ndim == 1:
        return arrow.array(array)
    width = int(np.prod(array.shape[1:]))
    return arrow.FixedSizeListArray.from_arrays(arrow.array(as_written(array).reshape(-1)), width)


def columns(path: str | os.PathLike[str]) -> tuple[Mapping[str, Column], dict[str, str]]:
    """The columns of a file, lists of equally many numbers as rows, and what `write` was told of them.

    They are read when they are asked for, a row group at a time; meanwhile the file is not open, as it may be one of
    many.

    Raises:
      FileError: it is no such file, not what `write` has written, or has a null or lists of several lengths; so does
        reading from it.
      ImportError: pyarrow is not installed.
    """
    arrow, parquet = needed("pyarrow", "reading Parquet", "parquet"), needed("pyarrow.parquet", "Parquet", "parquet")
    try:
        found = identity_of(os.stat(path))
        with _file(arrow, path) as raw, parquet.ParquetFile(raw) as file:
            schema, footer = file.schema_arrow, file.metadata
        _check_unreplaced(path, found)
        rows = footer.num_rows
        ends = np.cumsum([footer.row_group(i).num_rows for i in range(footer.num_row_groups)], dtype=np.int64)
        if rows != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{rows} rows, and row groups that end with {ends}")
        names = list(schema.names)
    except (FileError, PermissionError):
        raise
    except Exception as error:  # pyarrow's, and what Python makes of names that are no text
        raise _none(path, error) from error
    said = (schema.metadata or {}).items()
    meta = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in said}
    ours = {key: value for key, value in meta.items() if key.startswith(_META)}
    digest = ours.pop(_CRC, None)
    if digest is not None and digest != _digest(schema, rows, ours):
        raise FileError(path, "the columns that were written", "others, by their CRC-32")

    @contextlib.contextmanager
    def opened() -> Generator[Any]:
        with (
            _file(arrow, path) as raw,
            parquet.ParquetFile(raw, metadata=footer, page_checksum_verification=True) as file,
        ):
            _check_unreplaced(path, found)  # once it is open: what is there now is what was opened
            yield file

    # Columns that nobody asks for may be of anything.
    return Lazy(names, lambda name: _Groups(path, opened, schema, name, ends)), {
        key.removeprefix(_META): value for key, value in ours.items()
    }


def _check_unreplaced(path: str | os.PathLike[str], found: Identity) -> None:
    """Whether the file is the one whose footer was read: another has other rows in its columns."""
    if identity_of(os.stat(path)) != found:
        raise FileError(path, "the file that was there when it was first read", "another in its place", "read it again")


def _none(path: str | os.PathLike[str], error: Exception) -> FileError:
    return FileError(path, WHAT, f"{type(error).__name__}: {str(error)[:200]}")


class _Groups:
    """A column of a file, of which a row group is in memory at a time, until its last row has been read."""

    def __init__(
        self, path: str | os.PathLike[str], opened: Callable[[], AbstractContextManager[Any]], schema: Any, name: str,
        ends: np.ndarray,
    ) -> None:  # fmt: skip
        self._path, self._opened, self._name, self._ends = path, opened, name, ends
        self._at, self._group = -1, np.zeros(0)
        first = self._first() if len(ends) and ends[-1] else schema.empty_table().column(name)
        some = _numpy(path, name, first)
        self.dtype, self.shape = some.dtype, (int(ends[-1]) if len(ends) else 0, *some.shape[1:])

    def _first(self) -> Any:
        """The column of one row, which says how long lists are."""
        try:
            with self._opened() as file:
                return next(iter(file.iter_batches(1, columns=[self._name]))).column(0)
        except FileError:
            raise
        except Exception as error:  # pyarrow's
            raise _none(self._path, error) from error

    def _read(self, group: int) -> np.ndarray:
        try:
            with self._opened() as file:
                column = file.read_row_group(group, [self._name]).column(self._name)
            rows = int(self._ends[group] - (self._ends[group - 1] if group else 0))
            if len(column) != rows:
                raise ValueError(f"{len(column)} rows of {self._name!r} in a group of {rows}")
            return _numpy(self._path, self._name, column)
        except FileError:
            raise
        except Exception as error:  # pyarrow's
            raise _none(self._path, error) from error

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        parts = [np.zeros((0, *self.shape[1:]), self.dtype)]
        while start < stop:
            group = int(np.searchsorted(self._ends, start, "right"))
            begin = int(self._ends[group - 1]) if group else 0
            if group != self._at:
                found = self._read(group)
                if found.shape[1:] != self.shape[1:]:
                    raise FileError(self._path, f"lists of one length in {self._name!r}", "several", "pad or cut them")
                self._group, self._at = found, group
            end = min(stop, int(self._ends[group]))
            parts.append(self._group[start - begin : end - begin])
            start = end
        if stop == self.shape[0]:
            self._at, self._group = -1, np.zeros(0)
        return np.concatenate(parts)


def _numpy(path: str | os.PathLike[str], name: str, column: Any) -> np.ndarray:
    """A column as an array."""
    column, shape = column.combine_chunks() if hasattr(column, "combine_chunks") else column, (len(column),)
    kind = column.type
    _check_no_null(path, name, column)
    while hasattr(kind, "value_type") and str(kind).startswith(("list", "large_list", "fixed_size_list")):
        lengths = {int(kind.list_size)} if hasattr(kind, "list_size") else set(column.value_lengths().to_pylist())
        if len(lengths) > 1:
            raise FileError(path, f"lists of one length in {name!r}", f"{len(lengths)} lengths", "pad or cut them")
        (width,) = lengths or {0}
        column = column.flatten()
        _check_no_null(path, name, column)
        shape, kind = (*shape, width), kind.value_type
    return column.to_numpy(zero_copy_only=False).reshape(shape)


def _check_no_null(path: str | os.PathLike[str], name: str, column: Any) -> None:
    if column.null_count:
        raise FileError(path, f"no null in {name!r}", f"{column.null_count} of {len(column)}", "leave these rows out")
