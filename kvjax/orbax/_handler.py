"""Tables as an item of an Orbax ``CheckpointManager``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future

from kvjax._registry import get_table
from kvjax._spec import fail
from kvjax._table import Table
from kvjax.orbax import _layout, _rules


class TableHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores tables; Orbax finds it through `TableSave` and `TableRestore`.

    Saving copies the tables out first (training may then go on) and writes in the background. A checkpoint is complete
    or not there at all, as for every Orbax item.
    """

    async def async_save(self, directory: Any, args: TableSave) -> list[Any]:
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
        directory = Path(directory)
        wanted = args.tables if args is not None else None
        if wanted is None:
            wanted = {name: None for name in _layout.names(directory)}
        # All are read and checked before the first is changed.
        stored = {name: _layout.read(directory, name) for name in wanted}
        targets = {name: _target(name, table, stored[name]) for name, table in wanted.items()}
        return {name: table.load(stored[name].snapshot()) for name, table in targets.items()}

    def metadata(self, directory: Any) -> dict[str, Any]:
        """What each table of a checkpoint is, by name, as ``kvjax.json`` says it."""
        directory = Path(directory)
        return {name: _layout.read_meta(directory, name) for name in _layout.names(directory)}

    def finalize(self, directory: Any) -> None:
        """Nothing is left to do once all files are there."""

    def close(self) -> None:
        """The handler holds nothing."""


def _target(name: str, table: Table | None, stored: _layout.Stored) -> Table:
    """The live table to load into: the given one if it fits what was stored, or a new one."""
    meta, initializer = stored.meta, _layout.initializer(stored)
    if table is None:
        try:
            options = {option: _rules.load(saved) for option, saved in meta.get("options", {}).items()}
        except ValueError as error:
            raise ValueError(f"kvjax: table {name!r}, restore: {error}") from error
        return get_table(
            name, dim=meta["dim"], key_dtype=meta["key_dtype"], dtype=meta["dtype"],
            initializer=initializer, seed=meta["seed"], trainable=meta["trainable"],
            rounding=meta.get("rounding", "nearest"), **options,
        )  # fmt: skip
    spec = table.spec
    for field, saved in (
        ("dim", meta["dim"]),
        ("dtype", meta["dtype"]),
        ("seed", meta["seed"]),
        ("initializer", initializer),
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
    return table.refresh()


@ocp.args.register_with_handler(TableHandler, for_save=True)
@dataclasses.dataclass
class TableSave(ocp.args.CheckpointArgs):
    """Saves tables as one item of a checkpoint.

    Attributes:
      tables: live handles, by the names they get in the checkpoint.
      prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep; by default all.

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
    stale.

    Attributes:
      tables: tables to load into, by their names in the checkpoint; None instead of a table makes it as it was saved,
        in memory. Where a function of yours is part of it (an initializer, a constraint, a score), a checkpoint holds
        only its name: make the table first. By default all tables of the checkpoint.
    """

    tables: Mapping[str, Table | None] | None = None
