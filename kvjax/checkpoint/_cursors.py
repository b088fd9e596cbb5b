"""Cursors: from where the deltas of tables go on.

A cursor has a name, and is of the tables that are saved together. It is at the checkpoint that was last saved with it,
and moves once another is finished: until then a save may fail, and the next delta begins where this one did. In several
processes all have it, and process 0 alone hears that a checkpoint is finished: with the next save the others take its
word.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping

from kvjax._formats.paths import AnyPath, anywhere
from kvjax._process import PROCESS
from kvjax._sharded.processes import allgather_json, everyone, together
from kvjax._table.changes import Mark, close_cursor, open_cursor
from kvjax._table.table import Table
from kvjax.checkpoint._chain import Chain, places_of
from kvjax.checkpoint._format import CheckpointError

Marks = dict[str, tuple[Table, Mark]]
"""By the names under which tables are saved: a handle, and what the table knows the cursor by."""


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where a cursor is.

    Attributes:
      checkpoint: the digest of the manifest of the checkpoint that it is at.
      marks: of the tables; none if this process does not know.
      directory: below which the checkpoint was saved; None if it was restored.
      places: where it and what it builds on are, as far as this process knows.
    """

    checkpoint: str
    marks: Marks
    directory: AnyPath | None = None
    places: tuple[AnyPath, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Moving:
    """A cursor on its way to a checkpoint that is not finished yet."""

    key: tuple[str, tuple[str, ...]]
    marks: Marks


def cursor_at(name: str, tables: Mapping[str, Table]) -> Cursor:
    """Where the cursor of this name, of these tables, is.

    Raises:
      CheckpointError: there is none.
    """
    found = agreed(name, tables)
    if found is None:
        known = sorted(f"{key[0]!r} of {list(key[1])}" for key in PROCESS.cursors if isinstance(key, tuple))
        raise CheckpointError(
            f"kvjax: save: want a cursor {name!r} of the tables {sorted(tables)} in this process, got "
            f"{', '.join(known) or 'none'}; put it at a checkpoint first: restore(..., cursor={name!r}) of the last "
            f"one, as a new process does (with Orbax: TableRestore), or save the tables whole, with cursor={name!r}"
        )
    return found


def agreed(name: str, tables: Mapping[str, Table]) -> Cursor | None:
    """Where the cursor is in process 0, if it is anywhere; all processes ask together."""
    key, place = _key(name, tables), everyone()
    mine: Cursor | None = PROCESS.cursors.get(key)
    if place is None:
        return mine
    said = allgather_json(place, None if mine is None else [mine.checkpoint, mine.directory and str(mine.directory)])[0]
    if said is None:
        return None
    checkpoint, directory = said
    if mine is None or mine.checkpoint != checkpoint:
        on_its_way: _Moving | None = PROCESS.cursors.pop(anywhere(directory, "save"), None) if directory else None
        known = on_its_way is not None and on_its_way.key == key
        _put(key, Cursor(checkpoint, on_its_way.marks if on_its_way is not None and known else {}))
    return PROCESS.cursors[key]


@contextlib.contextmanager
def moving(name: str | None, tables: Mapping[str, Table], directory: AnyPath) -> Generator[None]:
    """Begins to move a cursor to what is saved of the tables in the body; `finished` ends it.

    Args:
      name: of the cursor; None for none.
      tables: by the names under which they are saved.
      directory: of the checkpoint.
    """
    if name is None:
        yield
        return
    key = _key(name, tables)
    for folder, old in _under_way():
        if old.key == key or folder == directory:  # which has failed, or would move it back
            _close(PROCESS.cursors.pop(folder).marks)
    marks: Marks = {}

    def begin() -> None:
        for saved, table in tables.items():
            marks[saved] = table, open_cursor(table)

    try:
        together(everyone(), "", "save", begin)
        yield
    except BaseException:
        _close(marks)
        raise
    PROCESS.cursors[directory] = _Moving(key, marks)


def finished(directory: AnyPath, digest: str, at: AnyPath | None = None) -> tuple[AnyPath, ...]:
    """Says that a checkpoint is there as a whole: a cursor that was on its way to it is at it.

    Gives where what it builds on and, as the last, it are; nothing if no cursor was on its way to it.

    Args:
      directory: below which it was saved.
      digest: of its manifest.
      at: where it is; by default there.
    """
    found = PROCESS.cursors.pop(directory, None)
    if found is None:
        return ()
    old: Cursor | None = PROCESS.cursors.get(found.key)
    places = places_of(at or directory, () if old is None else old.places)
    _put(found.key, Cursor(digest, found.marks, directory, places))
    return places


def put(name: str, tables: Mapping[str, Table], chain: Chain, digest: str) -> None:
    """Puts a cursor at a checkpoint from which tables have been restored just now."""
    marks: Marks = {saved: (table, open_cursor(table)) for saved, table in tables.items()}
    _put(_key(name, tables), Cursor(digest, marks, places=(chain.catalog.directory, *chain.given)))


def _put(key: tuple[str, tuple[str, ...]], cursor: Cursor) -> None:
    old = PROCESS.cursors.get(key)
    PROCESS.cursors[key] = cursor
    if old is not None:
        _close(old.marks)


def _under_way() -> list[tuple[AnyPath, _Moving]]:
    return [(key, value) for key, value in PROCESS.cursors.items() if not isinstance(key, tuple)]


def _close(marks: Marks) -> None:
    for table, mark in marks.values():
        close_cursor(table, mark)


def _key(name: str, tables: Mapping[str, Table]) -> tuple[str, tuple[str, ...]]:
    return name, tuple(sorted(tables))
