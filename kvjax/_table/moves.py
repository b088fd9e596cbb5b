"""Calls that put a table's rows elsewhere, into another storage or another table, as methods of `kvjax.Table`."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from kvjax._process import PROCESS
from kvjax._sharded.processes import together
from kvjax._spec.unsupported import check_backend
from kvjax._table import lifetime
from kvjax._table.checks import check_on_host
from kvjax._table.contents import copied
from kvjax._table.handle import live_version
from kvjax._table.loads import Loading, checked, load, of_frozen
from kvjax._table.move import move
from kvjax._table.whole import Whole
from kvjax._values.errors import fail
from kvjax._values.names import is_name
from kvjax._values.snapshot import Snapshot
from kvjax.storage import Storage


class Moves(Whole):
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

        def begin() -> Loading | Snapshot:
            if not is_name(name):
                want = "a name in UTF-8 that is not empty"
                raise fail(ValueError, self.name, "copy", want, repr(name), 'table.copy("other")')
            if PROCESS.spec_of(name) is not None:
                mend = "give another name, or kvjax.drop_table(name) first"
                raise fail(ValueError, self.name, "copy", "a name that no table has", repr(name), mend)
            check_backend(spec, "copy")
            return of_frozen(self, spec, "copy") or copied(self, "copy")

        rows = together(self.spec.placement, self.name, "copy", begin, {"name": name})
        try:
            together(self.spec.placement, name, "copy", lambda: lifetime.create(spec))
            made = type(self)(live_version(spec), spec)
            return load(made, lambda: checked(spec, rows))
        except BaseException:
            if PROCESS.spec_of(name) == spec:  # made in this process, if not in another
                lifetime.drop(name)
            raise


def _check_storage(name: str, op: str, storage: Any) -> None:
    if not isinstance(storage, Storage):
        raise fail(TypeError, name, op, "one of kvjax.storage", repr(storage), "see kvjax.storage")
