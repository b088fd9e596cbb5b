"""Restoring: one table on its way from a checkpoint into this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax._process import PROCESS
from kvjax._sharded.processes import together
from kvjax._spec.options import Options
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.spec import TableSpec
from kvjax._table import contents
from kvjax._table.contents import check_capacity
from kvjax._table.move import prepare_move
from kvjax._table.registry import drop_table, get_or_make, tables
from kvjax._table.table import Table
from kvjax._values.errors import fail
from kvjax.checkpoint._catalog import Catalog
from kvjax.checkpoint._format import FIELDS, POOL, Stored
from kvjax.checkpoint._read import read
from kvjax.checkpoint._rules import load, load_initializer


def restore(directory: Path, wanted: Mapping[str, Table | None] | None, sharding: Sharding) -> dict[str, Table]:
    """Restores tables: all, or none if one of them cannot be.

    Args:
      directory: of the checkpoint.
      wanted: what to load each table into; None instead of one for the one of that name, or a new one; None for all.
      sharding: of new ones.

    Raises:
      CheckpointError: it is damaged.
      ValueError: a table is not what was saved.
    """
    catalog = Catalog(directory)
    if wanted is None:
        wanted = {name: None for name in catalog.names}
    restores = [Restore(catalog, name, table, sharding) for name, table in wanted.items()]
    _check_distinct(restores)
    for one in restores:  # all files, before a table is made
        one.read()
    try:
        for one in restores:
            one.prepare()
    except BaseException:
        for one in restores:
            one.undo()
        raise
    return {one.name: one.commit() for one in restores}


def _check_distinct(restores: Sequence[Restore]) -> None:
    sources: dict[str, str] = {}
    for one in restores:
        target = one.table.name if one.table is not None else one.name
        if target in sources:
            raise fail(
                ValueError, target, "restore", "one table of the checkpoint to load into it",
                f"{sources[target]!r} and {one.name!r}", "give each a table of its own",
            )  # fmt: skip
        sources[target] = one.name


class Restore:
    """One table on its way from a checkpoint: `read` it and check it, `prepare` what it shall be, and `commit` that.

    Args:
      catalog: of the checkpoint.
      name: of the table in it.
      table: to load into; None for the one of that name, or a new one.
      sharding: of a new one.
    """

    def __init__(self, catalog: Catalog, name: str, table: Table | None, sharding: Sharding):
        self.name, self.catalog, self.table = name, catalog, table or tables().get(name)
        # Of a module's table of which nobody has said the seed, what was saved says it; an earlier restore, too.
        self.drawn = self.table is not None and PROCESS.of_modules.get(self.table.name, False)
        if self.table is not None and self.drawn:
            self.table = tables()[self.table.name]
        self.given, self.made = table is not None or self.drawn, False
        self.sharding = Sharding() if self.table else sharding
        self.placement = self.table.spec.placement if self.table else placement_of(sharding, name, "restore")

    def read(self) -> None:
        """Reads the table and checks it; nothing changes."""
        self.stored: Stored | None = together(self.placement, self.name, "restore", self._read)

    def prepare(self) -> None:
        """Makes the table, if there is none, and all that it takes to fill it; nothing else changes."""
        stored = self.stored
        assert stored is not None
        table = self.table if self.given else together(self.placement, self.name, "restore", lambda: self._make(stored))
        assert table is not None
        table = table.refresh()
        rows = stored.snapshot()
        if self.drawn and table.spec.seed != stored.meta["seed"]:
            spec = dataclasses.replace(table.spec, seed=stored.meta["seed"])
            replaced = prepare_move(table, spec, "restore", bring=lambda _: rows)
            self._commit: Callable[[], Table] = lambda: Table(replaced.commit(), spec)
        else:
            self._commit = contents.prepare_load(table, lambda: contents.checked(table.spec, rows))
        self.stored = None  # what is prepared has its own copy

    def commit(self) -> Table:
        """Puts it into the table; gives the live handle."""
        return self._commit()

    def undo(self) -> None:
        """Drops the table, if `prepare` has made it."""
        if self.made:
            drop_table(self.name)

    def _read(self) -> Stored:
        meta, files = self.catalog.open(self.name)
        if not self.given:
            self._load_rules(meta)
        stored = self.catalog.checked(self.name, lambda: read(meta, files, self.placement))
        if self.table and self.given:
            _check_equal(self.table.spec, stored, but=("seed",) if self.drawn else ())
        return stored

    def _load_rules(self, meta: dict[str, Any]) -> None:
        """Whether a table can be made of what the checkpoint says."""
        try:
            self.rules = {option: load(saved) for option, saved in meta.get("options", {}).items()}
        except ValueError as error:
            raise ValueError(f"kvjax: table {self.name!r}, restore: {error}") from error
        if "partitioner" in meta and self.sharding.given and self.sharding.partitioner is None:
            raise fail(
                ValueError, self.name, "restore", f"the table's partitioner, {meta['partitioner']}, of which a "
                "checkpoint has only the name", "no partitioner",
                "TableRestore(..., mesh=, partitioner=), or make the table with kvjax.get_table first and restore "
                "into it: with another partitioner, or none, its rows are placed anew",
            )  # fmt: skip

    def _make(self, stored: Stored) -> Table:
        meta = stored.meta
        fields = {name: meta[name] for name in FIELDS if name in meta} | {"initializer": _initializer(stored)}
        self.made = self.table is None
        try:
            return get_or_make(self.name, meta["dim"], self.placement, Options(**fields, **self.rules))
        except BaseException:
            self.made = False
            raise


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
