"""Moves of a table's rows, into another storage or another table, as methods of `kvjax.Table`; and to other shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from kvjax._process import PROCESS
from kvjax._sharded.processes import allgather, together
from kvjax._spec.placement import described
from kvjax._spec.spec import TableSpec
from kvjax._spec.unsupported import check_backend
from kvjax._table import contents, lifetime, loads
from kvjax._table.behind import may_be_behind, note_loaded, note_moved
from kvjax._table.checks import check_on_host, check_spec, version_on_host
from kvjax._table.handle import Handle
from kvjax._table.live import live_version
from kvjax._values.arguments import is_name
from kvjax._values.errors import fail
from kvjax._values.snapshot import Snapshot
from kvjax.storage import Storage


class Moves(Handle):
    """The calls of `kvjax.Table` that put its rows elsewhere."""

    __slots__ = ()

    def to(self, storage: Storage) -> Self:
        """Moves the live table into another storage, with all that belongs to it: rows, slots, frequencies, versions,
        pins, counts of admission and its sink. Not inside ``jit``.

        Older handles are stale: put the new one in their place, for instance into ``params``. Programs are compiled
        again, the counts of `stats` begin at 0, and memory that was reserved beyond ``capacity`` is not moved. The
        move takes the memory of the new place beside that of the old one. On the way, all rows of a table over a mesh,
        in an engine or on a GPU are in the host's memory, too, and of others about 200 MB at a time. In several
        processes, all call this together.

        Args:
          storage: one of `kvjax.storage`.

        Returns:
          The live handle.

        Raises:
          TypeError: it is none of these, or the call is inside ``jit``.
          KeyError: the table has been dropped.
          RuntimeError: this handle is stale, or there is no backend for the storage. As with all errors, the table
            stays as it was.
          ValueError: the storage cannot hold such a table, the handle is a following one (`live`), or the call is
            inside a loss.
          MemoryError: the table does not fit there.

        Example:
          >>> import kvjax, numpy as np, tempfile
          >>> table = kvjax.get_table("doc_to", dim=1).upsert(np.arange(4), np.ones((4, 1)))
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     table = table.to(kvjax.storage.Mmap(folder))
          >>> len(table), table.to(kvjax.storage.Host()).lookup(3).tolist()
          (4, [1.0])
          >>> kvjax.drop_table("doc_to")
        """
        check_on_host(self, "to")
        _check_storage(self.name, "to", storage)
        spec = dataclasses.replace(self.spec, storage=storage)
        return type(self)(move(self, spec, "to"), spec)

    def copy(self, name: str, storage: Storage | None = None) -> Self:
        """Copies the table into a new, independent one with another name: for a fork of training, a target network, the
        best parameters so far. Not inside ``jit``.

        The copy has all that belongs to the table: its options, seed and shards, rows, slots, frequencies, versions,
        pins, and counts of admission. So keys without a row read the same, and the same training makes the same rows.
        Only the original keeps its sink, and the counts of `stats` begin at 0. What it takes of memory on the way is
        as for `to`. In several processes, all call this together.

        Args:
          name: of the new table.
          storage: where its rows live, one of `kvjax.storage`; by default as those of this table.

        Returns:
          The live handle of the new table. A copy of what `kvjax.optax.caught_up` or `averaged` returns has the rows
          that it reads.

        Raises:
          TypeError: the storage is none of these, or the call is inside ``jit``.
          ValueError: the name is not valid; there is a table of this name, the engine of the storage is in use, or the
            call is inside a loss.
          RuntimeError: this handle is stale, or there is no backend for the storage.
          KeyError: the table has been dropped.
          MemoryError: the copy does not fit; then there is none.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_copy", dim=1).upsert(np.array([7]), [[1.0]])
          >>> target = table.copy("doc_target")
          >>> table = table.upsert(np.array([7]), [[2.0]])
          >>> target.lookup(7).tolist(), table.lookup(7).tolist()
          ([1.0], [2.0])
          >>> kvjax.drop_table("doc_copy"), kvjax.drop_table("doc_target")
          (None, None)
        """
        check_on_host(self, "copy")
        where = self.spec.storage if storage is None else storage
        _check_storage(self.name, "copy", where)
        spec = dataclasses.replace(self.spec, name=name, storage=where)

        def begin() -> loads.Loading | Snapshot:
            if not is_name(name):
                want = "a name in UTF-8 that is not empty"
                raise fail(ValueError, self.name, "copy", want, repr(name), 'table.copy("other")')
            if PROCESS.spec_of(name) is not None:
                mend = "give another name, or kvjax.drop_table(name) first"
                raise fail(ValueError, self.name, "copy", "a name that no table has", repr(name), mend)
            check_backend(spec, "copy")
            return loads.of_frozen(self, spec, "copy") or contents.copied(self, "copy")

        rows = together(self.spec.placement, self.name, "copy", begin, {"name": name})
        try:
            together(self.spec.placement, name, "copy", lambda: lifetime.create(spec))
            made = type(self)(live_version(spec), spec)
            return loads.load(made, lambda: loads.checked(spec, rows))
        except BaseException:
            if PROCESS.spec_of(name) == spec:  # made in this process, if not in another
                lifetime.drop(name)
            raise


def _check_storage(name: str, op: str, storage: Any) -> None:
    if not isinstance(storage, Storage):
        raise fail(TypeError, name, op, "one of kvjax.storage", repr(storage), "see kvjax.storage")


def move(
    table: Handle, spec: TableSpec, op: str, once: bool = False, bring: Callable[[Snapshot], Snapshot] | None = None
) -> jax.Array:
    """Makes `table` what `spec` says, which is of the same table in other shards. All its processes call this together.

    They are made and filled while the table is still there, then replace it.

    Args:
      table: the live handle.
      spec: of the table from then on.
      op: for errors.
      once: whether `bring` is given each row of the table by one process alone.
      bring: from the rows of this process to those of its new shards, or more; by default they are the same.

    Returns:
      The live version; old handles are behind it.
    """
    prepared = prepare_move(table, spec, op, once, bring)
    untouched = PROCESS.births.get(spec.name) == prepared.version
    live = prepared.commit()
    if untouched:
        PROCESS.births[spec.name] = int(live)
    return live


class Prepared(NamedTuple):
    """A move that is ready: the version that the table must still have, and the call that ends it."""

    version: int
    commit: Callable[[], jax.Array]


def prepare_move(
    table: Handle, spec: TableSpec, op: str, once: bool = False, bring: Callable[[Snapshot], Snapshot] | None = None,
    rows: loads.Loading | None = None,
) -> Prepared:  # fmt: skip
    """As `move`, but nothing changes before its commit.

    Args:
      table: as there.
      spec: as there.
      op: as there.
      once: as there.
      bring: as there.
      rows: which the table shall have instead of its own.
    """
    old = table.spec
    group = old.placement or spec.placement

    def begin() -> tuple[int, bool, Any]:
        check_backend(spec, op)
        check_spec(table, op)
        live_version(old)  # waits for all that has been started, and not only for what this handle needs
        version = version_on_host(table, op)
        own = old.originals if once else old.kept
        mine = loads.of_frozen(table, spec, op) if rows is None and bring is None else None
        if rows is None and mine is None:
            mine = contents.snapshot(old, op, version, True, own)
        return version, may_be_behind(table), mine

    def stage() -> tuple[Any, bool]:
        staged = lifetime.stage(spec, op, newest)
        given = loads.checked(spec, brought if rows is None else rows)
        filled = loads.fill(spec, given, lambda i, head: spec.host.begin_staged(staged, i, head))
        for part in filled.prepared:
            spec.host.commit_load(part)
        return staged, filled.caught_up

    places = {"placement": described(old.placement), "new placement": described(spec.placement)}
    version, behind, mine = together(group, spec.name, op, begin, places)
    newest, behind = (int(x) for x in allgather(group, np.array([version, behind], np.uint32)).max(0))
    brought = mine if bring is None else bring(mine)
    staged, caught_up = together(group, spec.name, op, stage)

    def commit() -> jax.Array:
        lifetime.replace(spec, op, version, staged)
        if rows is None:
            note_moved(spec, bool(behind))
        else:
            note_loaded(spec, caught_up)
        return live_version(spec)

    return Prepared(version, commit)
