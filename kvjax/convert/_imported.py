"""Imported rows: what was read from another system's table, checked, and how it becomes a table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvjax._values.dtypes import ROW_DTYPES
from kvjax._values.dtypes import cast as cast_rows
from kvjax._values.errors import fail
from kvjax._values.exported import Exported

if TYPE_CHECKING:
    from kvjax._table.table import Table  # and JAX, for which who only reads files does not wait


@dataclasses.dataclass(frozen=True)
class Imported:
    """Rows that were read from another system's table, and what was not taken from it.

    No table is made or changed before `make` or `load`. ``load(table, merge=True)`` adds the rows to those of a table.

    Attributes:
      rows: `kvjax.Exported`; frequencies and row versions are 0 where the system has none.
      key_dtype: dtype of the keys in the source: "int64", "uint64", "int32" or "uint32".
      source: the files, in words.
      left: what was not taken, and why, one line each.

    Raises:
      ValueError, TypeError, MemoryError: from `make` and `load`, see there.

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
        """Makes a table of the rows; makes nothing if that fails.

        Args:
          name: of the new table.
          **options: options of `kvjax.get_table`. ``key_dtype`` and ``dtype`` are by default those of the rows; with
            another ``dtype`` the rows are rounded to it.

        Returns:
          The live handle.

        Raises:
          ValueError: there is a table of that name, or a table cannot have the dtype of the rows.
          MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``.
          TypeError: `dim` is among the options: the rows have it.

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
                "Imported.load replaces the rows of a table, or adds to them with merge=True",
            )  # fmt: skip
        if "dim" in options:
            mend = "leave it out; rows of another dim are those of another table"
            raise fail(TypeError, name, "import", "no dim=, which the rows have", f"{options['dim']!r}", mend)
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

    def load(self, table: Table, cast: bool = False, merge: bool = False) -> Table:
        """Replaces the rows of a table, or with ``merge`` adds to them; the table is unchanged if this fails.

        Args:
          table: the live handle.
          cast: whether rows may be rounded to the table's dtype.
          merge: keep the rows of the table whose keys are not imported (see `kvjax.Table.load`).

        Returns:
          The next handle.

        Raises:
          ValueError: the table has another dim or dtype, or cannot hold, with ``cast``, an element of a row.
          MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``.

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
        values = rows.values
        if values.dtype != spec.row_dtype and not cast:
            raise fail(
                ValueError,
                table.name,
                "import",
                f"rows of {spec.dtype}",
                values.dtype.name,
                "say cast=True to round them",
            )
        values = cast_rows(values, spec.row_dtype, rows.keys, table.name, "import")
        return table.load(dataclasses.replace(rows, values=values), merge=merge)
