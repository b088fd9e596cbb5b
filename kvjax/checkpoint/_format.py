"""The format: how a table lies on disk, which anything that reads zarr can open.

    <table>/kvjax.json                      what the table is, and the type of each array
    <table>/initializer.pool/               the rows that keys without a row read as, if it is an array
    <table>/shard-00000-of-00001/keys/      zarr v3 arrays, zstd with checksums, rows sorted by (bucket, key):
        values/ freqs/ versions/ has_slots/ offsets/ slot.<name>/
        pinned/ pending_keys/ pending_counts/ sketch/            only where there is something to keep

Of a table that is sharded over several processes, each writes the rows that it has the first copy of, as a shard of its
own; kvjax.json says how many rows each has. The shards of one process are one on disk.

``offsets[b]`` is the first row of virtual bucket b, so whoever owns a range of buckets reads one slice of each shard.
The names in the tree are percent-encoded. Everything goes below one directory; that a checkpoint is there as a whole or
not at all is for the caller to see to, as Orbax does.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from kvjax._spec.options import saved_as
from kvjax._values.exported import ROW_COLUMNS, Exported, slot_column
from kvjax._values.snapshot import ADMISSION_COLUMNS, Snapshot
from kvjax.ffi import host

FORMAT = "kvjax.table.v1"
POOL = "initializer.pool"
COLUMNS = tuple(name for name in ROW_COLUMNS if name != "pinned")
"""The columns of rows that are always there; "pinned" is only where something is."""
FIELDS = saved_as("fields")
RULES = saved_as("rules")
_FIELDS = ("format", "dim", "dtype", "key_dtype", "initializer", "seed", "trainable", "num_buckets", "num_shards",
           "rows", "last_step", "slots")  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as tables."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk or comes from it: its description, and the arrays that this process has of it.

    Attributes:
      meta: what kvjax.json says.
      arrays: by name.
      shard: which of the shards on disk this process writes, None for none. The first also writes what all share.
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    shard: int | None = None

    def snapshot(self) -> Snapshot:
        slot_types = dict(self.meta["slots"])
        names = (*COLUMNS, *map(slot_column, slot_types))
        pinned = self.arrays.get("pinned", np.zeros(len(self.arrays["keys"]), bool))
        columns = {name: self.arrays[name] for name in names} | {"pinned": pinned}
        rows = Exported.of_columns(columns, self.meta["last_step"])
        admission = {name: self.arrays[name] for name in ADMISSION_COLUMNS if name in self.arrays}
        return Snapshot(rows, np.zeros(0, np.int64), slot_types, admission)


def read_meta(directory: Path, name: str) -> dict[str, Any]:
    path = directory / table_folder(name) / "kvjax.json"
    if not path.exists():
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want one of the checkpoint's tables, got none of that name; "
            f"the checkpoint holds {names(directory)}"
        )
    try:
        meta = json.loads(path.read_text())
        for field in _FIELDS:
            meta[field]  # a KeyError names what is missing
        if meta["format"] != FORMAT or meta["num_buckets"] != host.NUM_BUCKETS:
            raise ValueError(f"format {meta['format']!r} with {meta['num_buckets']} buckets")
        rows = [shard["rows"] for shard in shards_of(meta)]
        if len(rows) != meta["num_shards"] or sum(rows) != meta["rows"]:
            raise ValueError(f"{meta['num_shards']} shards and {meta['rows']} rows, but of its shards {rows}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want {path.name} of format {FORMAT!r}, got {error}; "
            "a later kvjax may have written it"
        ) from error
    return meta


def shards_of(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows and extra arrays of each shard on disk."""
    return meta.get("shards") or [{"rows": meta["rows"], "extras": meta.get("extras", {})}]


def shard_folder(shard: int, num_shards: int) -> str:
    return f"shard-{shard:05}-of-{num_shards:05}"


def table_folder(name: str) -> str:
    """The folder of a table: its name, percent-encoded; "." and ".." too, which would be other folders."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def names(directory: Path) -> list[str]:
    """The tables below `directory`."""
    return sorted(unquote(p.parent.name) for p in directory.glob("*/kvjax.json"))


def store_spec(path: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        # A chunk that is missing is damage, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
