"""Restoring: one table on its way from a checkpoint into this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from kvjax._formats.paths import AnyPath
from kvjax._keys.keys import KeysLike
from kvjax._process import PROCESS
from kvjax._sharded.processes import together
from kvjax._spec.options import Options
from kvjax._spec.placement import described
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.spec import TableSpec
from kvjax._table import loads
from kvjax._table.checks import version_on_host
from kvjax._table.contents import copied
from kvjax._table.live import versions_of
from kvjax._table.merges import merged
from kvjax._table.moves import prepare_move
from kvjax._table.registry import check_same, drop_table, get_or_make
from kvjax._table.registry import tables as tables_of_process
from kvjax._table.table import Table
from kvjax._values.behind import LAST_COLUMN, can_be_behind, warn_if_saved_behind
from kvjax._values.dtypes import row_dtype
from kvjax._values.errors import fail, warn
from kvjax._values.snapshot import ADMISSION_COLUMNS
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._disk.format import POOL
from kvjax.checkpoint._disk.meta import EQUAL_FIELDS, FIELDS, made_with
from kvjax.checkpoint._disk.rules import dump, load, load_initializer
from kvjax.checkpoint._tables.taken_rows import converted, only, own_rows, without_slots
from kvjax.storage import Storage


@dataclasses.dataclass(kw_only=True, repr=False)
class RestoreOptions(Sharding):
    """How a restore makes its tables: the arguments that `kvjax.checkpoint.restore` and `TableRestore` share.

    Its fields beside those of `Sharding` are described there."""

    storage: Storage | None = None
    dtype: DTypeLike | None = None
    slots: bool = True
    keys: KeysLike | None = None
    merge: bool = False
    own_initializer: bool = False


class Saved(NamedTuple):
    """What there is of one table to restore.

    Attributes:
      meta: what it is.
      initializer: of its rows.
      contents: of this process's shards.
      rules: of a table that is to be made, by their options.
    """

    meta: dict[str, Any]
    initializer: Any
    contents: loads.Loading
    rules: dict[str, Any]


class Ready(NamedTuple):
    """A restore that is ready.

    Attributes:
      spec: of the table.
      version: that it must still have.
      commit: puts what was saved into it, and gives the live handle.
    """

    spec: TableSpec
    version: int
    commit: Callable[[], Table]

    def check(self) -> None:
        """Whether the table is as it was, and so `commit` will do: nobody may write meanwhile."""
        if PROCESS.spec_of(self.spec.name) != self.spec or set(versions_of(self.spec)) != {self.version}:
            raise fail(
                RuntimeError, self.spec.name, "restore", "a table that nobody writes meanwhile",
                "a write of another thread", "wait for it, and begin again; no table has changed",
            )  # fmt: skip


class Restore:
    """One table on its way from a checkpoint: `open` what was saved, and `prepare` what it shall be.

    Args:
      chain: of the checkpoint.
      name: of the table in it.
      into: the table to load into, or the name of the one to load into or to make; None for that in the checkpoint.
      how: to make it.

    Attributes:
      target: the name of the table in this process.
    """

    def __init__(self, chain: Chain, name: str, into: Table | str | None, how: RestoreOptions):
        table = None if isinstance(into, str) else into
        self.name, self.chain = name, chain
        self.target: str = table.name if table is not None else name if into is None else str(into)
        self.table = table or tables_of_process().get(self.target)
        # Of a module's table of which nobody has said the seed, what was saved says it; an earlier restore, too.
        of_module = None if self.table is None else PROCESS.of_modules.get(self.table.name)
        self.drawn = of_module is not None and of_module.drawn
        if self.table is not None and self.drawn:
            self.table = tables_of_process()[self.table.name]
        self.found = table is None and self.table is not None
        self.made: tuple[TableSpec, int] | None = None  # what it was then
        self.how = how
        self.sharding = Sharding() if self.table else how
        self.placement = self.table.spec.placement if self.table else placement_of(how, self.target, "restore")

    @property
    def processes(self) -> tuple[int, ...]:
        """Those that have a part of the table."""
        return (jax.process_index(),) if self.placement is None else self.placement.processes

    def open(self) -> Saved:
        """What was saved of the table, checked; nothing changes."""
        said = {"placement": described(self.placement)}
        if self.table is not None:
            said |= made_with(self.table.dim, vars(self.table.spec))
        return together(self.placement, self.name, "restore", self._open, said)

    def prepare(self, saved: Saved, cursor: bool = False) -> Ready:
        """Makes the table, if there is none, reads its rows, and gets them ready; nothing else changes.

        Args:
          saved: what `open` gave.
          cursor: whether the table is to get one.
        """

        def live() -> Table:
            table = self.table or self._make(saved)
            if cursor:
                self._check_cursor(table.spec, saved.meta)
            return table.refresh()

        table = together(self.placement, self.name, "restore", live)
        version = version_on_host(table, "restore")
        merge = self.how.merge and self.made is None
        if self.drawn and not merge and not self.how.own_initializer and table.spec.seed != saved.meta["seed"]:
            spec = dataclasses.replace(table.spec, seed=saved.meta["seed"])
            replaced = prepare_move(table, spec, "restore", rows=saved.contents)
            return Ready(table.spec, version, lambda: Table(replaced.commit(), spec))

        def rows() -> loads.Loading:
            given = saved.contents
            if merge:
                given = merged(table.spec, "restore", copied(table, "restore"), given)
            return loads.checked(table.spec, given)

        return Ready(table.spec, version, loads.prepare_load(table, rows))

    def _check_cursor(self, spec: TableSpec, meta: dict[str, Any]) -> None:
        admit = dump(spec.admit)
        if admit != meta.get("options", {}).get("admit"):  # whose counts would not be those of the checkpoint
            raise fail(
                ValueError, spec.name, "restore", "a table with the admission that was saved beside cursor=",
                f"{spec.admit}", "restore without cursor=, and then save the table whole, with a cursor",
            )  # fmt: skip

    def undo(self) -> None:
        """Drops the table, if `prepare` has made it, and nobody has written it since."""
        if self.made is not None and PROCESS.spec_of(self.target) == self.made[0]:
            spec, first = self.made
            if set(versions_of(spec)) == {first}:
                drop_table(self.target)

    def _check_place(self, spec: TableSpec) -> None:
        """Whether a table of the name, which nobody has given, is where the options say."""
        asked = spec
        if self.how.storage is not None:
            asked = dataclasses.replace(asked, storage=self.how.storage)
        if self.how.given:
            asked = dataclasses.replace(asked, placement=placement_of(self.how, self.target, "restore"))
        check_same(asked, spec, "restore")

    def _open(self) -> Saved:
        rows = ChainRows(self.chain, self.name)
        saved = self._saved(rows, {} if self.table else self._rules(rows.meta))
        if self.table is not None:
            if self.found:
                self._check_place(self.table.spec)
            but = ("seed", "initializer") if self.how.own_initializer else ("seed",) if self.drawn else ()
            self._check_dtype(self.table.spec, saved.meta["dtype"])
            _check_equal(self.table.spec, saved, self.chain.catalog.directory, but)
        elif self.how.own_initializer:
            raise fail(
                ValueError, self.target, "restore", "a table that is there beside own_initializer=True", "none",
                "make it first, with the initializer and the seed that it is to have",
            )  # fmt: skip
        rows.check_sizes()
        return saved

    def _check_dtype(self, spec: TableSpec, dtype: str) -> None:
        """Whether a table has the dtype to which all tables of the call are converted."""
        if self.how.dtype is not None and spec.dtype != dtype:
            raise fail(
                ValueError, spec.name, "restore", f"tables with dtype {dtype!r} beside dtype={dtype!r}, which converts "
                "all of a call", f"one with dtype {spec.dtype!r}",
                "restore it in a call of its own, and name the tables of each call",
            )  # fmt: skip

    def _saved(self, rows: ChainRows, rules: dict[str, Any]) -> Saved:
        """What is wanted of what was saved."""
        how, counts = self.how, rows.counts()
        meta: dict[str, Any] = rows.meta | {"rows": rows.num_rows}
        slot_types: dict[str, str] = dict(meta["slots"])
        if how.keys is None:
            source = own_rows(rows.source(), self.placement, rows.offsets)
        else:
            some, counts = only(rows, counts, how.keys)
            source = own_rows(some, self.placement, None)
            meta = meta | {"rows": source.num_rows}  # here, which is what can be held against a limit
        if not how.slots:
            if can_be_behind(slot_types):
                columns = source.read([LAST_COLUMN, "has_slots"], 0, source.num_rows)
                warn_if_saved_behind(self.name, "restore", [columns])
            source, slot_types = without_slots(source), {}
        dtype = meta["dtype"] if how.dtype is None else row_dtype(how.dtype, self.name, "restore")
        if dtype != meta["dtype"]:
            source = converted(source, dtype, self.name)
            exact = {"rounding": "nearest"} if dtype == "float32" else {}
            meta = meta | {"dtype": dtype} | exact
        none = {name: np.zeros(0, dtype) for name, dtype in ADMISSION_COLUMNS.items()}
        loading = loads.Loading(source, meta["last_step"], slot_types, none | counts)
        return Saved(meta, load_initializer(meta["initializer"], rows.pool().get(POOL)), loading, rules)

    def _rules(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Those of the table that is to be made, if it can be, by their options."""
        rules: dict[str, Any] = {}
        for option, saved in meta.get("options", {}).items():
            try:
                rules[option] = load(saved)
            except ValueError as error:
                raise ValueError(f"kvjax: table {self.name!r}, restore: {option}: {error}") from error
        if "partitioner" in meta and self.sharding.given and self.sharding.partitioner is None:
            raise fail(
                ValueError, self.name, "restore", f"the table's partitioner, {meta['partitioner']}, of which a "
                "checkpoint has only the name", "no partitioner",
                "TableRestore(..., mesh=, partitioner=), or make the table with kvjax.get_table first and restore "
                "into it: with another partitioner, or none, its rows are placed anew",
            )  # fmt: skip
        return rules

    def _make(self, saved: Saved) -> Table:
        meta = saved.meta
        fields = {name: meta[name] for name in FIELDS if name in meta} | {"initializer": saved.initializer}
        options = Options(storage=self.how.storage, **fields, **saved.rules)
        there = PROCESS.spec_of(self.target)  # another thread may make it, too
        table = get_or_make(self.target, meta["dim"], self.placement, options)
        if there is None:
            # Not its version of now: who made it in between may have written it.
            self.made = table.spec, PROCESS.births[self.target]
            if self.placement is None and meta["num_shards"] > 1 and jax.process_count() > 1:
                warn(
                    f"kvjax: table {self.target!r}, restore: want devices for a table that was saved in "
                    f"{meta['num_shards']} shards, got none, so each of {jax.process_count()} processes has all rows "
                    "and trains them for itself; give restore mesh=, or make the table first"
                )
        return table


def _check_equal(spec: TableSpec, saved: Saved, directory: AnyPath, but: tuple[str, ...]) -> None:
    """Whether a table is what was saved in a directory, `but` for some fields."""
    meta = saved.meta
    want = {name: meta[name] for name in EQUAL_FIELDS} | {"initializer": saved.initializer}
    want = {name: value for name, value in want.items() if name not in but and value != getattr(spec, name)}
    if want:
        got = ", ".join(f"{name} {getattr(spec, name)!r}" for name in want)
        restored = "the restore" if spec.name == meta["name"] else f"restore(..., {{{meta['name']!r}: {spec.name!r}}})"
        mend = f"make it as it was saved, or kvjax.drop_table({spec.name!r}) first, and {restored} makes it"
        if want.keys() == {"dtype"}:
            mend = f"give dtype={spec.dtype!r} to convert the rows, or {mend}"
        if changed := [name for name in ("dim", "key_dtype") if name in want]:
            own = ", ".join(f"{name} {getattr(spec, name)!r}" for name in changed)
            mend += f"; for its rows with {own}, restore(..., {{{meta['name']!r}: 'another name'}}), and load the "
            mend += "export of that" + (" with other columns (docs/restarts.md, Another dim)" if "dim" in want else "")
        if want.keys() <= {"seed", "initializer"}:
            mend += "; own_initializer=True keeps its own, so that keys without a row read as other rows than before"
        raise fail(
            ValueError, spec.name, "restore",
            f"a table with {', '.join(f'{name} {value!r}' for name, value in want.items())}, as saved in {directory}",
            f"one with {got}", mend,
        )  # fmt: skip
    cut = f"kvjax.checkpoint.prune(path, out, kvjax.Prune(top_k={spec.max_capacity}))"
    mend = f"make the table with a larger max_capacity, or restore what {cut} makes of the checkpoint"
    loads.check_capacity(spec, "restore", meta["rows"], mend)
