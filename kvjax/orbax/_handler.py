"""Tables as an item of an Orbax ``CheckpointManager``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint import future

from kvjax._options import placement_of
from kvjax._processes import together
from kvjax._registry import get_table, tables
from kvjax._spec import TableSpec, fail
from kvjax._table import Table
from kvjax.orbax import _layout, _reading, _rules


class TableHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores tables; Orbax finds it through `TableSave` and `TableRestore`.

    Saving copies the tables out first (training may then go on) and writes in the background. A checkpoint is complete
    or not there at all, as for every Orbax item.

    In several processes all save and restore together, with tables in one order. Each writes and reads the rows of its
    own shards. Of a table that is not spread over several, each process has one of its own: process 0 writes its own,
    and all read that. An error in one is raised in all, except for what happens while files are written: then the
    others wait for ``AsyncOptions(timeout_secs=)`` of Orbax.
    """

    async def async_save(self, directory: Any, args: TableSave) -> list[Any]:
        _layout.check_saved(args.tables)
        stored = [_layout.snapshot(table, args.prune) for table in args.tables.values()]
        names = [dict(s.meta, name=name) for s, name in zip(stored, args.tables, strict=True)]
        stored = [dataclasses.replace(s, meta=meta) for s, meta in zip(stored, names, strict=True)]

        async def commit() -> None:
            await asyncio.gather(*(_layout.write(Path(directory), s) for s in stored))

        return [future.CommitFutureAwaitingContractedSignals(commit(), name="kvjax_tables")]

    def save(self, directory: Any, args: TableSave) -> None:
        async def run() -> None:
            for pending in await self.async_save(directory, args):
                pending.result()

        asyncio.run(run())

    def restore(self, directory: Any, args: TableRestore | None = None) -> dict[str, Table]:
        directory, args = Path(directory), args or TableRestore()
        wanted = args.tables
        if wanted is None:
            wanted = {name: None for name in _layout.names(directory)}
        # All are read and checked before the first is changed.
        restores = [_Restore(directory, name, table, args) for name, table in wanted.items()]
        for restore in restores:
            restore.read()
        return {restore.name: restore.load() for restore in restores}

    def metadata(self, directory: Any) -> dict[str, Any]:
        """What each table of a checkpoint is, by name, as ``kvjax.json`` says it."""
        directory = Path(directory)
        return {name: _layout.read_meta(directory, name) for name in _layout.names(directory)}

    def finalize(self, directory: Any) -> None:
        """Nothing is left to do once all files are there."""

    def close(self) -> None:
        """The handler holds nothing."""


class _Restore:
    """One table on its way from a checkpoint."""

    def __init__(self, directory: Path, name: str, table: Table | None, args: TableRestore):
        self.name, self.directory, self.table = name, directory, table or tables().get(name)
        self.new = table is None
        self.placement = self.table.spec.placement if self.table else placement_of(name, args.placement(), "restore")
        self.options: dict[str, Any] = {} if self.table or self.placement is None else args.placement()

    def read(self) -> None:
        """Reads and checks it."""
        self.stored = together(self.placement, self.name, "restore", self._read)

    def load(self) -> Table:
        """Puts it into the live table, or into one that is made as it was saved."""
        table = together(self.placement, self.name, "restore", self._made) if self.new else self.table
        assert table is not None
        return table.refresh().load(self.stored.snapshot())

    def _read(self) -> _layout.Stored:
        meta = _layout.read_meta(self.directory, self.name)
        if self.new:
            self._check_functions(meta)
        stored = _reading.read(self.directory, self.name, self.placement)
        if self.table and not self.new:
            _check_alike(self.table.spec, stored)
        return stored

    def _check_functions(self, meta: dict[str, Any]) -> None:
        """Whether a table can be made of what the checkpoint says."""
        try:
            self.rules = {option: _rules.load(saved) for option, saved in meta.get("options", {}).items()}
        except ValueError as error:
            raise ValueError(f"kvjax: table {self.name!r}, restore: {error}") from error
        if "partitioner" in meta and self.options and self.options["partitioner"] is None:
            raise fail(
                ValueError, self.name, "restore", f"the table's partitioner, {meta['partitioner']}, of which a "
                "checkpoint has only the name", "no partitioner",
                "TableRestore(..., mesh=, partitioner=), or make the table with kvjax.get_table first and restore "
                "into it: with another partitioner, or none, its rows are placed anew",
            )  # fmt: skip

    def _made(self) -> Table:
        meta = self.stored.meta
        return get_table(
            self.name, dim=meta["dim"], key_dtype=meta["key_dtype"], dtype=meta["dtype"],
            initializer=_layout.initializer(self.stored), seed=meta["seed"], trainable=meta["trainable"],
            rounding=meta.get("rounding", "nearest"), **self.rules, **self.options,
        )  # fmt: skip


def _check_alike(spec: TableSpec, stored: _layout.Stored) -> None:
    """Whether a table is what was stored."""
    meta = stored.meta
    for field, saved in (
        ("dim", meta["dim"]),
        ("dtype", meta["dtype"]),
        ("seed", meta["seed"]),
        ("initializer", _layout.initializer(stored)),
    ):
        if getattr(spec, field) != saved:
            raise fail(
                ValueError, spec.name, "restore", f"a checkpoint with {field} {getattr(spec, field)!r}", f"{saved!r}",
                "make the table as it was saved (another seed or initializer would change the rows of unseen keys)",
            )  # fmt: skip
    if spec.max_capacity is not None and spec.on_full != "grow" and meta["rows"] > spec.max_capacity:
        raise fail(
            MemoryError, spec.name, "restore", f"at most max_capacity={spec.max_capacity} rows", f"{meta['rows']}",
            "make the table with more capacity, or prune in TableSave",
        )  # fmt: skip


@ocp.args.register_with_handler(TableHandler, for_save=True)
@dataclasses.dataclass
class TableSave(ocp.args.CheckpointArgs):
    """Saves tables as one item of a checkpoint.

    Attributes:
      tables: live handles, by the names they get in the checkpoint.
      prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep; by default all. In
        several processes it is asked for the rows of each process: ``top_k`` is of each, not of all.

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

    tables: Mapping[str, Table]
    prune: Any = None


@ocp.args.register_with_handler(TableHandler, for_restore=True)
@dataclasses.dataclass
class TableRestore(ocp.args.CheckpointArgs):
    """Restores tables; gives a dict of live handles by name.

    The contents of the tables are replaced, slots, frequencies and versions with them. A handle given here may be
    stale. A checkpoint may have been written by any number of processes and shards: a table keeps the place that it
    has, and each process reads the rows that it owns there.

    Attributes:
      tables: tables to load into, by their names in the checkpoint; None instead of a table loads into the one of that
        name, or makes it as it was saved, in memory. Where a function of yours is part of it (an initializer, a
        constraint, a score), a checkpoint holds only its name: make the table first. By default all tables of the
        checkpoint.
      mesh: over which tables that are made here are spread, as in `kvjax.get_table`; by default each is in one place
        (in several processes, one copy in each).
      axis: as there.
      partitioner: as there. Tables that had one need one; it may be another.
      replicated: as there.
      wire: as there.

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

    tables: Mapping[str, Table | None] | None = None
    mesh: Mesh | None = None
    axis: str | tuple[str, ...] | None = None
    partitioner: Callable[[Any, int], Any] | None = None
    replicated: bool = False
    wire: Any = None

    def placement(self) -> dict[str, Any]:
        """What `kvjax.get_table` is told about the place of a new table."""
        names = ("mesh", "axis", "partitioner", "replicated", "wire")
        return {name: getattr(self, name) for name in names}
