"""Contents: what a frozen table is written from, in the one form that the writer takes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from kvjax._formats.paths import AnyPath, anywhere
from kvjax._formats.quantise import to_float32
from kvjax._values.arrays import check_all_there
from kvjax._values.errors import fail, meant, where_of
from kvjax._values.key_width import own_key
from kvjax._values.lookups import missing_row
from kvjax.serving._initial import Initial
from kvjax.serving._search import RANGES, mixed, ranges_of

if TYPE_CHECKING:
    from kvjax._formats.source import Source
    from kvjax._table.table import Table
    from kvjax._values.exported import Exported
    from kvjax._values.prune import PruneLike
    from kvjax.checkpoint._chains.chain import Chain
    from kvjax.checkpoint._chains.chain_rows import ChainRows
    from kvjax.serving._frozen import FrozenTable

RowsLike: TypeAlias = "Table | Exported | FrozenTable | str | os.PathLike[str]"
"""What a frozen table is written from: a table, an export, a frozen table, or the folder of a checkpoint's tables."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a frozen table is to hold.

    Attributes:
      name: of the table.
      rows: columns "keys" and "values", with the table's last step.
      on_disk: whether they are not in memory.
      key_dtype: of the table.
      missing: what keys without a row read as; None if nobody knows.
      initial: how initial rows are made; None if nobody knows.
      pool: ``(p, dim)`` float32, of a pool.
      moved: whether training has moved the rows that keys without one read as.
    """

    name: str
    rows: Source
    on_disk: bool
    key_dtype: str
    missing: Any
    initial: Initial | None
    pool: np.ndarray | None
    moved: bool = False

    def default_row(self, missing: Any) -> np.ndarray | None:
        """The row ``(dim,)`` float32 of keys without one; None for the initial row of each.

        Raises:
          ValueError: nobody knows what they read as, or it is no row.
        """
        (dim,) = self.rows.types["values"][1]
        asked = self.missing if missing is None else missing
        is_init = isinstance(asked, str) and asked == "init"
        if is_init and missing is None and self.moved:
            raise fail(
                ValueError, self.name, "write", "missing= beside kvjax.optax.catch_up of a transform that moves rows "
                "without a gradient, such as weight decay", "none, and keys without a row would read otherwise than "
                "through caught_up", "give missing='init' for initial rows as they were made, 'zeros', or a row: where "
                "all begin the same, what caught_up(...) looks up for a key without one",
            )  # fmt: skip
        if is_init and self.initial is not None:
            return None
        if asked is None or is_init:
            why = "an export has none" if self.missing is None else "a function of yours makes the initial rows"
            raise fail(
                ValueError, self.name, "write", "missing='zeros' or a row for keys without one",
                f"none, and no initializer that is known without JAX ({why})", "FrozenTable.write(..., missing=)",
            )  # fmt: skip
        return row_of(self.name, "write", asked, dim)

    def pieces(self, folder: Path) -> Iterator[Mapping[str, np.ndarray]]:
        """The columns by ranges of hashes, one behind the other; in any order inside.

        Of rows on disk, some are in memory at a time; the others are in files without names meanwhile.

        Args:
          folder: where to put these.
        """
        if not self.on_disk:
            yield self.rows.read(list(self.rows.types), 0, self.rows.num_rows)
            return
        from kvjax._formats.spread import spread

        for parts in spread({self.name: self.rows}, folder, ranges_of, RANGES):
            yield parts[self.name]


def row_of(name: str, op: str, missing: Any, dim: int) -> np.ndarray:
    """ "zeros" or a row as ``(dim,)`` float32."""
    check_all_there(missing, where_of(name, op))
    return missing_row(missing, dim, np.zeros(dim, np.float32), partial(to_float32, what=where_of(name, op)), name, op)


def no_initial(name: str, op: str = "lookup") -> Exception:
    """The error of a lookup that asks a file for initial rows of which it does not know how they are made."""
    return fail(
        ValueError, name, op, "missing='zeros' or a row", "missing='init' of a file that does not know how "
        "initial rows are made", "write it from a table with one of kvjax.initializers",
    )  # fmt: skip


def with_contents(
    source: Any, name: str | None, default_name: str, prune: PruneLike | None, base: Any, write: Callable[[Contents], T]
) -> T:
    """What `write` gives of what a table, an export or a checkpoint holds, pruned. It is asked again if another
    checkpoint takes the place of one that it reads.

    Raises:
      TypeError: it is something else.
      ValueError: it cannot be frozen.
    """
    # Here, because it stands on more than NumPy, and whoever only reads need not have it.
    from kvjax._values.exported import Exported

    if name is not None and not (isinstance(cast("object", name), str) and name):
        mend = "leave it out for that of the source"
        raise fail(ValueError, default_name, "write", "name= as a text", repr(name), mend)
    if isinstance(source, (str, os.PathLike)):
        from kvjax.checkpoint._chains.chain import unreplaced

        folder = anywhere(source, "FrozenTable.write")

        def body(chain: Chain) -> T:
            return write(of_chain(chain, _name_in(chain, folder, name), prune))

        return unreplaced(folder, base, "write", body)
    if base is not None:
        want, mend = "base= beside a checkpoint", "leave it out"
        raise fail(ValueError, name or default_name, "write", want, type(source).__name__, mend)
    if isinstance(source, Exported):
        source = source.checked(name or default_name, "write")
        key_dtype = source.fitting_key_dtype
        return write(_in_memory(name or default_name, source, prune, key_dtype, None, None, None, None))
    if hasattr(source, "spec") and hasattr(source, "export"):
        return write(_of_table(source, name, prune))
    raise fail(
        TypeError, name or default_name, "write", "a kvjax.Table, what table.export() gives, a FrozenTable, or "
        "the folder of a checkpoint's tables", type(source).__name__, "give one of these",
    )  # fmt: skip


def _in_memory(
    name: str, rows: Exported, prune: PruneLike | None, key_dtype: str, shared: int | None, *unseen: Any
) -> Contents:
    from kvjax._formats.source import Source
    from kvjax._values.prune import rule_for

    if prune is not None:
        rows = rows.take(rule_for(prune, name, key_dtype, shared).mask(rows))
    source = Source.of({"keys": rows.keys, "values": rows.values}, {"last_step": str(rows.last_step)})
    return Contents(name, source, False, key_dtype, *unseen)


def _of_table(table: Any, name: str | None, prune: PruneLike | None) -> Contents:
    spec = table.spec
    if spec.num_processes > 1:
        raise fail(
            ValueError, spec.name, "write", "a table of one process", f"one of {spec.num_processes}",
            "save it with kvjax.orbax.TableSave, and write it from the checkpoint",
        )  # fmt: skip
    missing = _unadmitted(spec.admit, spec.key_dtype)
    if not isinstance(missing, str):  # the row that unadmitted keys share, or its initial row
        missing = np.asarray(table.lookup(np.array(missing, np.uint64), missing="init"))
    initial, pool = _initial_of(spec.initializer, spec.seed, spec.dtype)
    moved = initial is not None and _has_moved(table, initial, pool)
    rows, shared = table.export(), spec.shared_key
    return _in_memory(name or spec.name, rows, prune, spec.key_dtype, shared, missing, initial, pool, moved)


def _has_moved(table: Any, initial: Initial, pool: np.ndarray | None) -> bool:
    """Whether keys without a row read as something else than their initial row, or would through `caught_up`."""
    if table.view is None:
        return _decays(initial_row(initial, pool, 1, table.dim), table.spec.host.slots(table.name, 0))
    keys = np.random.default_rng(0).integers(2**31, size=8)
    keys = keys[~np.asarray(table.contains(keys))]
    bits = keys.astype(np.uint64)
    made = initial.rows(np, bits, mixed(bits), table.dim, pool)
    return not np.array_equal(np.asarray(table.lookup(keys, missing="init")), made.astype(table.spec.row_dtype))


def _decays(made: np.ndarray | None, slot_types: Any) -> bool:
    """Whether weight decay has moved initial rows like the one that is `made`, of a table with these slots."""
    from kvjax._values.behind import decays

    return made is not None and bool(made.any()) and decays(dict(slot_types))


def _name_in(chain: Chain, folder: AnyPath, name: str | None) -> str:
    if name is None and len(chain.names) == 1:
        (name,) = chain.names
    if name is None:
        raise fail(
            ValueError, str(folder), "write", "name= of one of the checkpoint's tables", "none",
            f"the checkpoint holds {chain.names}",
        )  # fmt: skip
    if name not in chain.names:
        mend = f"{meant(name, chain.names)}the checkpoint holds {chain.names}"
        raise fail(ValueError, str(folder), "write", "one of its tables", repr(name), mend)
    return name


def of_chain(chain: Chain, name: str, prune: PruneLike | None) -> Contents:
    """What a table of a checkpoint holds, pruned; its rows are read as they are asked for."""
    from kvjax._keys.buckets import buckets_of
    from kvjax._values.exported import ROW_COLUMNS
    from kvjax._values.prune import rule_for
    from kvjax.checkpoint._chains.chain_rows import ChainRows
    from kvjax.checkpoint._prune import kept

    saved = ChainRows(chain, name)
    saved.check_sizes()
    meta, rows = saved.meta, saved.source().only(list(ROW_COLUMNS))
    saved.warn_if_behind("write")
    missing, initial, pool = unseen(saved)
    moved = _decays(initial_row(initial, pool, 1, meta["dim"]), meta["slots"])
    if not isinstance(missing, str):
        bucket = int(buckets_of(np.array([missing], np.uint64))[0])
        there = saved.between(bucket, bucket + 1, ["values"])
        at = np.flatnonzero(there["keys"].view(np.uint64) == np.uint64(missing))
        missing = there["values"][at[0]] if len(at) else initial_row(initial, pool, missing, meta["dim"])
    if prune is not None:
        rows = rows.where(kept(rows, rule_for(prune, name, meta["key_dtype"], saved.shared_key)))
    return Contents(name, rows.only(["keys", "values"]), True, meta["key_dtype"], missing, initial, pool, moved)


def unseen(saved: ChainRows) -> tuple[Any, Initial | None, np.ndarray | None]:
    """What keys without a row read as in a table on disk, as `_unadmitted`, and how initial rows are made."""
    from kvjax.checkpoint._disk.format import POOL
    from kvjax.checkpoint._disk.rules import load, load_initializer

    meta = saved.meta
    made = load_initializer(meta["initializer"], saved.pool().get(POOL))
    unadmitted = _unadmitted(load(meta.get("options", {}).get("admit")), meta["key_dtype"])
    return unadmitted, *_initial_of(made, meta["seed"], meta["dtype"])


def _unadmitted(admit: Any, key_dtype: str) -> Any:
    """What keys that were never admitted read as: "init", "zeros", or the key, 64 bits, whose row they share."""
    if admit is None or isinstance(admit.unadmitted, str):
        return "init" if admit is None else admit.unadmitted
    return own_key(int(admit.unadmitted), key_dtype)


def _initial_of(made: Any, seed: int, dtype: str) -> tuple[Initial | None, np.ndarray | None]:
    if hasattr(made, "function"):  # a function of the user's, which takes JAX
        return None, None
    if hasattr(made, "array"):
        return Initial("pool", 0.0, 0.0, seed, dtype, made.rows), made.array()
    if hasattr(made, "parts"):
        segments = tuple((end, part.kind, part.a, part.b) for end, part in zip(made.ends, made.parts, strict=True))
        return Initial("segments", 0.0, 0.0, seed, dtype, segments=segments), None
    return Initial(made.kind, made.a, made.b, seed, dtype), None


def initial_row(initial: Initial | None, pool: np.ndarray | None, key: int, dim: int) -> Any:
    """The initial row ``(dim,)`` of a key; None if nobody knows it."""
    keys = np.array([key], np.uint64)
    return None if initial is None else initial.rows(np, keys, mixed(keys), dim, pool)[0]
