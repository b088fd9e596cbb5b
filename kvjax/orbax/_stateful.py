"""Tables as a checkpointable of Orbax's v1 API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

import jax
from orbax.checkpoint import v1

from kvjax._formats.paths import AnyPath, anywhere
from kvjax._table.table import Table
from kvjax._values.prune import PruneLike
from kvjax.checkpoint._chains.catalog import Catalog, missing_lists, write_manifest
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._disk.format import CheckpointError
from kvjax.checkpoint._tables.cursors import finished
from kvjax.checkpoint._tables.restore import restore_all
from kvjax.checkpoint._tables.restore_table import RestoreOptions
from kvjax.checkpoint._tables.save import named
from kvjax.checkpoint._tables.write import write
from kvjax.orbax._begin import begin

# Seconds that process 0 waits for what others write, as long as Orbax does.
_PATIENCE = 600


class StatefulTables:
    """Tables beside other checkpointables of ``orbax.checkpoint.v1``, as `TableSave` and `TableRestore` are for v0.

    A save takes the handles in `tables` when it begins, and training may go on while it is written. A load puts the
    restored handles into `tables`. A table that is None there is made as it was saved. If `tables` is empty, or Orbax
    gets nothing to load into, all tables are made (in the second case, ``import kvjax.orbax`` before you make the
    Checkpointer).

    Attributes:
      tables: live handles, by their names in the checkpoint.
      prune: rows to keep in a save, as in `TableSave`.
      cursor: puts a cursor of this name at each save, as there.
      delta_since: name of the cursor since which to save what has changed, as there.
      base: where to look for the checkpoints that a delta builds on, as in `TableRestore`.

    Raises:
      TypeError: `tables` is a list of something other than tables.
      CheckpointError, ValueError, MemoryError: from a save or a load, as `kvjax.checkpoint.save` and `restore`.

    Example:
      >>> import kvjax.orbax, numpy as np, tempfile
      >>> from orbax.checkpoint import v1 as ocp
      >>> table = kvjax.get_table("doc_stateful", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> with ocp.training.Checkpointer(folder.name) as checkpointer:
      ...     state = kvjax.orbax.StatefulTables({"doc_stateful": table})
      ...     _ = checkpointer.save_checkpointables(0, {"tables": state})
      ...     kvjax.drop_table("doc_stateful")
      ...     table = checkpointer.load_checkpointables(0)["tables"].tables["doc_stateful"]
      >>> table.lookup(7).tolist()
      [1.0, 2.0]
      >>> kvjax.drop_table("doc_stateful")
      >>> folder.cleanup()
    """

    def __init__(
        self, tables: Mapping[str, Table | None] | Iterable[Table] | None = None, *, prune: PruneLike | None = None,
        cursor: str | None = None, delta_since: str | None = None, base: PathLike | Sequence[PathLike] | None = None,
    ) -> None:  # fmt: skip
        anything: Any = {} if tables is None else tables
        self.tables: dict[str, Any] = dict(anything) if isinstance(anything, Mapping) else named(anything)
        self.prune, self.cursor, self.delta_since, self.base = prune, cursor, delta_since, base

    def __repr__(self) -> str:
        return f"StatefulTables({list(self.tables)})"

    async def save(self, directory: v1.path.PathAwaitingCreation) -> Awaitable[None]:
        """Begins to save the tables; the result waits for the end. Orbax calls it.

        Args:
          directory: the folder that Orbax makes for the checkpointable.

        Returns:
          An awaitable that is done once all is written.

        Raises:
          RuntimeError: a handle is stale.
          TypeError: `tables` holds something other than tables.
          ValueError: a table cannot have a cursor, or `prune` is given beside one.
          CheckpointError: there is no cursor of the name in `delta_since`; or, once it is awaited, another process has
            not written its part within 10 minutes.
          OSError: once it is awaited: the folder cannot be written.

        Example:
          >>> import kvjax.orbax, tempfile
          >>> from orbax.checkpoint import v1 as ocp
          >>> table = kvjax.get_table("doc_stateful_save", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     ocp.save_checkpointables(folder + "/one", {"tables": kvjax.orbax.StatefulTables([table])})
          ...     sorted(kvjax.checkpoint.restore(folder + "/one/tables"))
          ['doc_stateful_save']
          >>> kvjax.drop_table("doc_stateful_save")
        """
        how = self.prune, self.cursor, self.delta_since
        stored = await begin(lambda: directory.await_creation(), self.tables, directory.path, *how)
        place = anywhere(directory.path, "save")

        async def commit() -> None:
            folder = anywhere(await directory.await_creation(), "save")
            await asyncio.to_thread(write, folder, stored)
            if jax.process_index() == 0:
                await _wait_for_all(folder, [one.meta for one in stored])
                finished(place, write_manifest(folder, saved_at=time.time_ns()), folder)

        return commit()

    async def load(self, directory: v1.path.Path) -> Awaitable[None]:
        """Restores the tables and puts their handles into `tables`. Orbax calls it.

        Args:
          directory: the folder of the checkpointable.

        Returns:
          An awaitable with nothing left to do: the tables are restored when this returns.

        Raises:
          CheckpointError: the checkpoint is not there, or damaged, or one that it builds on is missing.
          ValueError: a table has other options than the saved one.
          MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``.

        Example:
          >>> import kvjax.orbax, tempfile
          >>> from orbax.checkpoint import v1 as ocp
          >>> table = kvjax.get_table("doc_stateful_load", dim=1).upsert([7], [[1.0]])
          >>> state = kvjax.orbax.StatefulTables([table])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     ocp.save_checkpointables(folder + "/one", {"tables": state})
          ...     _ = table.clear()
          ...     _ = ocp.load_checkpointables(folder + "/one", {"tables": state})
          >>> state.tables["doc_stateful_load"].lookup(7).tolist()
          [1.0]
          >>> kvjax.drop_table("doc_stateful_load")
        """
        place = anywhere(directory, "restore")
        self.tables = restore_all(lambda: Chain(Catalog(place), self.base), self.tables or None, RestoreOptions())

        async def done() -> None:
            """Nothing is left to do."""

        return done()


async def _wait_for_all(folder: AnyPath, metas: Sequence[Mapping[str, Any]]) -> None:
    """Until all processes have written what they have of the tables, which nobody tells this one."""
    end = time.monotonic() + _PATIENCE
    while missing := [path for meta in metas for path in missing_lists(folder, meta)]:
        if time.monotonic() > end:
            raise CheckpointError(
                f"kvjax: save: want the parts of all processes within {_PATIENCE} s, got no {missing[0]}; see why the "
                "others have not written it, and whether all share the folder"
            )
        await asyncio.sleep(0.05)


class TablesHandler:
    """Has Orbax v1 load tables without being given any, and tell what they are."""

    async def save(self, directory: v1.path.PathAwaitingCreation, checkpointable: StatefulTables) -> Awaitable[None]:
        return await checkpointable.save(directory)

    async def load(
        self, directory: v1.path.Path, abstract_checkpointable: StatefulTables | None = None
    ) -> Awaitable[StatefulTables]:
        tables = StatefulTables() if abstract_checkpointable is None else abstract_checkpointable
        rest = await tables.load(directory)

        async def done() -> StatefulTables:
            await rest
            return tables

        return done()

    async def metadata(self, directory: v1.path.Path) -> dict[str, dict[str, Any]]:
        return Catalog(anywhere(directory, "metadata"), "metadata").metas()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, StatefulTables)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, StatefulTables)


v1.handlers.register_handler(TablesHandler, secondary_typestrs=["kvjax.orbax._handler.TableHandler"])
