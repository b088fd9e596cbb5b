"""Saved tables, by NumPy alone: what a checkpoint says of itself, and columns of its rows.

Nothing is held against digests here: ``kvjax verify`` does that. Rows of formats before the present one, and of deltas,
are read by kvjax.checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._formats.errors import FileError
from kvjax._formats.paths import AnyPath
from kvjax._formats.source import row_bytes
from kvjax._values.errors import meant
from kvjax._values.prune import norms_of
from kvjax._values.snapshot import column_types
from kvjax.checkpoint._fields import check_meta
from kvjax.checkpoint._files import MOST_JSON, files_below, read, read_json, size_of
from kvjax.checkpoint._format import (
    FORMAT,
    META,
    PACKED,
    UNLISTED,
    Damaged,
    array_folder,
    chunk_path,
    chunk_rows,
    manifest_tables,
    shard_folder,
    shards_of,
    table_folder,
)
from kvjax.checkpoint._locate import locate, unlisted_tables

if TYPE_CHECKING:
    from kvjax._formats.source import Source

_VERIFY = "kvjax verify says what is damaged"


class SavedTable:
    """A table on disk.

    Args:
      folder: of the table.
      meta: what kvjax.json says.

    Attributes:
      bases: where to look for what a delta builds on, beside the folders next to it.
    """

    bases: Sequence[str] = ()

    def __init__(self, folder: AnyPath, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.name, self.rows, self.last_step = str(meta["name"]), int(meta["rows"]), int(meta["last_step"])

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(size_of(self.folder / path.as_posix()) for path in files_below(self.folder))

    @property
    def all_rows(self) -> int:
        """How many there are, of a delta with those of what it builds on."""
        if "delta" not in self.meta:
            return self.rows
        return self._source().num_rows

    def column(self, name: str) -> np.ndarray:
        """A column of all rows."""
        parts = list(self.pieces(name))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A column in pieces, shard by shard.

        Raises:
          FileError: a file of it is not there, or not whole.
        """
        if self.meta["format"] != FORMAT or "delta" in self.meta:
            yield from self._source().pieces(name)
            return
        try:
            meta, shards = self.meta, shards_of(self.meta)
            dtype, shape = column_types(meta["dim"], np.dtype(meta["dtype"]), meta["key_dtype"], {})[name]
            for i, shard in enumerate(shards):
                folder = self.folder / shard_folder(i, len(shards)) / array_folder(name)
                yield from _chunks(folder, dtype, (shard["rows"], *shape))
        except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
            want = f"the column {name!r} of the checkpoint"
            raise FileError(self.folder, want, f"none ({error})", _VERIFY) from error

    def norms(self) -> np.ndarray:
        """The Euclidean norm of each row, ``(rows,)`` float64."""
        parts = [norms_of(piece) for piece in self.pieces("values")]
        return np.concatenate(parts) if parts else np.zeros(0)

    def norms_at(self, rows: np.ndarray) -> np.ndarray:
        """The norms of some rows, by their places ``(n,)``."""
        out, start = np.zeros(len(rows)), 0
        for piece in self.pieces("values"):
            here = (rows >= start) & (rows < start + len(piece))
            out[here] = norms_of(piece[rows[here] - start])
            start += len(piece)
        return out

    def _source(self) -> Source:
        from kvjax.checkpoint._chain import Chain
        from kvjax.checkpoint._chain_rows import ChainRows

        return ChainRows(Chain(self.folder.parent, self.bases, "read"), self.name).source()


def _chunks(folder: AnyPath, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    n = chunk_rows(dtype, shape)
    for start in range(0, shape[0], n):
        path = folder / chunk_path(start // n, shape)
        size = n * row_bytes((dtype, shape[1:]))
        if not path.is_file() or size_of(path) != size:  # a FIFO would wait
            raise Damaged(f"want {path} with {size} bytes, got another or none")
        if isinstance(path, Path):
            chunk = np.memmap(path, dtype, "r", shape=(n, *shape[1:]))  # what is not looked at is not read
        else:
            chunk = np.frombuffer(read(path, size), dtype).reshape(n, *shape[1:])
        yield chunk[: shape[0] - start]


def tables_at(
    path: str, only: str | None = None, bases: Sequence[str] | None = None
) -> tuple[AnyPath, list[SavedTable]]:
    """The tables of the checkpoint at a path, and where that is.

    Args:
      path: of a checkpoint, an Orbax step, or a manager's root.
      only: the name of one of them.
      bases: where to look for what a delta builds on.

    Raises:
      CheckpointError: there is no checkpoint.
      FileError: it has no such table, or one that it lists is not there.
    """
    folder = locate(path)
    folders = _table_folders(folder)
    if only is not None and only not in folders:
        names = list(folders)
        raise FileError(
            folder, "one of its tables", f"{only!r} of {names}", meant(only, names).strip() or "say another"
        )
    tables = [_table(name, each) for name, each in folders.items() if only in (None, name)]
    for table in tables:
        table.bases = bases or ()
    return folder, tables


def tables_of(folder: AnyPath, bases: Sequence[str] = ()) -> list[SavedTable]:
    """All tables of the checkpoint in a folder."""
    tables = [_table(name, each) for name, each in _table_folders(folder).items()]
    for table in tables:
        table.bases = bases
    return tables


def table_at(path: str, name: str | None, bases: Sequence[str] | None = None) -> SavedTable:
    """The table of that name, or the only one.

    Raises:
      FileError: there is none, or there are several.
    """
    folder, tables = tables_at(path, name, bases)
    if len(tables) != 1:
        raise FileError(folder, "one table", f"{[table.name for table in tables]}", "say which: --table")
    return tables[0]


def _table_folders(folder: AnyPath) -> dict[str, AnyPath]:
    """Where each table is that the manifest lists; before there were manifests, each that is there."""
    try:
        if not (folder / META).exists():
            return {str(_said(path / META).get("name")): path for path in unlisted_tables(folder)}
        _, tables = manifest_tables(_said(folder / META))
    except Damaged as error:
        raise FileError(folder / META, "the list of all tables", f"none ({error})", _VERIFY) from error
    return {name: folder / table_folder(name) for name in sorted(tables)}


def _table(name: str, folder: AnyPath) -> SavedTable:
    try:
        return SavedTable(folder, check_meta(_said(folder / META), (FORMAT, PACKED, UNLISTED), name))
    except Damaged as error:
        raise FileError(folder / META, f"what the table {name!r} is", f"something else ({error})", _VERIFY) from error


def _said(path: AnyPath) -> dict[str, Any]:
    """What a file of JSON says.

    Raises:
      FileError: it is none.
    """
    try:
        said = read_json(read(path, MOST_JSON))
        if isinstance(said, dict):
            return said
        raise Damaged("want fields, got none")
    except Damaged as error:
        raise FileError(path, "what the checkpoint lists", f"something else ({error})", _VERIFY) from error
