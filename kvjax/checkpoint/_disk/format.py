"""The format: how tables lie on disk, which anything that reads zarr can open; docs/format.md has all of it.

    kvjax.json                              the manifest: all tables, and the digests of the lists below
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
step, are not what the list says; a list has its digest in the manifest, and the manifest its own. A digest is the XXH64
of a file's bytes, as 16 hexadecimal digits. Two earlier formats are still read: "v2", with packed chunks, and "v1",
which also has no manifest and no lists.

A delta has "delta" in its kvjax.json, with the digest of the manifest that it builds on. Its rows are those that were
touched since, and removed/ has the keys that were and have none.

The names of folders are percent-encoded, those of tables with the dots and a leading "_", which are for names of
Orbax's and of this page. What is longer than a file system takes is cut, and gets the digest of the whole name.
Everything goes below one directory; that a checkpoint is there as a whole or not at all is for the caller to see to, as
Orbax does.

Only saving and restoring tables loads JAX (`_tables/`): whatever reads or rewrites checkpoints alone does without, and
so the command line does.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import numpy as np

from kvjax._formats.manifest import META as META
from kvjax._formats.source import row_bytes
from kvjax._values.arguments import is_name
from kvjax.ffi import host

FORMAT, PACKED, UNLISTED = "kvjax.table.v3", "kvjax.table.v2", "kvjax.table.v1"
MANIFEST = "kvjax.tables.v2"
POOL = "initializer.pool"
REMOVED = "removed"
_LONGEST_NAME = 200  # of the 255 bytes that file systems take: whoever copies a checkpoint may add to a name


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as tables.

    Example:
      >>> import kvjax, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     try:
      ...         kvjax.checkpoint.restore(folder)
      ...     except kvjax.checkpoint.CheckpointError as error:
      ...         print(str(error).split(",")[0])
      kvjax: restore: want a checkpoint of tables
    """


class LostBaseError(CheckpointError):
    """A delta whose base is not there, damaged, or of another table.

    Attributes:
      digest: of the manifest of the base.
    """

    def __init__(self, text: str, digest: str) -> None:
        super().__init__(text)
        self.digest = digest

    def __reduce__(self) -> Any:  # of a worker, whose pool would wait for it forever
        return LostBaseError, (str(self), self.digest), self.__dict__


class Damaged(ValueError):
    """What is not as it was written: "want ..., got ..."."""


class Missing(Damaged):
    """A file that is not there."""


# ---- descriptions --------------------------------------------------------------------------------------------


def shards_of(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows and extra arrays of each shard on disk, as a table's kvjax.json says."""
    return meta.get("shards") or [{"rows": meta["rows"], "extras": meta.get("extras", {})}]


def manifest_tables(manifest: Any) -> tuple[dict[str, Any], dict[str, list[tuple[int, str]]]]:
    """What a manifest says of all tables, without its digest, and size and digest of the lists of each.

    Raises:
      Damaged: it is no manifest.
    """
    try:
        contents = manifest["contents"]
        if contents["format"] != MANIFEST:
            raise Damaged(f"want format {MANIFEST!r}, got {contents['format']!r}, which a later kvjax may have written")
        tables = {name: [entry_of(entry) for entry in lists] for name, lists in contents["tables"].items()}
        if not all(map(is_name, tables)):
            raise Damaged("want names of tables, got some that are none")
        return contents, tables
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"want contents and their digest, got {type(error).__name__} of {error}") from error


def entry_of(entry: Any) -> tuple[int, str]:
    """Size and digest of a file, as a list of files has them.

    Raises:
      Damaged: it is something else.
    """
    match entry:
        case [int(size), str(saved)] if size >= 0:
            return size, saved
        case _:
            raise Damaged(f"want the size and digest of a file, got {entry!r:.100}")


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


# ---- chunks --------------------------------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 22


def chunk_rows(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Rows in a chunk of an array of this shape: as many in each, so the last is filled up by fewer rows than there are
    chunks."""
    chunks = -(-shape[0] * row_bytes((dtype, shape[1:])) // _CHUNK_BYTES)
    return -(-shape[0] // max(chunks, 1)) or 1


def chunk_path(chunk: int, shape: tuple[int, ...]) -> str:
    """Where a chunk is below the folder of an array of this shape."""
    return ".".join(["c", str(chunk), *("0" for _ in shape[1:])])
