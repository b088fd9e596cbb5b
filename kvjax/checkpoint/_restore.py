"""Restoring: one table on its way from a checkpoint into this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from kvjax._keys.keys import KeysLike
from kvjax._process import PROCESS
from kvjax._sharded.processes import together
from kvjax._spec.options import Options
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.spec import TableSpec
from kvjax._table import contents
from kvjax._table.contents import check_capacity
from kvjax._table.move import prepare_move
from kvjax._table.registry import drop_table, get_or_make
from kvjax._table.registry import tables as tables_of_process
from kvjax._table.table import Table
from kvjax._values.dtypes import dtype_name
from kvjax._values.errors import fail
from kvjax._values.late import LAST_COLUMN, are_late, warn_if_saved_late
from kvjax.checkpoint._chain import Chain, Link
from kvjax.checkpoint._chosen import converted, only
from kvjax.checkpoint._format import POOL
from kvjax.checkpoint._overlay import merged, of_chain
from kvjax.checkpoint._read import read
from kvjax.checkpoint._rules import dump, load, load_initializer
from kvjax.checkpoint._stored import FIELDS, Stored
from kvjax.storage import Storage


@dataclasses.dataclass(kw_only=True, repr=False)
class How(Sharding):
    """How a restore makes its tables: the arguments that `kvjax.checkpoint.restore` and `TableRestore` share.

    Its fields beside those of `Sharding` are described there."""

    storage: Storage | None = None
    dtype: DTypeLike | None = None
    slots: bool = True
    keys: KeysLike | None = None
    merge: bool = False


class Restore:
    """One table on its way from a checkpoint: `read` it and check it, `prepare` what it shall be, and `commit` that.

    Args:
      chain: of the checkpoint.
      name: of the table in it.
      table: to load into; None for the one of that name, or a new one.
      how: to make it.
    """

    def __init__(self, chain: Chain, name: str, table: Table | None, how: How):
        self.name, self.chain, self.table = name, chain, table or tables_of_process().get(name)
        # Of a module's table of which nobody has said the seed, what was saved says it; an earlier restore, too.
        self.drawn = self.table is not None and PROCESS.of_modules.get(self.table.name, False)
        if self.table is not None and self.drawn:
            self.table = tables_of_process()[self.table.name]
        self.given, self.made = table is not None or self.drawn, False
        self.how = how
        self.sharding = Sharding() if self.table else how
        self.placement = self.table.spec.placement if self.table else placement_of(how, name, "restore")

    def read(self) -> None:
        """Reads the table and checks it; nothing changes."""
        self.stored: Stored | None = together(self.placement, self.name, "restore", self._read)

    def prepare(self, cursor: bool = False) -> None:
        """Makes the table, if there is none, and all that it takes to fill it; nothing else changes.

        Args:
          cursor: whether the table is to get one.
        """
        stored = self.stored
        assert stored is not None
        table = self.table if self.given else together(self.placement, self.name, "restore", lambda: self._make(stored))
        assert table is not None
        if cursor:
            self._check_cursor(table.spec, stored.meta)
        table = table.refresh()
        merge = self.how.merge and self.table is not None
        rows = stored.snapshot()
        if self.drawn and not merge and table.spec.seed != stored.meta["seed"]:
            spec = dataclasses.replace(table.spec, seed=stored.meta["seed"])
            replaced = prepare_move(table, spec, "restore", bring=lambda _: rows)
            self._commit: Callable[[], Table] = lambda: Table(replaced.commit(), spec)
        else:
            self._commit = contents.prepare_load(
                table, lambda: contents.checked(table.spec, merged(table.snapshot(), rows) if merge else rows)
            )
        self.stored = None  # what is prepared has its own copy

    def _check_cursor(self, spec: TableSpec, meta: dict[str, Any]) -> None:
        admit = dump(spec.admit)
        if admit != meta.get("options", {}).get("admit"):  # whose counts would not be those of the checkpoint
            raise fail(
                ValueError, spec.name, "restore", "a table with the admission that was saved beside cursor=",
                f"{spec.admit}", "save it whole, with a cursor",
            )  # fmt: skip

    def commit(self) -> Table:
        """Puts it into the table; gives the live handle."""
        return self._commit()

    def undo(self) -> None:
        """Drops the table, if `prepare` has made it."""
        if self.made:
            drop_table(self.name)

    def _read(self) -> Stored:
        links = self.chain.links(self.name)
        if not self.given:
            self._load_rules(links[-1].meta)
        stored = of_chain([self._read_link(link) for link in links])
        if not self.how.slots:
            stored = _without_slots(stored, self.name)
        if self.table and self.given:
            _check_equal(self.table.spec, stored, but=("seed",) if self.drawn else ())
        return stored

    def _read_link(self, link: Link) -> Stored:
        meta = link.meta
        if not self.how.slots:  # but for what says whether rows are behind
            meta = meta | {"slots": [(name, kind) for name, kind in meta["slots"] if are_late({name: kind})]}
        return self._chosen(link.catalog.checked(self.name, lambda: read(meta, link.files, self.placement)))

    def _chosen(self, stored: Stored) -> Stored:
        """What is wanted of what was read."""
        how, meta, arrays = self.how, stored.meta, stored.arrays
        if how.keys is not None:
            arrays = only(arrays, how.keys)
            meta = meta | {"rows": len(arrays["keys"])}  # here, which is what can be held against a limit
        if how.dtype is not None and dtype_name(how.dtype) != meta["dtype"]:
            dtype = dtype_name(how.dtype)
            arrays = arrays | {"values": converted(arrays["values"], arrays["keys"], dtype, self.name)}
            exact = {"rounding": "nearest"} if dtype == "float32" else {}
            meta = meta | {"dtype": dtype} | exact
        return dataclasses.replace(stored, meta=meta, arrays=arrays)

    def _load_rules(self, meta: dict[str, Any]) -> None:
        """Whether a table can be made of what the checkpoint says."""
        self.rules = {}
        for option, saved in meta.get("options", {}).items():
            try:
                self.rules[option] = load(saved)
            except ValueError as error:
                raise ValueError(f"kvjax: table {self.name!r}, restore: {option}: {error}") from error
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
            options = Options(storage=self.how.storage, **fields, **self.rules)
            return get_or_make(self.name, meta["dim"], self.placement, options)
        except BaseException:
            self.made = False
            raise


_UNSEEN = "make the table as it was saved: another would change the rows of unseen keys"
_MENDS = {
    "dtype": "make the table as it was saved, or give dtype= to convert the rows",
    "seed": _UNSEEN,
    "initializer": _UNSEEN,
}


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
                _MENDS.get(field, "make the table as it was saved"),
            )  # fmt: skip
    check_capacity(spec, "restore", meta["rows"], "make the table with a larger max_capacity, or prune in TableSave")


def _without_slots(stored: Stored, name: str) -> Stored:
    warn_if_saved_late(name, "restore", stored.arrays)
    arrays = {column: x for column, x in stored.arrays.items() if column != LAST_COLUMN}
    arrays |= {"has_slots": np.zeros(len(arrays["keys"]), bool)}
    return dataclasses.replace(stored, meta=stored.meta | {"slots": []}, arrays=arrays)
