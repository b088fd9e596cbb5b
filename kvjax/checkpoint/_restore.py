"""Restoring: one table on its way from a checkpoint into this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvjax._process import PROCESS
from kvjax._sharded.processes import together
from kvjax._spec.options import Options
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.spec import TableSpec
from kvjax._table.contents import check_capacity
from kvjax._table.move import move
from kvjax._table.registry import get_or_make, tables
from kvjax._table.table import Table
from kvjax._values.errors import fail
from kvjax.checkpoint._format import FIELDS, POOL, Stored, read_meta
from kvjax.checkpoint._read import read
from kvjax.checkpoint._rules import load, load_initializer


class Restore:
    """One table on its way from a checkpoint: `read` it and check it, and then `load` it.

    Args:
      directory: of the checkpoint.
      name: of the table in it.
      table: to load into; None for the one of that name, or a new one.
      sharding: of a new one.
    """

    def __init__(self, directory: Path, name: str, table: Table | None, sharding: Sharding):
        self.name, self.directory, self.table = name, directory, table or tables().get(name)
        # Of a module's table of which nobody has said the seed, what was saved says it; an earlier restore, too.
        self.drawn = self.table is not None and PROCESS.of_modules.get(self.table.name, False)
        if self.table is not None and self.drawn:
            self.table = tables()[self.table.name]
        self.given = table is not None or self.drawn
        self.sharding = Sharding() if self.table else sharding
        self.placement = self.table.spec.placement if self.table else placement_of(sharding, name, "restore")

    def read(self) -> None:
        """Reads the table and checks it; nothing changes."""
        self.stored = together(self.placement, self.name, "restore", self._read)

    def load(self) -> Table:
        """Puts it into the live table, or into one that is made as it was saved."""
        table = self.table if self.given else together(self.placement, self.name, "restore", self._make)
        assert table is not None
        table = table.refresh()
        if self.drawn and table.spec.seed != self.stored.meta["seed"]:
            spec = dataclasses.replace(table.spec, seed=self.stored.meta["seed"])
            table = Table(move(table, spec, "restore"), spec)
        return table.load(self.stored.snapshot())

    def _read(self) -> Stored:
        meta = read_meta(self.directory, self.name)
        if not self.given:
            self._load_rules(meta)
        stored = read(self.directory, self.name, meta, self.placement)
        if self.table and self.given:
            _check_equal(self.table.spec, stored, but=("seed",) if self.drawn else ())
        return stored

    def _load_rules(self, meta: dict[str, Any]) -> None:
        """Whether a table can be made of what the checkpoint says."""
        try:
            self.rules = {option: load(saved) for option, saved in meta.get("options", {}).items()}
        except ValueError as error:
            raise ValueError(f"kvjax: table {self.name!r}, restore: {error}") from error
        if "partitioner" in meta and self.sharding.mesh is not None and self.sharding.partitioner is None:
            raise fail(
                ValueError, self.name, "restore", f"the table's partitioner, {meta['partitioner']}, of which a "
                "checkpoint has only the name", "no partitioner",
                "TableRestore(..., mesh=, partitioner=), or make the table with kvjax.get_table first and restore "
                "into it: with another partitioner, or none, its rows are placed anew",
            )  # fmt: skip

    def _make(self) -> Table:
        meta = self.stored.meta
        fields = {name: meta[name] for name in FIELDS if name in meta} | {"initializer": _initializer(self.stored)}
        return get_or_make(self.name, meta["dim"], self.placement, Options(**fields, **self.rules))


def _initializer(stored: Stored) -> Any:
    return load_initializer(stored.meta["initializer"], stored.arrays.get(POOL))


def _check_equal(spec: TableSpec, stored: Stored, but: tuple[str, ...]) -> None:
    """Whether a table is what was stored, `but` for some fields."""
    meta = stored.meta
    for field, saved in (
        ("dim", meta["dim"]),
        ("dtype", meta["dtype"]),
        ("seed", meta["seed"]),
        ("initializer", _initializer(stored)),
    ):
        if field not in but and getattr(spec, field) != saved:
            raise fail(
                ValueError, spec.name, "restore", f"a checkpoint with {field} {getattr(spec, field)!r}", f"{saved!r}",
                "make the table as it was saved (another seed or initializer would change the rows of unseen keys)",
            )  # fmt: skip
    check_capacity(spec, "restore", meta["rows"], "make the table with a larger max_capacity, or prune in TableSave")
