"""Stored tables: what goes to disk of a table or comes from it, and as what its options are saved."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._spec.options import saved_as
from kvjax._values.exported import Exported, slot_column
from kvjax._values.snapshot import ADMISSION_COLUMNS, Snapshot
from kvjax.checkpoint._format import COLUMNS

if TYPE_CHECKING:
    from kvjax._table.frozen import FrozenRows

FIELDS = saved_as("fields")
RULES = saved_as("rules")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk or comes from it: its description, and the arrays that this process has of it.

    Attributes:
      meta: what kvjax.json says.
      arrays: by name.
      shard: which of the shards on disk this process writes, None for none. The first also writes what all share.
      frozen: what gives the columns of the rows, where they are not among the arrays.
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    shard: int | None = None
    frozen: FrozenRows | None = None

    def snapshot(self) -> Snapshot:
        slot_types = dict(self.meta["slots"])
        names = (*COLUMNS, *map(slot_column, slot_types))
        pinned = self.arrays.get("pinned", np.zeros(len(self.arrays["keys"]), bool))
        columns = {name: self.arrays[name] for name in names} | {"pinned": pinned}
        rows = Exported.of_columns(columns, self.meta["last_step"])
        admission = {name: self.arrays[name] for name in ADMISSION_COLUMNS if name in self.arrays}
        return Snapshot(rows, np.zeros(0, np.int64), slot_types, admission)
