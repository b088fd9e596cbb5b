"""Tables as an item of an Orbax ``CheckpointManager``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from kvjax._formats.paths import anywhere
from kvjax._table.table import Table
from kvjax._values.prune import PruneLike
from kvjax.checkpoint._chains.catalog import Catalog, write_manifest
from kvjax.checkpoint._chains.chain import Chain, Places, places_of
from kvjax.checkpoint._chains.locate import PathLike, is_checkpoint
from kvjax.checkpoint._tables.cursors import finished
from kvjax.checkpoint._tables.restore import restore_all
from kvjax.checkpoint._tables.restore_table import RestoreOptions
from kvjax.checkpoint._tables.save import freeze_all
from kvjax.checkpoint._tables.write import write
from kvjax.orbax._begin import PATIENCE, begin


class TableHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores tables; Orbax finds it through `TableSave` and `TableRestore`.

    A save lists the rows, then copies and writes them in the background. Training may go on, and does not change what
    is saved. A checkpoint is complete or not there at all, as for every Orbax item.

    In several processes, all save and restore the same tables together. Each writes and reads the rows of its own
    shards. If a table is not sharded over processes, each process has its own copy: process 0 writes its copy, and all
    read that; a save warns if another process has other rows. An error in one process is raised in all, except for
    errors while files are written: then the others wait for ``AsyncOptions(timeout_secs=)`` of Orbax.

    Raises:
      CheckpointError, ValueError, TypeError, MemoryError: as `kvjax.checkpoint.save` and `restore`.

    Example:
      >>> import tempfile, kvjax, orbax.checkpoint as ocp
      >>> table = kvjax.get_table("doc_handler", dim=1).upsert([7], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder, ocp.Checkpointer(kvjax.orbax.TableHandler()) as checkpointer:
      ...     checkpointer.save(folder + "/one", args=kvjax.orbax.TableSave({"doc_handler": table}))
      ...     kvjax.drop_table("doc_handler")
      ...     tables = checkpointer.restore(folder + "/one", args=kvjax.orbax.TableRestore())
      >>> tables["doc_handler"].lookup(7).tolist()
      [1.0]
      >>> kvjax.drop_table("doc_handler")
    """

    _last: Places | None = None  # where the last save with a cursor is, behind what it builds on

    async def async_save(self, directory: str | os.PathLike[str], args: TableSave) -> list[future.Future]:
        how = args.prune, args.cursor, args.delta_since
        stored = await begin(_folders, args.tables, directory, *how)
        place = anywhere(directory, "save")

        async def commit() -> None:
            await asyncio.to_thread(write, place, stored)

        return [future.CommitFutureAwaitingContractedSignals(commit(), name="kvjax_tables")]

    def save(self, directory: str | os.PathLike[str], args: TableSave) -> None:
        """Saves tables into a folder, and waits for the end. Orbax calls it.

        Args:
          directory: the folder, which is made if it is not there.
          args: what to save.

        Raises:
          CheckpointError, ValueError, TypeError, OSError: as `kvjax.checkpoint.save`.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_handler_save", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.orbax.TableHandler().save(folder, kvjax.orbax.TableSave({"doc_handler_save": table}))
          ...     tables = kvjax.orbax.TableHandler().restore(folder)
          >>> tables["doc_handler_save"].lookup(7).tolist()
          [1.0]
          >>> kvjax.drop_table("doc_handler_save")
        """
        place = anywhere(directory, "save")
        write(place, freeze_all(args.tables, place, args.prune, args.cursor, args.delta_since))
        if jax.process_count() == 1:  # else Orbax calls it, when all are here
            self.finalize(directory)

    def restore(self, directory: str | os.PathLike[str], args: TableRestore | None = None) -> dict[str, Table]:
        """Restores tables from a folder. Orbax calls it.

        Args:
          directory: the folder.
          args: what to restore, and how; by default all tables, as they were saved.

        Returns:
          The live handles, by name.

        Raises:
          CheckpointError, ValueError, TypeError, MemoryError: as `kvjax.checkpoint.restore`.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_handler_restore", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.orbax.TableHandler().save(folder, kvjax.orbax.TableSave({"doc_handler_restore": table}))
          ...     tables = kvjax.orbax.TableHandler().restore(folder)
          >>> tables["doc_handler_restore"].lookup(7).tolist()
          [1.0]
          >>> kvjax.drop_table("doc_handler_restore")
        """
        args = args or TableRestore()
        place = anywhere(directory, "restore")
        return restore_all(lambda: Chain(Catalog(place), args.base), args.tables, args, args.cursor)

    def metadata(self, directory: str | os.PathLike[str]) -> dict[str, dict[str, object]]:
        """What each table of a checkpoint is, by name, as ``kvjax.json`` says it.

        Returns:
          By name of the table: "dim", "dtype", "options" and the other fields of its ``kvjax.json`` (docs/format.md).

        Raises:
          CheckpointError: there is no checkpoint of tables in the folder, or it is damaged.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_metadata", dim=2).upsert([7], [[1.0, 2.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.checkpoint.save(folder + "/one", [table])
          ...     kvjax.orbax.TableHandler().metadata(folder + "/one")["doc_metadata"]["dim"]
          2
          >>> kvjax.drop_table("doc_metadata")
        """
        return Catalog(anywhere(directory, "metadata"), "metadata").metas()

    def finalize(self, directory: str | os.PathLike[str]) -> None:
        """Finishes the checkpoint: everything is there, and on the disk."""
        place = anywhere(directory, "save")
        self._last = finished(place, write_manifest(place))

    def close(self) -> None:
        """Warns if the manager has deleted a checkpoint that its last delta builds on, which no later save can do."""
        if self._last and is_checkpoint(last := [*self._last][-1]):
            places_of(last, self._last)


async def _folders() -> None:
    """Waits until Orbax has made the folders of the save that is under way."""

    async def nothing() -> None:
        """Comes after them."""

    future.CommitFutureAwaitingContractedSignals(nothing(), timeout_secs=PATIENCE).result()


@ocp.args.register_with_handler(TableHandler, for_save=True)
@dataclasses.dataclass
class TableSave(ocp.args.CheckpointArgs):
    """Saves tables as one item of a checkpoint.

    Attributes:
      tables: live handles, by their names in the checkpoint; or several tables, under their own names.
      prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep; by default all. In
        several processes it is called for the rows of each process; ``top_k`` counts the rows of all.
      cursor: puts a cursor of this name at this save, from which deltas can start, as in `kvjax.checkpoint.save`.
      delta_since: name of the cursor since which to save what has changed, as ``since`` there: a table that the cursor
        does not know is saved whole, and the cursor then belongs to it, too. A manager that deletes steps
        (``max_to_keep=``) must keep those that deltas build on, or the deltas do not restore: save everything, with
        ``cursor=``, more often than it deletes. If they are gone, a warning comes with the next delta, or when the
        manager is closed.

    Raises:
      CheckpointError, ValueError, TypeError, OSError: from the save, as `kvjax.checkpoint.save`.

    Example:
      >>> import tempfile, kvjax, numpy as np, orbax.checkpoint as ocp
      >>> table = kvjax.get_table("doc_save", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     args = ocp.args.Composite(tables=kvjax.orbax.TableSave({"doc_save": table}))
      ...     _ = manager.save(0, args=args)
      ...     manager.wait_until_finished()
      ...     table = table.clear()
      ...     args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({"doc_save": table}))
      ...     table = manager.restore(0, args=args)["tables"]["doc_save"]
      >>> table.lookup(7).tolist()
      [1.0, 2.0]
      >>> kvjax.drop_table("doc_save")
    """

    tables: Mapping[str, Table] | Iterable[Table]
    prune: PruneLike | None = None
    cursor: str | None = None
    delta_since: str | None = None


@ocp.args.register_with_handler(TableHandler, for_restore=True)
@dataclasses.dataclass
class TableRestore(RestoreOptions, ocp.args.CheckpointArgs):
    """Restores tables; returns a dict of live handles by name.

    The contents of the tables are replaced, including slots, frequencies and versions. A handle given here may be
    stale. Any number of processes and shards may have written the checkpoint: a table stays in its place, and each
    process reads the rows that it owns.

    Attributes:
      tables: tables to load into, by their names in the checkpoint; None instead of a table loads into the table of
        that name, or makes it as it was saved, in memory; a name instead does so under that name. If the table has a
        function of yours (an initializer, a constraint, a score), the checkpoint has only the function's name: make
        the table first. Or a list of tables and names. By default all tables of the checkpoint.
      mesh: devices over which new tables are sharded, as in `kvjax.get_table`; by default each new table is in one
        place (in several processes, one copy in each).
      devices: as there.
      axis: as there.
      partitioner: as there. A table that had one needs one; it may be a different one.
      replicated: as there.
      wire: as there.
      storage: where the rows of new tables live, as in `kvjax.checkpoint.restore`.
      dtype: dtype to convert rows to, as there.
      slots: whether to restore the optimizer's slots.
      keys: keys of the rows to restore; by default all.
      merge: keep the rows of an existing table whose keys are not in the checkpoint.
      own_initializer: an existing table keeps its initializer and seed, as in `kvjax.checkpoint.restore`.
      base: for a delta, where to look for the checkpoints that it builds on, before the other steps.
      cursor: puts a cursor of this name at the checkpoint, so that deltas can start there.

    Raises:
      CheckpointError, ValueError, TypeError, MemoryError: from the restore, as `kvjax.checkpoint.restore`.

    Example:
      >>> import tempfile, jax, kvjax, numpy as np, orbax.checkpoint as ocp
      >>> table = kvjax.get_table("doc_restore", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> mesh = jax.make_mesh((jax.device_count(),), ("x",))
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     _ = manager.save(0, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"doc_restore": table})))
      ...     manager.wait_until_finished()
      ...     kvjax.drop_table("doc_restore")
      ...     args = ocp.args.Composite(tables=kvjax.orbax.TableRestore(mesh=mesh))
      ...     table = manager.restore(0, args=args)["tables"]["doc_restore"]
      >>> table.spec.placement.num_shards == jax.device_count(), table.lookup(7).tolist()
      (True, [1.0, 2.0])
      >>> kvjax.drop_table("doc_restore")
    """

    tables: Mapping[str, Table | str | None] | Sequence[Table | str] | None = None
    base: PathLike | Sequence[PathLike] | None = None
    cursor: str | None = None
