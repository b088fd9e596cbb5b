"""The format: how tables lie on disk, which anything that reads zarr can open; docs/format.md has all of it.

    kvjax.json                              the seal: all tables, and the digests of the lists below
    <table>/kvjax.json                      what the table is, and the type of each array
    <table>/initializer.pool/               the rows that keys without a row read as, if it is an array
    <table>/shard-00000-of-00001.json       the list: size and digest of each file that this shard's process wrote
    <table>/shard-00000-of-00001/keys/      zarr v3 arrays of plain bytes, rows sorted by (bucket, key):
        values/ freqs/ versions/ has_slots/ offsets/ slot.<name>/
        pinned/ pending_keys/ pending_counts/ sketch/            only where there is something to keep

Of a table that is sharded over several processes, each writes the rows that it has the first copy of, as a shard of its
own; kvjax.json says how many rows each has. The shards of one process are one on disk.

``offsets[b]`` is the first row of virtual bucket b, so whoever owns a range of buckets reads one slice of each shard.

Each file has its digest under its path, so bytes that were changed, or that are whole but of another place, table or
step, are not what the list says; a list has its digest in the seal, and the seal its own. A digest is the XXH64 of a
file's bytes, as 16 hexadecimal digits. Two earlier formats are still read: "v2", with packed chunks, and "v1", which
also has no seal and no lists.

A delta has "delta" in its kvjax.json, with the digest of the seal that it builds on. Its rows are those that were
touched since, and removed/ has the keys that were and have none.

The names of folders are percent-encoded, those of tables with the dots and a leading "_", which are for names of
Orbax's and of this page. What is longer than a file system takes is cut, and gets the digest of the whole name.
Everything goes below one directory; that a checkpoint is there as a whole or not at all is for the caller to see to, as
Orbax does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from kvjax._spec.options import saved_as
from kvjax._values.exported import ROW_COLUMNS, Exported, slot_column
from kvjax._values.snapshot import ADMISSION_COLUMNS, Snapshot
from kvjax.ffi import host

if TYPE_CHECKING:
    from kvjax._table.frozen import FrozenRows

FORMAT, PACKED, UNSEALED = "kvjax.table.v3", "kvjax.table.v2", "kvjax.table.v1"
SEAL = "kvjax.tables.v2"
META = "kvjax.json"
POOL = "initializer.pool"
REMOVED = "removed"
COLUMNS = tuple(name for name in ROW_COLUMNS if name != "pinned")
"""The columns of rows that are always there; "pinned" is only where something is."""
FIELDS = saved_as("fields")
RULES = saved_as("rules")
_LONGEST_NAME = 200  # of the 255 bytes that file systems take: whoever copies a checkpoint may add to a name


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as tables."""


class Damaged(ValueError):
    """What is not as it was written: "want ..., got ..."."""


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


def digest(data: bytes | np.ndarray) -> str:
    """The digest of a file's bytes, which may be ``(n,)`` uint8."""
    return f"{host.digest(np.frombuffer(data, np.uint8)):016x}"


# ---- names ---------------------------------------------------------------------------------------------------


def shard_folder(shard: int, num_shards: int) -> str:
    return f"shard-{shard:05}-of-{num_shards:05}"


def shard_list(shard: int, num_shards: int) -> str:
    return shard_folder(shard, num_shards) + ".json"


def table_folder(name: str) -> str:
    text = quote(name, safe="").replace(".", "%2E")
    return _cut("%5F" + text[1:] if text.startswith("_") else text, name)


def array_folder(name: str) -> str:
    return _cut(quote(name, safe=""), name)


def _cut(text: str, name: str) -> str:
    # No name is encoded with a "=", so what is cut is like no other.
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 17]}={digest(name.encode())}"
