"""Saved tables, by NumPy alone: what a checkpoint says of itself, and columns of its rows.

Nothing is held against digests here: ``kvjax verify`` does that. Rows of formats before the present one, and of deltas,
are read by kvjax.checkpoint, which loads JAX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax._formats.errors import FileError
from kvjax._values.errors import meant
from kvjax._values.prune import norms_of

META = "kvjax.json"
_STEP = re.compile(r"(.*_)?(\d+)")


class SavedTable:
    """A table on disk.

    Args:
      folder: of the table.
      meta: what kvjax.json says.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.name, self.rows, self.last_step = str(meta["name"]), int(meta["rows"]), int(meta["last_step"])

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def column(self, name: str) -> np.ndarray:
        """A column of all rows."""
        parts = list(self.pieces(name))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """A column in pieces, shard by shard.

        Raises:
          FileError: a file of it is not there, or not whole.
        """
        if self.meta["format"] != "kvjax.table.v3" or "delta" in self.meta:
            yield from self._pieces_of_others(name)
            return
        shards = [shard["rows"] for shard in self.meta.get("shards", [self.meta])]
        for i, rows in enumerate(shards):
            yield from self._chunks(self.folder / f"shard-{i:05}-of-{len(shards):05}" / name, rows)

    def norms(self) -> np.ndarray:
        """The Euclidean norm of each row, ``(rows,)`` float32."""
        parts = [norms_of(piece) for piece in self.pieces("values")]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def norms_at(self, rows: np.ndarray) -> np.ndarray:
        """The norms of some rows, by their places ``(n,)``."""
        out, start = np.zeros(len(rows), np.float32), 0
        for piece in self.pieces("values"):
            here = (rows >= start) & (rows < start + len(piece))
            out[here] = norms_of(piece[rows[here] - start])
            start += len(piece)
        return out

    def _chunks(self, folder: Path, rows: int) -> Iterator[np.ndarray]:
        try:
            about = _read(folder / "zarr.json")
            shape, kind = tuple(about["chunk_grid"]["configuration"]["chunk_shape"]), about["data_type"]
            dtype = np.dtype(getattr(ml_dtypes, kind, kind))
            for i in range(-(-rows // shape[0])):
                path = folder / ".".join(["c", str(i), *("0" for _ in shape[1:])])
                chunk = np.memmap(_regular(path), dtype, "r").reshape(shape)  # what is not looked at is not read
                yield chunk[: rows - i * shape[0]]
        except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
            raise FileError(
                folder, "an array of the checkpoint", f"{error}", "kvjax verify says what is damaged"
            ) from error

    def _pieces_of_others(self, name: str) -> Iterator[np.ndarray]:
        from kvjax.convert._checkpoint import open_table

        _, source = open_table(self.folder.parent, self.name)
        yield from source.pieces(name)


def tables_at(path: str, only: str | None = None) -> tuple[Path, list[SavedTable]]:
    """The tables of the checkpoint at a path, and where that is.

    Args:
      path: of a checkpoint, an Orbax step, or a manager's root.
      only: the name of one of them.

    Raises:
      FileError: there is none.
    """
    found = _found(Path(path)) or next((found for _, found in reversed(list(steps_at(path))) if found), {})
    if len(found) != 1:
        raise FileError(
            path, "a checkpoint of tables", f"{[str(each) for each in found] or 'none'}",
            "give the folder of one, an Orbax step, or the manager's folder",
        )  # fmt: skip
    ((folder, tables),) = found.items()
    if only is not None and only not in {table.name for table in tables}:
        names = [table.name for table in tables]
        raise FileError(
            folder, "one of its tables", f"{only!r} of {names}", meant(only, names).strip() or "say another"
        )
    return folder, [table for table in tables if only in (None, table.name)]


def table_at(path: str, name: str | None) -> SavedTable:
    """The table of that name, or the only one.

    Raises:
      FileError: there is none, or there are several.
    """
    folder, tables = tables_at(path, name)
    if len(tables) != 1:
        raise FileError(folder, "one table", f"{[table.name for table in tables]}", "say which: --table")
    return tables[0]


def steps_at(path: str) -> Iterator[tuple[int, dict[Path, list[SavedTable]]]]:
    """The steps below a manager's root, in order, with the checkpoints of tables in each."""
    folders = [(int(name[2]), child) for child in _folders(Path(path)) if (name := _STEP.fullmatch(child.name))]
    for step, folder in sorted(folders):
        yield step, _found(folder)


def _found(path: Path) -> dict[Path, list[SavedTable]]:
    """The checkpoint of tables at a path, or those in the folders right below it."""
    places = [path] if _is_checkpoint(path) else filter(_is_checkpoint, _folders(path))
    return {place: _tables(place) for place in places}


def _is_checkpoint(path: Path) -> bool:
    return "contents" in _read(path / META) or any(_is_table(_read(file)) for file in path.glob(f"*/{META}"))


def _tables(path: Path) -> list[SavedTable]:
    metas = [(file.parent, _read(file)) for file in sorted(path.glob(f"*/{META}"))]
    if damaged := [folder for folder, meta in metas if not _is_table(meta)]:
        raise FileError(damaged[0] / META, "what a table is", "something else", "kvjax verify says what is damaged")
    return [SavedTable(folder, meta) for folder, meta in metas]


def _is_table(meta: dict[str, Any]) -> bool:
    known = all(isinstance(meta.get(field), int) for field in ("rows", "dim", "last_step"))
    return known and isinstance(meta.get("name"), str) and str(meta.get("format")).startswith("kvjax.table.")


def _read(path: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing, if it is none."""
    try:
        said = json.loads(_regular(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _regular(path: Path) -> Path:
    """The path of a regular file; a FIFO would wait for who writes it.

    Raises:
      FileError: it is something else.
    """
    if not path.is_file():
        raise FileError(path, "a file of bytes", "none", "kvjax verify says what is damaged")
    return path


def _folders(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
