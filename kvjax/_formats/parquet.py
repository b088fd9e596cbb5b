"""Parquet: columns for data frames and data bases, by pyarrow."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np

from kvjax._formats.atomic import replaced
from kvjax._formats.errors import FileError, needed
from kvjax._formats.source import Source, as_written, ranges, row_bytes

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
    with replaced(path) as part, parquet.ParquetWriter(os.fspath(part), schema, **options) as writer:
        for start, stop in ranges(source.num_rows, width):
            columns = source.read(list(source.types), start, stop)
            writer.write_table(arrow.table([_arrow(arrow, array) for array in columns.values()], schema=schema))


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


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The columns of numbers, and of lists of equally many numbers, of a file, and what `write` was told of them.

    Raises:
      FileError: it is no such file, not what `write` has written, or has a null or lists of several lengths.
      ImportError: pyarrow is not installed.
    """
    parquet = needed("pyarrow.parquet", "reading Parquet", "parquet")
    try:
        table = parquet.read_table(os.fspath(path), page_checksum_verification=True)
        arrays = {name: _numpy(path, name, table.column(name)) for name in table.column_names}
    except FileError:
        raise
    except Exception as error:  # pyarrow's, and what Python makes of names that are no text
        raise FileError(path, "a Parquet file", f"{type(error).__name__}: {str(error)[:200]}") from error
    said = (table.schema.metadata or {}).items()
    meta = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in said}
    ours = {key: value for key, value in meta.items() if key.startswith(_META)}
    digest = ours.pop(_CRC, None)
    if digest is not None and digest != _digest(table.schema, len(table), ours):
        raise FileError(path, "the columns that were written", "others, by their CRC-32")
    return (
        {name: array for name, array in arrays.items() if array is not None},
        {key.removeprefix(_META): value for key, value in ours.items()},
    )


def _numpy(path: str | os.PathLike[str], name: str, column: Any) -> np.ndarray | None:
    """A column as an array; None for one that is not of numbers."""
    column, shape = column.combine_chunks(), (len(column),)
    kind = column.type
    while hasattr(kind, "value_type") and str(kind).startswith(("list", "large_list", "fixed_size_list")):
        if column.null_count:
            raise FileError(
                path, f"no null in {name!r}", f"{column.null_count} of {len(column)}", "leave these rows out"
            )
        lengths = {int(kind.list_size)} if hasattr(kind, "list_size") else set(column.value_lengths().to_pylist())
        if len(lengths) > 1:
            raise FileError(path, f"lists of one length in {name!r}", f"{len(lengths)} lengths", "pad or cut them")
        (width,) = lengths or {0}
        column = column.flatten()
        shape, kind = (*shape, width), kind.value_type
    if column.null_count:
        raise FileError(path, f"no null in {name!r}", f"{column.null_count} of {len(column)}", "leave these rows out")
    array = column.to_numpy(zero_copy_only=False)
    return array.reshape(shape) if array.dtype.kind in "iufb" else None
