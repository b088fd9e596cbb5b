"""Stored tables: what goes to disk of a table, and as what its options are saved."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._spec.options import saved_as

if TYPE_CHECKING:
    from kvjax._table.frozen import FrozenRows

FIELDS = saved_as("fields")
RULES = saved_as("rules")
EQUAL_FIELDS = ("dim", "dtype", "key_dtype", "seed", "initializer")  # the key's type, or -1 would become 2**64 - 1
"""In which a table is as what is restored into it, and a delta as what it builds on."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk: its description, and the arrays that this process has of it.

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
