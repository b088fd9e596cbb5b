"""Saved tables: what a checkpoint says of itself, without a look at digests, and columns of its rows, which
kvjax.checkpoint reads and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._formats.errors import FileError
from kvjax._formats.paths import AnyPath
from kvjax._formats.source import row_bytes
from kvjax._values.errors import meant
from kvjax._values.exported import ROW_COLUMNS
from kvjax._values.prune import norms_of
from kvjax._values.snapshot import concat, take
from kvjax.checkpoint._fields import check_meta
from kvjax.checkpoint._files import files_below, json_at
from kvjax.checkpoint._format import (
    FORMAT,
    META,
    PACKED,
    UNLISTED,
    Damaged,
    manifest_tables,
    table_folder,
)
from kvjax.checkpoint._locate import locate, unlisted_tables

if TYPE_CHECKING:
    from kvjax._formats.source import Source

_BLOCK_BYTES = 1 << 22
_VERIFY = "kvjax verify says what is damaged"


class SavedTable:
    """A table on disk.

    Args:
      folder: of the table.
      meta: what kvjax.json says.
      op: the operation, which errors name.
      bases: where to look for what a delta builds on, beside the folders next to it.

    Attributes:
      name: of the table.
      rows: how many there are, of a delta those that it has itself.
      last_step: of the table.
    """

    def __init__(self, folder: AnyPath, meta: dict[str, Any], op: str, bases: Sequence[str] | None) -> None:
        self.folder, self.meta, self.bases, self._op = folder, meta, bases or (), op
        self.name, self.rows, self.last_step = str(meta["name"]), int(meta["rows"]), int(meta["last_step"])

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(files_below(self.folder).values())

    @property
    def all_rows(self) -> int:
        """How many there are, of a delta with those of what it builds on."""
        return self.open().num_rows if "delta" in self.meta else self.rows

    def open(self) -> SavedRows:
        """Its rows, and of a delta those of what it builds on. It takes some MiB of memory, so not for all tables at a
        time."""
        from kvjax.checkpoint._chain import Chain  # and a library of hashes, which `kvjax inspect` does without
        from kvjax.checkpoint._chain_rows import ChainRows

        return SavedRows(ChainRows(Chain(self.folder.parent, self.bases, self._op), self.name).source())


class SavedRows:
    """The rows of a table on disk, sorted by (bucket, key)."""

    def __init__(self, source: Source) -> None:
        self._source, self.num_rows = source, source.num_rows

    def column(self, name: str) -> np.ndarray:
        """A column of all rows."""
        parts = list(self._source.pieces(name))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def norms(self) -> np.ndarray:
        """The Euclidean norm of each row, ``(rows,)`` float64."""
        parts = [norms_of(piece) for piece in self._source.pieces("values")]
        return np.concatenate(parts) if parts else np.zeros(0)

    def at(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """All columns but the slots of some rows, by their places ``(n,)``. Only blocks that have one of them are
        read."""
        order, block = np.argsort(rows, kind="stable"), max(1, _BLOCK_BYTES // row_bytes(self._source.types["values"]))
        places = rows[order]
        parts = [self._source.read(ROW_COLUMNS, 0, 0)]
        for near in np.split(places, np.flatnonzero(np.diff(places // block)) + 1):
            if len(near):
                first = int(near[0])
                parts.append(take(self._source.read(ROW_COLUMNS, first, int(near[-1]) + 1), near - first))
        return take(concat(parts), np.argsort(order))


def tables_at(path: str, only: str | None, bases: Sequence[str] | None, op: str) -> tuple[AnyPath, list[SavedTable]]:
    """The tables of the checkpoint at a path, and where that is.

    Args:
      path: of a checkpoint, an Orbax step, or a manager's root.
      only: the name of one of them; None for all.
      bases: where to look for what a delta builds on.
      op: the operation, which errors name.

    Raises:
      CheckpointError: there is no checkpoint.
      FileError: it has no such table, or one that it lists is not there.
    """
    folder = locate(path, op)
    folders = _table_folders(folder)
    if only is not None and only not in folders:
        names = list(folders)
        raise FileError(
            folder, "one of its tables", f"{only!r} of {names}", meant(only, names).strip() or "say another"
        )
    return folder, [_table(name, each, op, bases) for name, each in folders.items() if only in (None, name)]


def tables_of(folder: AnyPath, bases: Sequence[str], op: str) -> list[SavedTable]:
    """All tables of the checkpoint in a folder."""
    return [_table(name, each, op, bases) for name, each in _table_folders(folder).items()]


def table_at(path: str, name: str | None, bases: Sequence[str] | None, op: str) -> SavedTable:
    """The table of that name, or the only one.

    Raises:
      FileError: there is none, or there are several.
    """
    folder, tables = tables_at(path, name, bases, op)
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


def _table(name: str, folder: AnyPath, op: str, bases: Sequence[str] | None) -> SavedTable:
    try:
        return SavedTable(folder, check_meta(_said(folder / META), (FORMAT, PACKED, UNLISTED), name), op, bases)
    except Damaged as error:
        raise FileError(folder / META, f"what the table {name!r} is", f"something else ({error})", _VERIFY) from error


def _said(path: AnyPath) -> dict[str, Any]:
    """What a file of JSON says.

    Raises:
      FileError: it is none.
    """
    try:
        said = json_at(path)
        if isinstance(said, dict):
            return said
        raise Damaged("want fields, got none")
    except Damaged as error:
        raise FileError(path, "what the checkpoint lists", f"something else ({error})", _VERIFY) from error
