"""Saving without Orbax: tables into a folder that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import jax

from kvjax._formats.atomic import NewFolder, NewInStore, new_folder
from kvjax._formats.paths import AnyPath, anywhere
from kvjax._sharded.processes import each_together, everyone, together
from kvjax._table.table import Table, check_table, is_table
from kvjax._values.arguments import is_name
from kvjax._values.errors import fail, warn
from kvjax._values.prune import PruneLike
from kvjax.checkpoint._chains.built_on import built_on, listed
from kvjax.checkpoint._chains.catalog import write_manifest
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._chains.new import begin
from kvjax.checkpoint._prune import in_words
from kvjax.checkpoint._tables.cursors import agreed, check_not_at, cursor_at, finished, key_of, moving
from kvjax.checkpoint._tables.unsaved_copies import warn_of_unsaved_copies
from kvjax.checkpoint._tables.write import Stored, freeze, savers, write

T = TypeVar("T")


def save(
    path: PathLike, tables: Mapping[str, Table] | Iterable[Table], *, prune: PruneLike | None = None,
    cursor: str | None = None, since: str | None = None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Saves tables into a folder, which is there as a whole or not at all.

    With ``since=`` it saves a delta: only the rows that have changed since the last save with that cursor, and the keys
    whose rows are gone, by any write. `restore` finds the checkpoints that a delta builds on, and `compact` makes one
    checkpoint of them. While a table has cursors it remembers which keys are touched, in about 25 bytes for each. If it
    does not know them, a delta has all rows of the table, and builds on nothing. This happens after ``clear``,
    ``clear_slots``, ``load``, a restore or a move of the table, and once more keys were touched than it has rows (and
    more than 65,536). A table on a GPU keeps a digest of each row instead, in 16 bytes of host memory, and twice as
    much during a save. A delta then reads all rows on the GPU and copies those that have changed, and the table knows
    them even after a ``load`` or a restore. A delta in which nothing has changed takes half a megabyte on disk.

    A save takes about 50 MB of memory, 13 bytes a row, and memory for the rows that training touches before they are
    saved: less than a tenth of a table of a gigabyte or more. Copied first are tables that are pruned, the changes of
    deltas, tables on a GPU, in an engine (`kvjax.storage.External`) or in several shards of a partitioner's, and what
    `kvjax.optax.caught_up` and `averaged` return.

    In a store, a checkpoint is listed once it is whole. A save that fails removes what it has written; what a killed
    save has written stays, and is ignored.

    In several processes, all save the same tables together, with the same arguments, into a shared folder, as with
    `kvjax.orbax.TableSave`. Each writes the rows of its own shards. Of a table that is not sharded over processes,
    process 0 writes its copy; a warning says so if another process has other rows.

    Args:
      path: the folder, which must not exist yet; also one of a store, such as ``s3://bucket/run/7``.
      tables: live handles by their names in the checkpoint, or just handles. The tables of a state are
        ``kvjax.orbax.split(state)[1]``. A save without tables warns. They have to be live until their rows
        are frozen, once the path is found to be free, which takes a store some requests to say: if another thread
        writes to a table before that, the save fails.
      prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep; by default all.
      cursor: saves everything, and puts a cursor of this name at this save, or moves it there. A cursor belongs to the
        tables that are saved together, and ends with the process. Cursors are independent, for example one for training
        and one for serving.
      since: name of the cursor since which to save what has changed; the cursor moves to this save. A table that the
        cursor does not know is saved whole, and the cursor then belongs to it, too. Keep the checkpoints that the delta
        builds on where a restore finds them or gets them as ``base=``; if one is gone, a warning says so.
      overwrite: replace an existing checkpoint. Anything else is never replaced, not even in its folder, and nothing in
        a store is replaced. If deltas beside it build on what is replaced, they do not restore any more, and a warning
        names them; a delta does not replace what it builds on itself.

    Raises:
      CheckpointError: there is something at the path (with `overwrite`, something that is no checkpoint), or the path
        is in a checkpoint, or another process is saving there, or there is no such cursor.
      ValueError: a table cannot have cursors, or `prune` is given together with one, or the calls of several processes
        are not the same.
      TypeError: `tables` has something other than tables.
      OSError: the disk is full, or the folder cannot be written. Then nothing is left at the path.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_saved", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> kvjax.drop_table("doc_saved")
      >>> table = kvjax.checkpoint.restore(folder.name + "/one")["doc_saved"]
      >>> table.lookup(7).tolist()
      [1.0, 2.0]
      >>> kvjax.checkpoint.save(folder.name + "/base", [table], cursor="serving")
      >>> table = table.upsert(np.array([8]), [[3.0, 4.0]])
      >>> kvjax.checkpoint.save(folder.name + "/delta", [table], since="serving")
      >>> kvjax.checkpoint.restore(folder.name + "/delta")["doc_saved"].shape
      (2, 2)
      >>> kvjax.drop_table("doc_saved")
      >>> folder.cleanup()
    """
    place, lost = everyone(), list[AnyPath]()

    def at_first() -> tuple[dict[str, Table], NewFolder | NewInStore]:
        return named(tables), new_folder(anywhere(path, "save").resolve())  # not in the place of a link

    def begin_it() -> None:
        if since is not None and overwrite:
            check_not_at(new.target, since, given)
        begin(new, overwrite, "save", over_base=True)

    def finish() -> str:
        digest = write_manifest(new.path)
        with contextlib.suppress(OSError):  # what is beside it may go meanwhile, and this only warns
            lost.extend(built_on(new.target) if overwrite else ())
        new.install()
        return digest

    def first(body: Callable[[], T]) -> T | None:
        return together(place, None, "save", body if jax.process_index() == 0 else lambda: None)

    given, new = together(place, None, "save", at_first, {"overwrite": overwrite})
    try:
        first(begin_it)
        stored = freeze_all(given, new.path, prune, cursor, since)
        together(place, None, "save", lambda: write(new.path, stored))
        digest = first(finish)
    except BaseException:
        new.discard()
        raise
    if digest is not None:
        finished(new.path, digest, new.target)  # which may warn, and the checkpoint is there all the same
    if lost:
        warn(
            f"kvjax: save: want to replace a checkpoint that no other builds on, got {new.target}: {listed(lost)} "
            "on what this save has replaced, without which no delta restores; save to another path, and delete what is "
            "of no use now (a release that has followed a delta has its rows)"
        )


def freeze_all(
    tables: Mapping[str, Table] | Iterable[Table], directory: AnyPath, prune: PruneLike | None, cursor: str | None,
    since: str | None,
) -> list[Stored]:  # fmt: skip
    """What this process has of tables to save below `directory`; a cursor is on its way there."""
    place = everyone()

    def at_first() -> tuple[dict[str, Table], str | None]:
        for name, given in (("cursor", cursor), ("since", since)):
            if given is not None and not (isinstance(cast("object", given), str) and given):
                raise TypeError(f"kvjax: save: want {name}= as the name of a cursor, got {given!r:.50}; give a text")
        if cursor is not None and since is not None and cursor != since:
            raise ValueError(
                "kvjax: save: want cursor= for all rows or since= for a delta, which moves its cursor, got "
                f"{cursor!r} and {since!r}; save twice"
            )
        if prune is not None and (cursor or since) is not None:
            raise ValueError(
                "kvjax: save: want all rows in a checkpoint that deltas build on, got prune=; leave out the cursor, or "
                "use kvjax.checkpoint.prune on the checkpoint"
            )
        return named(tables), None if prune is None else in_words(prune) or "none"

    given, rule = together(place, None, "save", at_first, {"cursor": cursor, "since": since})
    together(place, None, "save", lambda: None, {"prune": rule})
    if not given:
        warn(
            "kvjax: save: want tables, got none, so the checkpoint is empty; give kvjax.orbax.split(state)[1] of a "
            "state that has tables"
        )
    warn_of_unsaved_copies(given)
    at = None if since is None else cursor_at(since, given)
    if cursor is not None:
        agreed(key_of(cursor, given))  # else a save that fails would leave it at different places
    with moving(cursor or since, given, directory, at and at.key):
        needed = {name: savers(table) for name, table in given.items()}
        stored = each_together(place, "save", needed, lambda name: freeze(name, given[name], prune, at))
    return list(stored.values())


def named(tables: Mapping[str, Table] | Iterable[Table]) -> dict[str, Table]:
    """Tables by the names under which they are saved."""
    anything = cast("object", tables)
    if is_table(anything) or not isinstance(anything, Iterable):
        raise TypeError(
            f"kvjax: save: want tables, or tables by name, got {type(anything).__name__}; give [table], or of a state "
            "kvjax.orbax.split(state)[1]"
        )
    if isinstance(tables, Mapping):
        given = dict(cast("Mapping[str, Table]", tables))
        for table in given.values():
            check_table(table, "save")
    else:
        each = list(tables)
        for table in each:
            check_table(table, "save")
        given = {table.name: table for table in each}
    for name, table in given.items():
        _check_name(name, table.name)
    return given


def _check_name(name: Any, table: str) -> None:
    """Whether a table can be saved under a name.

    Raises:
      ValueError: it cannot.
    """
    if not is_name(name):
        raise fail(
            ValueError, table, "save", "a name to save it under, in UTF-8 and not empty", repr(name),
            "TableSave({name: table})",
        )  # fmt: skip
