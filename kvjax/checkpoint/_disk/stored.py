"""Stored tables: what of a table goes to disk, and in which form its options are saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._spec.options import saved_as
from kvjax.checkpoint._disk.format import FORMAT
from kvjax.checkpoint._disk.rules import dump
from kvjax.ffi import host

if TYPE_CHECKING:
    from kvjax._formats.source import Source
    from kvjax._table.frozen import FrozenRows

FIELDS = saved_as("fields")
RULES = saved_as("rules")
EQUAL_FIELDS = ("dim", "dtype", "key_dtype", "seed", "initializer")  # the key's type, or -1 would become 2**64 - 1
"""In which a table is as what is restored into it, and a delta as what it builds on."""


def made_with(dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a table was made with, as far as it is saved, by the names of arguments: the same in all its processes."""
    return {"dim": dim} | {option: dump(options[option]) for option in (*FIELDS, *RULES)}


def described(name: str, dim: int, options: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What kvjax.json says of a table.

    Args:
      name: of the table.
      dim: of it.
      options: what it has as each option that is saved.
      shards: of each on disk "rows", "last_step", "slots" and "extras".
    """
    meta: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "dim": dim,
        **{option: dump(options[option]) for option in FIELDS},
        "options": {option: dump(options[option]) for option in RULES},
        "num_buckets": host.NUM_BUCKETS,
        "num_shards": len(shards),
        "rows": sum(shard["rows"] for shard in shards),
        "last_step": max(shard["last_step"] for shard in shards),
        "slots": next((shard["slots"] for shard in shards if shard["slots"]), []),
    }
    if len(shards) == 1:
        return meta | {"extras": shards[0]["extras"]}
    return meta | {"shards": [{key: shard[key] for key in ("rows", "extras")} for shard in shards]}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk: its description, and what this process has of it.

    Attributes:
      meta: what kvjax.json says.
      arrays: those of which not each row has some, by name.
      rows: the columns of rows; None if there is no part of the table here.
      shard: which of the shards on disk this process writes, None for none. The first also writes what all share.
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    rows: Source | FrozenRows | None
    shard: int | None
