"""Cursors: the points from which the deltas of tables continue.

A cursor has a name, and is of the tables that are saved together. A delta may have more tables, and then the cursor is
of those, too. It is at the checkpoint that was last saved with it, and moves once another is finished: until then a
save may fail, and the next delta begins where this one did. In several processes all have it, and process 0 alone hears
that a checkpoint is finished: with the next save the others take its word.
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
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._chains.chain import Chain, Places, places_of
from kvjax.checkpoint._disk.files import is_same
from kvjax.checkpoint._disk.format import CheckpointError

Key = tuple[str, tuple[str, ...]]
"""The name of a cursor, and those of its tables, sorted."""

Marks = dict[str, tuple[Table, Mark]]
"""By the names under which tables are saved: a handle, and what the table knows the cursor by."""


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where a cursor is.

    Attributes:
      key: its name, and those of its tables.
      checkpoint: the digest of the manifest of the checkpoint that it is at.
      marks: of the tables; none if this process does not know.
      directory: below which the checkpoint was saved; None if it was restored.
      places: where it and what it builds on are, as far as this process knows.
    """

    key: Key
    checkpoint: str
    marks: Marks
    directory: AnyPath | None = None
    places: Places = dataclasses.field(default_factory=Places)


@dataclasses.dataclass(frozen=True)
class _Moving:
    """A cursor on its way to a checkpoint that is not finished yet.

    Attributes:
      key: of the cursor there.
      of: where it comes from: of the cursor as it is, which may have fewer tables.
      marks: of the tables there.
    """

    key: Key
    of: Key
    marks: Marks


_CURSORS: dict[Key, Cursor] = PROCESS.cursors
_MOVING: dict[AnyPath, _Moving] = PROCESS.moving


def cursor_at(name: str, tables: Mapping[str, Table]) -> Cursor:
    """Where the cursor of this name is: that of these tables, or else of some of them, if the others are new to it.

    Raises:
      CheckpointError: there is none.
    """
    key = _key_for(name, tables)
    found = None if key is None else agreed(key)
    if found is None:
        known = sorted(f"{other!r} of {list(of)}" for other, of in _CURSORS)
        if any(other == name for other, _ in _CURSORS):
            mend = f"save all tables of such a cursor, or put one at these: save them whole, with cursor={name!r}"
        else:
            mend = (
                f"put it at a checkpoint first: restore(..., cursor={name!r}) of the last one, as a new process does "
                f"(with Orbax: TableRestore), or save the tables whole, with cursor={name!r}"
            )
        raise CheckpointError(
            f"kvjax: save: want a cursor {name!r} of the tables {sorted(tables)} in this process, or of some of them, "
            f"got {', '.join(known) or 'none'}; {mend}"
        )
    return found


def check_not_at(place: AnyPath, name: str, tables: Mapping[str, Table]) -> None:
    """Whether a delta of tables since a cursor may take the place of what is there.

    Raises:
      CheckpointError: the delta builds on that.
    """
    there = set(Catalog(place).digests)
    for (other, of), at in list(_CURSORS.items()):
        if other != name or not {*of} <= {*tables}:
            continue
        bases = [base for base in at.places if base.exists()] if place.exists() else []
        if at.checkpoint in there or any(is_same(place, base) for base in bases):
            raise CheckpointError(
                f"kvjax: save: want another path than that of what a delta since {name!r} builds on, got {place}; give "
                f"another path, or save the tables whole, with cursor={name!r}"
            )


def _key_for(name: str, tables: Mapping[str, Table]) -> Key | None:
    """Of the cursors of a name in process 0, the one of all these tables, or of the most of them: of a table that it
    is not of, a delta has all. None if there is none, or two are of tables that the other is not of."""
    mine = [of for other, of in _CURSORS if other == name and {*of} <= {*tables}]
    most = max(mine, key=len, default=None)
    if most is not None and any(not {*of} <= {*most} for of in mine):
        most = None
    said = allgather_json(everyone(), most)[0]
    return None if said is None else (name, tuple(said))


def agreed(key: Key) -> Cursor | None:
    """Where the cursor is in process 0, if it is anywhere; all processes ask together."""
    place = everyone()
    mine = _CURSORS.get(key)
    if place is None:
        return mine
    said = allgather_json(place, None if mine is None else [mine.checkpoint, mine.directory and str(mine.directory)])[0]
    if said is None:
        return None
    checkpoint, directory = said
    if mine is None or mine.checkpoint != checkpoint:
        on_its_way = _MOVING.pop(anywhere(directory, "save"), None) if directory else None
        if on_its_way is not None and on_its_way.key == key:
            _put(Cursor(key, checkpoint, on_its_way.marks), on_its_way.of)
        else:
            _close({} if on_its_way is None else on_its_way.marks)
            _put(Cursor(key, checkpoint, {}), key)
    return _CURSORS[key]


@contextlib.contextmanager
def moving(name: str | None, tables: Mapping[str, Table], directory: AnyPath, of: Key | None) -> Generator[None]:
    """Begins to move a cursor to what is saved of the tables in the body; `finished` ends it.

    Args:
      name: of the cursor; None for none.
      tables: by the names under which they are saved.
      directory: of the checkpoint.
      of: the key of the cursor that moves; None for that of these tables.
    """
    if name is None:
        yield
        return
    key = key_of(name, tables)
    of = of or key
    for folder, old in list(_MOVING.items()):
        if {old.key, old.of} & {key, of} or folder == directory:  # which has failed, or would move it back
            _close(_MOVING.pop(folder).marks)
    marks: Marks = {}

    def begin() -> None:
        for saved, table in tables.items():
            marks[saved] = table, open_cursor(table)

    try:
        together(everyone(), None, "save", begin)
        yield
    except BaseException:
        _close(marks)
        raise
    _MOVING[directory] = _Moving(key, of, marks)


def finished(directory: AnyPath, digest: str, at: AnyPath | None = None) -> Places:
    """Says that a checkpoint is there as a whole: a cursor that was on its way to it is at it.

    Gives where what it builds on and, as the last, it are; nothing if no cursor was on its way to it.

    Args:
      directory: below which it was saved.
      digest: of its manifest.
      at: where it is; by default there.
    """
    found = _MOVING.pop(directory, None)
    if found is None:
        return {}
    old = _CURSORS.get(found.of)
    places = places_of(at or directory, {} if old is None else old.places)
    _put(Cursor(found.key, digest, found.marks, directory, places), found.of)
    return places


def put(name: str, tables: Mapping[str, Table], chain: Chain, digest: str) -> None:
    """Puts a cursor at a checkpoint from which tables have been restored just now."""
    marks: Marks = {saved: (table, open_cursor(table)) for saved, table in tables.items()}
    key = key_of(name, tables)
    bases = [link.catalog.directory for saved in tables for link in chain.links(saved)]
    places: Places = {}  # which are looked at once again, wherever the process works then
    for place in (*bases, chain.catalog.directory, *chain.given):
        places[place.resolve()] = None
    _put(Cursor(key, digest, marks, places=places), key)


def _put(cursor: Cursor, of: Key) -> None:
    """Has a cursor be where it is now, and no longer where it comes from."""
    olds = [_CURSORS.pop(key, None) for key in {cursor.key, of}]
    _CURSORS[cursor.key] = cursor
    for old in olds:
        _close({} if old is None else old.marks)


def _close(marks: Marks) -> None:
    for table, mark in marks.values():
        close_cursor(table, mark)


def key_of(name: str, tables: Mapping[str, Table]) -> Key:
    """By what a process knows a cursor of this name, of these tables."""
    return name, tuple(sorted(tables))
