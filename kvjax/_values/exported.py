"""Exported rows: a table's contents as NumPy arrays."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

_SLOT = "slot."


@dataclasses.dataclass(frozen=True)
class Exported:
    """Rows of a table, sorted by (bucket, key), so that equal tables give equal arrays.

    Attributes:
      keys: ``(n,)`` int64 (uint64 for a table of unsigned keys).
      values: ``(n, dim)`` of the table's dtype.
      freqs: ``(n,)`` int64, occurrences in training.
      versions: ``(n,)`` int64, the step that last wrote the row.
      slots: optimizer slots by name, each ``(n, ...)``; empty unless asked for.
      has_slots: ``(n,)`` bool, false where no optimizer has written the row's slots yet.
      pinned: ``(n,)`` bool, rows that are never evicted.
      last_step: the table's last step; ages are counted from it.
      total: rows in the table, before pruning.
    """

    keys: np.ndarray
    values: np.ndarray
    freqs: np.ndarray
    versions: np.ndarray
    slots: dict[str, np.ndarray]
    has_slots: np.ndarray
    pinned: np.ndarray
    last_step: int
    total: int

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.total}" if len(self) != self.total else f"{self.total}"
        return (
            f"Exported(rows={rows}, dim={self.values.shape[-1]}, last_step={self.last_step}, slots={list(self.slots)})"
        )

    def take(self, keep: np.ndarray) -> Exported:
        """The rows where `keep` is true.

        Args:
          keep: ``(n,)`` bool.
        """
        kept = {name: array[keep] for name, array in self.columns().items()}
        return self.of_columns(kept, self.last_step, self.total)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows as a Parquet file, which needs pyarrow (``pip install kvjax[parquet]``).

        A column for each array, keys as int64 or uint64, and rows as lists of a fixed size; bfloat16 as float32, which
        holds it exactly. ``last_step`` is in the metadata of the file.

        Args:
          path: of the file, which is replaced.

        Raises:
          ImportError: pyarrow is not installed.
        """
        try:
            pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
        except ImportError as error:
            raise ImportError(
                "kvjax: Exported.to_parquet: want pyarrow, got no such module; pip install pyarrow, or kvjax[parquet]"
            ) from error
        arrays = {name: _arrow(pyarrow, array) for name, array in self.columns().items()}
        table = pyarrow.table(arrays, metadata={"kvjax.last_step": str(self.last_step)})
        parquet.write_table(table, os.fspath(path))

    def columns(self) -> dict[str, np.ndarray]:
        """Every array of the export by name, slots as "slot.<name>"; each ``(n, ...)``."""
        plain = {name: getattr(self, name) for name in ROW_COLUMNS}
        return plain | {_SLOT + name: array for name, array in self.slots.items()}

    @classmethod
    def of_columns(cls, columns: Mapping[str, np.ndarray], last_step: int, total: int | None = None) -> Exported:
        """The export that has these columns.

        Args:
          columns: as `columns` gives them.
          last_step: of the table.
          total: rows in the table, by default all that are here.
        """
        slots = {name.removeprefix(_SLOT): array for name, array in columns.items() if name.startswith(_SLOT)}
        plain = {name: columns[name] for name in ROW_COLUMNS}
        return cls(**plain, slots=slots, last_step=last_step, total=len(plain["keys"]) if total is None else total)


def _arrow(pyarrow: Any, array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.ndim == 1:
        return pyarrow.array(array)
    width = int(np.prod(array.shape[1:]))
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.ascontiguousarray(array).reshape(-1)), width)


ROW_COLUMNS = ("keys", "values", "freqs", "versions", "has_slots", "pinned")
"""The columns that the rows of every table have; beside them there is one for each slot."""


def slot_column(slot: str) -> str:
    """The name of a slot's column."""
    return _SLOT + slot
