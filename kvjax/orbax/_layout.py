"""The layout of a table on disk, which anything that reads zarr can open.

    <table>/kvjax.json                      what the table is, and the type of each array
    <table>/initializer.pool/               the rows that keys without a row read as, if it is an array
    <table>/shard-00000-of-00001/keys/      zarr v3 arrays, zstd with checksums, rows sorted by (bucket, key):
        values/ freqs/ versions/ has_slots/ offsets/ slot.<name>/
        pinned/ pending_keys/ pending_counts/ sketch/            only where there is something to keep

``offsets[b]`` is the first row of virtual bucket b, so whoever owns a range of buckets reads one slice. The names
in the tree are percent-encoded. Everything goes below the directory that Orbax hands out; that a checkpoint is
there as a whole or not at all is Orbax's doing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import tensorstore as ts

from kvjax._export import ADMISSION_ARRAYS, Exported, PruneLike, Snapshot, keep_mask, slot_type
from kvjax._generated import Generated
from kvjax._initializers import Initializer, Pool, describe, described
from kvjax._table import Table
from kvjax.ffi import host
from kvjax.orbax import _rules

FORMAT = "kvjax.table.v1"
_SHARD = "shard-00000-of-00001"
# Of what a table is made with, what a restore by name alone needs beside the fields above.
OPTIONS = ("max_capacity", "on_full", "admit", "evict", "count", "constraint")
_ROWS = ("keys", "values", "freqs", "versions", "has_slots")
_POOL = "initializer.pool"
_CHUNK_BYTES = 1 << 22
_FIELDS = ("format", "dim", "dtype", "key_dtype", "initializer", "seed", "trainable", "num_buckets", "num_shards",
           "rows", "last_step", "slots")  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as tables."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk or comes from it: its description and its arrays."""

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def snapshot(self) -> Snapshot:
        slots = {name: self.arrays[f"slot.{name}"] for name, _ in self.meta["slots"]}
        rows = Exported(
            **{name: self.arrays[name] for name in _ROWS},
            pinned=self.arrays.get("pinned", np.zeros(len(self.arrays["keys"]), bool)),
            slots=slots,
            last_step=self.meta["last_step"],
            total=len(self.arrays["keys"]),
        )
        admission = {name: self.arrays[name] for name in ADMISSION_ARRAYS if name in self.arrays}
        return Snapshot(rows, np.zeros(0, np.int64), dict(self.meta["slots"]), admission)


def snapshot(table: Table, prune: PruneLike | None = None) -> Stored:
    """Copies a table out of memory; training may go on while the copy is written."""
    copy = table.snapshot()
    rows, offsets = copy.rows, copy.offsets
    if prune is not None:
        keep = keep_mask(prune, rows)
        offsets = np.concatenate([[0], np.cumsum(keep)])[offsets].astype(np.int64)
        rows = rows.take(keep)
    spec = table.spec
    arrays = {name: getattr(rows, name) for name in _ROWS}
    arrays |= {f"slot.{name}": array for name, array in rows.slots.items()} | {"offsets": offsets}
    extras = {name: array for name, array in (copy.admission | {"pinned": rows.pinned}).items() if array.any()}
    if isinstance(spec.initializer, Pool):
        arrays[_POOL] = spec.initializer.array()
    meta = {
        "format": FORMAT,
        "name": spec.name,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "key_dtype": spec.key_dtype,
        "initializer": describe(spec.initializer),
        "seed": spec.seed,
        "trainable": spec.trainable,
        "rounding": spec.rounding,
        "options": {name: _rules.dump(getattr(spec, name)) for name in OPTIONS},
        "num_buckets": host.NUM_BUCKETS,
        "num_shards": 1,
        "rows": len(rows),
        "last_step": rows.last_step,
        "slots": list(copy.slot_types.items()),  # in the optimizer's order, which is part of what they are
        "extras": {name: [array.dtype.name, array.shape] for name, array in extras.items()},
    }
    return Stored(meta, arrays | extras)


async def write(directory: Path, stored: Stored) -> None:
    """Writes one table below `directory`."""
    folder = directory / _folder(stored.meta["name"])
    await asyncio.gather(*(_write_array(_path(folder, name), a) for name, a in stored.arrays.items()))
    (folder / "kvjax.json").write_text(json.dumps(stored.meta, indent=1, sort_keys=True))


def read(directory: Path, name: str) -> Stored:
    """Reads one table from below `directory`.

    Raises:
      CheckpointError: it is not there, of another format, incomplete or damaged.
    """
    folder = directory / _folder(name)
    meta = read_meta(directory, name)
    per_row = {
        "keys": ("uint64" if meta["key_dtype"].startswith("u") else "int64", ()),
        "values": (meta["dtype"], (meta["dim"],)),
        "freqs": ("int64", ()),
        "versions": ("int64", ()),
        "has_slots": ("bool", ()),
    }
    per_row |= {f"slot.{slot}": slot_type(text) for slot, text in meta["slots"]}
    wanted = {array: (dtype, (meta["rows"], *shape)) for array, (dtype, shape) in per_row.items()}
    wanted |= {array: (dtype, tuple(shape)) for array, (dtype, shape) in meta.get("extras", {}).items()}
    if meta["initializer"]["kind"] == "pool":
        wanted[_POOL] = ("float32", tuple(meta["initializer"]["shape"]))
    try:
        stores = {a: ts.open(_spec(_path(folder, a))).result() for a in wanted}
        for array, (dtype, shape) in wanted.items():
            store = stores[array]
            if store.dtype.name != str(dtype) or tuple(store.shape) != shape:
                raise CheckpointError(
                    f"kvjax: table {name!r}, restore: want {array} {shape} {dtype}, got {tuple(store.shape)} "
                    f"{store.dtype.name} in {folder}; the checkpoint is damaged, restore an older one"
                )
        pending = {array: store.read() for array, store in stores.items()}
        return Stored(meta, {array: future.result() for array, future in pending.items()})
    except CheckpointError:
        raise
    except ValueError as error:  # what TensorStore raises for missing and damaged files
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want whole arrays in {folder}, got: {error}; restore an older checkpoint"
        ) from error


def read_meta(directory: Path, name: str) -> dict[str, Any]:
    path = directory / _folder(name) / "kvjax.json"
    if not path.exists():
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want one of the checkpoint's tables, got none of that name; "
            f"the checkpoint holds {names(directory)}"
        )
    try:
        meta = json.loads(path.read_text())
        for field in _FIELDS:
            meta[field]  # a KeyError names what is missing
        if meta["format"] != FORMAT or meta["num_buckets"] != host.NUM_BUCKETS or meta["num_shards"] != 1:
            raise ValueError(f"format {meta['format']!r} with {meta['num_shards']} shards")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want {path.name} of format {FORMAT!r}, got {error}; "
            "a later kvjax may have written it"
        ) from error
    return meta


def _folder(name: str) -> str:
    """The folder of a table: its name, percent-encoded; "." and ".." too, which would be other folders."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def names(directory: Path) -> list[str]:
    """The tables below `directory`."""
    return sorted(unquote(p.parent.name) for p in directory.glob("*/kvjax.json"))


def initializer(stored: Stored) -> Initializer | Pool | Generated:
    return described(stored.meta["initializer"], stored.arrays.get(_POOL))


def _path(folder: Path, array: str) -> Path:
    """Where an array lies; what all shards share stands beside them."""
    return folder / array if array == _POOL else folder / _SHARD / quote(array, safe="")


def _spec(path: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        # A chunk that is missing is damage, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


async def _write_array(path: Path, array: np.ndarray) -> None:
    row_bytes = max(array.dtype.itemsize * int(np.prod(array.shape[1:])), 1)
    chunk = max(1, min(len(array), _CHUNK_BYTES // row_bytes))
    metadata = {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk, *(max(n, 1) for n in array.shape[1:])]},
        },
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ],
    }
    store = await ts.open(_spec(path) | {"metadata": metadata}, create=True, delete_existing=True)
    if array.size:
        await store.write(array)
