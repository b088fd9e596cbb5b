"""The layout of a table on disk, which anything that reads zarr can open.

    <table>/kvjax.json                      what the table is, and the type of each array
    <table>/initializer.pool/               the rows that keys without a row read as, if it is an array
    <table>/shard-00000-of-00001/keys/      zarr v3 arrays, zstd with checksums, rows sorted by (bucket, key):
        values/ freqs/ versions/ has_slots/ offsets/ slot.<name>/
        pinned/ pending_keys/ pending_counts/ sketch/            only where there is something to keep

Of a table that is spread over several processes, each writes the rows that it has the first copy of, as a shard of its
own; kvjax.json says how many rows each has. The shards of one process are one on disk.

``offsets[b]`` is the first row of virtual bucket b, so whoever owns a range of buckets reads one slice of each shard.
The names in the tree are percent-encoded. Everything goes below the directory that Orbax hands out; that a checkpoint
is there as a whole or not at all is Orbax's doing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh

from kvjax._export import ADMISSION_ARRAYS, Exported, PruneLike, Snapshot, keep_mask
from kvjax._generated import Generated
from kvjax._initializers import Initializer, Pool, describe, described
from kvjax._placement import Placement
from kvjax._processes import gather_json, together
from kvjax._spec import fail
from kvjax._table import Table
from kvjax.ffi import host
from kvjax.orbax import _rules

FORMAT = "kvjax.table.v1"
# Of what a table is made with, what a restore by name alone needs beside the fields above.
OPTIONS = ("max_capacity", "on_full", "admit", "evict", "count", "constraint")
ROWS = ("keys", "values", "freqs", "versions", "has_slots")
POOL = "initializer.pool"
_CHUNK_BYTES = 1 << 22
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
        slots = {name: self.arrays[f"slot.{name}"] for name, _ in self.meta["slots"]}
        rows = Exported(
            **{name: self.arrays[name] for name in ROWS},
            pinned=self.arrays.get("pinned", np.zeros(len(self.arrays["keys"]), bool)),
            slots=slots,
            last_step=self.meta["last_step"],
            total=len(self.arrays["keys"]),
        )
        admission = {name: self.arrays[name] for name in ADMISSION_ARRAYS if name in self.arrays}
        return Snapshot(rows, np.zeros(0, np.int64), dict(self.meta["slots"]), admission)


def snapshot(table: Table, prune: PruneLike | None = None) -> Stored:
    """Copies a table out of memory; training may go on while the copy is written."""
    spec, placement, process = table.spec, spread_over(table), jax.process_index()
    if placement is None and process != 0:
        return Stored({}, {})
    copy, offsets = together(placement, spec.name, "save", lambda: _copy(table, prune))
    rows = copy.rows
    extras = {name: array for name, array in (copy.admission | {"pinned": rows.pinned}).items() if array.any()}
    facts = {
        "rows": len(rows),
        "extras": {name: [array.dtype.name, list(array.shape)] for name, array in extras.items()},
        "last_step": rows.last_step,
        "slots": list(copy.slot_types.items()),  # in the optimizer's order, which is part of what they are
    }
    writers, processes = (placement.writers, placement.processes) if placement else ((0,), (0,))
    by_process = dict(zip(processes, gather_json(placement, facts), strict=True))
    shards = [by_process[p] for p in writers]
    arrays = {name: getattr(rows, name) for name in ROWS}
    arrays |= {f"slot.{name}": array for name, array in rows.slots.items()} | {"offsets": offsets} | extras
    if isinstance(spec.initializer, Pool):
        arrays[POOL] = spec.initializer.array()
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
        "num_shards": len(shards),
        "rows": sum(shard["rows"] for shard in shards),
        "last_step": max(shard["last_step"] for shard in shards),
        "slots": next((shard["slots"] for shard in shards if shard["slots"]), []),
    }
    if spec.placement is not None and spec.placement.partitioner is not None:
        meta["partitioner"] = _rules.name_of(spec.placement.partitioner)
    if len(shards) == 1:
        meta["extras"] = shards[0]["extras"]
    else:
        meta["shards"] = [{key: shard[key] for key in ("rows", "extras")} for shard in shards]
    return Stored(meta, arrays, writers.index(process) if process in writers else None)


def spread_over(table: Table) -> Placement | None:
    """Where a table is of which several processes have parts. Of any other each process has one of its own, and
    process 0 saves it."""
    placement = table.spec.placement
    return placement if placement is not None and len(placement.processes) > 1 else None


def check_saved(tables: Mapping[str, Table]) -> None:
    """Whether each table will be saved by some process.

    Raises:
      ValueError: process 0 lacks a table that is to be saved by it.
    """
    if jax.process_count() == 1:
        return
    everyone = Placement.of(Mesh(np.array(jax.devices()), ("all",)), ("all",))
    alone = gather_json(everyone, sorted(name for name, table in tables.items() if spread_over(table) is None))
    lost = sorted(set().union(*alone) - set(alone[0]))
    if lost:
        raise fail(
            ValueError, lost[0], "save", "a table of process 0, which saves those that are of one process", "none",
            "save it there too, or spread it over the processes",
        )  # fmt: skip


def _copy(table: Table, prune: PruneLike | None) -> tuple[Snapshot, np.ndarray]:
    """What is to be kept of a table, and the first row of each bucket."""
    copy = table.snapshot(once=True)
    if prune is None:
        return copy, copy.offsets
    keep = keep_mask(prune, copy.rows)
    offsets = np.concatenate([[0], np.cumsum(keep)])[copy.offsets].astype(np.int64)
    return dataclasses.replace(copy, rows=copy.rows.take(keep)), offsets


async def write(directory: Path, stored: Stored) -> None:
    """Writes what this process has of one table below `directory`."""
    if stored.shard is None:
        return
    folder = directory / table_folder(stored.meta["name"])
    shard = folder / shard_folder(stored.shard, stored.meta["num_shards"])
    shared = [POOL] if POOL in stored.arrays else []
    own = [name for name in stored.arrays if name not in shared]
    pending = [_write_array(shard / quote(name, safe=""), stored.arrays[name]) for name in own]
    if stored.shard == 0:
        pending += [_write_array(folder / name, stored.arrays[name]) for name in shared]
    await asyncio.gather(*pending)
    if stored.shard == 0:
        (folder / "kvjax.json").write_text(json.dumps(stored.meta, indent=1, sort_keys=True))


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


def initializer(stored: Stored) -> Initializer | Pool | Generated:
    return described(stored.meta["initializer"], stored.arrays.get(POOL))


def store_spec(path: Path) -> dict[str, Any]:
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
    store = await ts.open(store_spec(path) | {"metadata": metadata}, create=True, delete_existing=True)
    if array.size:
        await store.write(array)
