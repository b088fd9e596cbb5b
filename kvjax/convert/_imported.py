"""Imported rows: what was read of another system's table, checked, and how it becomes a table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._formats.errors import FileError
from kvjax._values.dtypes import KEY_DTYPES, ROW_DTYPES, dtype_name
from kvjax._values.errors import fail
from kvjax._values.exported import Exported

if TYPE_CHECKING:
    from kvjax._table.table import Table  # and JAX, for which who only reads files does not wait


@dataclasses.dataclass(frozen=True)
class Imported:
    """Rows that were read of another system's table, and what was not taken of it.

    Nothing is made before `make` or `load`; ``table.upsert(imported.rows.keys, imported.rows.values)`` adds the rows to
    a table that has others.

    Attributes:
      rows: `kvjax.Exported`; frequencies and row versions are 0 where the system has none.
      key_dtype: of the keys there: "int64", "uint64", "int32" or "uint32".
      source: the files.
      left: what was not taken, and why, a line each.

    Example:
      >>> import kvjax, numpy as np
      >>> kvjax.convert.from_dense(np.ones((3, 2), np.float32))
      Imported(rows=3, dim=2, float32, keys int64, of an array)
    """

    rows: Exported
    key_dtype: str
    source: str
    left: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = self.rows
        return (
            f"Imported(rows={len(rows)}, dim={rows.values.shape[1]}, {rows.values.dtype.name}, keys {self.key_dtype}, "
            f"of {self.source}{''.join(f'; left out: {line}' for line in self.left)})"
        )

    def make(self, name: str, **options: object) -> Table:
        """Makes a table of the rows, or nothing if that fails.

        Args:
          name: of the new table.
          **options: of `kvjax.get_table`. ``key_dtype`` and ``dtype`` are by default those of the rows; with another
            ``dtype`` the rows are rounded to it.

        Returns:
          The live handle.

        Raises:
          ValueError: there is a table of that name, its dtype can't be that of the rows, or a key does not fit.
          MemoryError: there are more rows than ``max_capacity``.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.convert.from_dense(np.ones((3, 2), np.float32)).make("doc_make", dtype="bfloat16")
          >>> table.lookup(1).tolist(), len(table)
          ([1.0, 1.0], 3)
          >>> kvjax.drop_table("doc_make")
        """
        from kvjax._table.registry import drop_table, get_table, tables

        if name in tables():
            raise fail(
                ValueError, name, "import", "a new name", "that of a live table",
                "Imported.load replaces the rows of a table, and upsert adds to them",
            )  # fmt: skip
        own = self.rows.values.dtype.name
        if "dtype" not in options and own not in ROW_DTYPES:
            raise fail(
                ValueError, name, "import", f"rows of {list(ROW_DTYPES)}", own, 'say dtype="float32" to round them'
            )
        given: dict[str, Any] = {"key_dtype": self.key_dtype, "dtype": own} | options
        table = get_table(name, dim=self.rows.values.shape[1], **given)
        try:
            return self.load(table, cast="dtype" in options)
        except BaseException:
            drop_table(name)
            raise

    def load(self, table: Table, cast: bool = False) -> Table:
        """Replaces the rows of a table; it is unchanged if this fails.

        Args:
          table: the live handle.
          cast: whether rows may be rounded to the table's dtype.

        Returns:
          The next handle.

        Raises:
          ValueError: dim or dtype is another, or a key does not fit the table's.
          MemoryError: there are more rows than ``max_capacity``.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_import", dim=2)
          >>> table = kvjax.convert.from_dense(np.ones((3, 2), np.float32)).load(table)
          >>> len(table)
          3
          >>> kvjax.drop_table("doc_import")
        """
        from kvjax._table.table import check_table

        check_table(table, "import")
        rows, spec = self.rows, table.spec
        keys, values = _keys(rows.keys, spec.key_dtype, table.name), rows.values
        if values.dtype != spec.row_dtype and not cast:
            raise fail(
                ValueError,
                table.name,
                "import",
                f"rows of {spec.dtype}",
                values.dtype.name,
                "say cast=True to round them",
            )
        return table.load(dataclasses.replace(rows, keys=keys, values=values.astype(spec.row_dtype, copy=False)))


def _keys(keys: np.ndarray, key_dtype: str, name: str) -> np.ndarray:
    """Keys as the table has them, if all fit."""
    limits = np.iinfo(key_dtype)
    fits = np.array([limits.min <= int(k) <= limits.max for k in (keys.min(), keys.max())]) if len(keys) else [True]
    if not np.all(fits):
        raise fail(
            ValueError, name, "import", f"keys that {key_dtype} holds", f"keys from {keys.min()} to {keys.max()}",
            "make the table with another key_dtype",
        )  # fmt: skip
    return keys.astype(np.uint64 if key_dtype.startswith("u") else np.int64, copy=False)


def imported(
    file: str | os.PathLike[str], source: str, columns: Mapping[str, np.ndarray], *, slots: Mapping[str, np.ndarray],
    last_step: int | None = None, left: list[str],
) -> Imported:  # fmt: skip
    """What was read, checked.

    Args:
      file: for errors.
      source: what it is, in words.
      columns: "keys" ``(n,)``, "values" ``(n, dim)``, and "freqs", "versions", "has_slots", "pinned" ``(n,)`` if known.
      slots: ``(n, ...)``, by the names that they are to have.
      last_step: of the table; by default the last row version.
      left: what was not taken.

    Raises:
      FileError: the columns do not fit each other, or a key is there twice.
    """
    keys, values = columns["keys"], columns["values"]
    if keys.ndim != 1 or dtype_name(keys.dtype) not in KEY_DTYPES:
        raise FileError(file, f"keys (n,) of {list(KEY_DTYPES)}", f"{keys.shape} {keys.dtype}")
    if values.ndim != 2 or len(values) != len(keys) or values.shape[1] == 0 or not _is_float(values):
        raise FileError(file, f"values ({len(keys)}, dim) of floats", f"{values.shape} {values.dtype}")
    for name, array in [*columns.items(), *slots.items()]:
        if len(array) != len(keys) or (name not in (*slots, "values") and array.ndim != 1):
            raise FileError(file, f"{name!r} for {len(keys)} keys", f"{array.shape}")
    for name in ("freqs", "versions"):
        if name in columns and columns[name].dtype.kind not in "iu":
            raise FileError(file, f"{name} of integers", f"{columns[name].dtype}")
    wide = keys.astype(np.uint64 if keys.dtype.kind == "u" else np.int64)
    found, counts = np.unique(wide, return_counts=True)
    if len(found) != len(wide):
        twice = found[counts > 1]
        raise FileError(
            file, "each key once", f"{len(twice)} keys that are there again, the first {twice[0]}",
            "leave all but one of their rows out",
        )  # fmt: skip
    n = len(keys)
    plain = {name: columns[name].astype(np.int64) if name in columns else np.zeros(n, np.int64) for name in _COUNTS}
    if any((array < 0).any() for array in plain.values()):
        raise FileError(file, "freqs and versions of at least 0", "negative ones")
    has_slots = columns.get("has_slots", np.full(n, bool(slots)))
    rows = Exported(
        keys=wide,
        values=np.ascontiguousarray(values),
        **plain,
        slots=dict(slots),
        has_slots=has_slots.astype(bool),
        pinned=columns.get("pinned", np.zeros(n, bool)).astype(bool),
        last_step=int(plain["versions"].max(initial=0)) if last_step is None else last_step,
        total=n,
    )
    return Imported(rows, keys.dtype.name, source, tuple(left))


_COUNTS = ("freqs", "versions")


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A slot as another system has it: a table of its own, whose rows are in an order of their own.

    Attributes:
      name: there.
      keys: ``(m,)``.
      values: ``(m, ...)``.
    """

    name: str
    keys: np.ndarray
    values: np.ndarray


def of_keys(
    file: str | os.PathLike[str], keys: np.ndarray, slots: Mapping[str, Slot]
) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
    """The rows of slots in the order of the table's keys.

    Args:
      file: for errors.
      keys: ``(n,)`` of the table.
      slots: by the names that they are to have.

    Returns:
      ``(n, ...)`` of each, zeros for keys that it lacks; ``(n,)`` bool, true for keys that all slots have; and what was
      left.

    Raises:
      FileError: a slot has a key twice, or not as many rows as keys.
    """
    found: dict[str, np.ndarray] = {}
    has_slots, left = np.full(len(keys), bool(slots)), list[str]()
    for ours, slot in slots.items():
        if len(slot.keys) != len(slot.values):
            got = f"{len(slot.keys)} and {len(slot.values)}"
            raise FileError(file, f"as many keys as rows of the slot {slot.name!r}", got)
        at, there = places(file, f"the slot {slot.name!r}", slot.keys, keys)
        found[ours] = np.zeros((len(keys), *slot.values.shape[1:]), slot.values.dtype)
        found[ours][there] = slot.values[at[there]]
        has_slots &= there
        if more := len(slot.keys) - int(there.sum()):
            left.append(f"{more} rows of the slot {slot.name!r} whose keys have no row")
    if slots and not has_slots.all():
        left.append(f"slots of {int((~has_slots).sum())} keys, which not all of {list(slots)} have")
    return found, has_slots, left


def places(
    file: str | os.PathLike[str], what: str, among: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `keys` ``(n,)`` is among others, and whether it is: ``(n,)`` each.

    Raises:
      FileError: of the others one is there twice.
    """
    order = np.argsort(among, kind="stable")
    ordered = among[order]
    if (again := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise FileError(file, f"each key of {what} once", f"{len(again)} that are there again, the first {again[0]}")
    if not len(among):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(ordered, keys), len(among) - 1)
    return order[at], ordered[at] == keys
