"""Writing: what each process has of a table, copied out of memory and put on disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh

from kvjax._sharded.processes import allgather_json, together
from kvjax._spec.placement import Placement
from kvjax._table.table import Table
from kvjax._values.errors import fail
from kvjax._values.names import is_name
from kvjax._values.prune import PruneLike, keep_mask
from kvjax._values.snapshot import Snapshot
from kvjax.checkpoint._files import flush, listed, write_text
from kvjax.checkpoint._format import (
    FIELDS,
    FORMAT,
    META,
    POOL,
    RULES,
    Stored,
    array_folder,
    array_spec,
    shard_folder,
    shard_list,
    table_folder,
)
from kvjax.checkpoint._rules import dump, name_of
from kvjax.ffi import host
from kvjax.initializers import Pool


def snapshot(name: str, table: Table, prune: PruneLike | None = None) -> Stored:
    """Copies a table out of memory, to be saved under a name; training may go on while the copy is written."""
    spec, placement, process = table.spec, shared_placement(table), jax.process_index()
    check_name(name, spec.name)
    if placement is None and process != 0:
        return Stored({}, {})
    copy, offsets = together(placement, spec.name, "save", lambda: _copy(table, prune))
    rows = copy.rows
    extras = {name: array for name, array in (copy.admission | {"pinned": rows.pinned}).items() if array.any()}
    own = {
        "rows": len(rows),
        "extras": {name: [array.dtype.name, list(array.shape)] for name, array in extras.items()},
        "last_step": rows.last_step,
        "slots": list(copy.slot_types.items()),  # in the optimizer's order, which is part of what they are
    }
    writers, processes = (placement.writers, placement.processes) if placement else ((0,), (0,))
    by_process = dict(zip(processes, allgather_json(placement, own), strict=True))
    shards = [by_process[p] for p in writers]
    arrays = rows.columns() | {"offsets": offsets} | extras
    if "pinned" not in extras:
        del arrays["pinned"]
    if isinstance(spec.initializer, Pool):
        arrays[POOL] = spec.initializer.array()
    meta = {
        "format": FORMAT,
        "name": name,
        "dim": spec.dim,
        **{name: dump(getattr(spec, name)) for name in FIELDS},
        "options": {name: dump(getattr(spec, name)) for name in RULES},
        "num_buckets": host.NUM_BUCKETS,
        "num_shards": len(shards),
        "rows": sum(shard["rows"] for shard in shards),
        "last_step": max(shard["last_step"] for shard in shards),
        "slots": next((shard["slots"] for shard in shards if shard["slots"]), []),
    }
    if spec.placement is not None and spec.placement.partitioner is not None:
        meta["partitioner"] = name_of(spec.placement.partitioner)
    if len(shards) == 1:
        meta["extras"] = shards[0]["extras"]
    else:
        meta["shards"] = [{key: shard[key] for key in ("rows", "extras")} for shard in shards]
    return Stored(meta, arrays, writers.index(process) if process in writers else None)


def check_name(name: Any, table: str) -> None:
    """Whether a table can be saved under a name.

    Raises:
      ValueError: it cannot.
    """
    if not is_name(name):
        raise fail(
            ValueError, table, "save", "a name to save it under, in UTF-8", repr(name), "TableSave({name: table})"
        )


def shared_placement(table: Table) -> Placement | None:
    """Where a table is of which several processes have parts. Of any other each process has one of its own, and
    process 0 saves it."""
    placement = table.spec.placement
    return placement if placement is not None and len(placement.processes) > 1 else None


def check_saved(tables: Mapping[str, Table]) -> None:
    """Whether each table will be saved by some process.

    Raises:
      ValueError: process 0 lacks a table that is to be saved by it.
    """
    place = everyone()
    if place is None:
        return
    alone = allgather_json(place, sorted(name for name, table in tables.items() if shared_placement(table) is None))
    lost = sorted(set().union(*alone) - set(alone[0]))
    if lost:
        raise fail(
            ValueError, lost[0], "save", "a table of process 0, which saves those that are of one process", "none",
            "save it there too, or shard it over the processes",
        )  # fmt: skip


def everyone() -> Placement | None:
    """What all processes have in common, for `together`; None if there is one."""
    return None if jax.process_count() == 1 else Placement.of(Mesh(np.array(jax.devices()), ("all",)), ("all",))


def _copy(table: Table, prune: PruneLike | None) -> tuple[Snapshot, np.ndarray]:
    """What is to be kept of a table, and the first row of each bucket."""
    copy = table.snapshot(once=True)
    if prune is None:
        return copy, copy.offsets
    keep = keep_mask(prune, copy.rows)
    offsets = np.concatenate([[0], np.cumsum(keep)])[copy.offsets].astype(np.int64)
    return dataclasses.replace(copy, rows=copy.rows.take(keep)), offsets


async def write(directory: Path, stored: Stored) -> None:
    """Writes what this process has of one table below `directory`, and lists it; `seal` comes when all have."""
    if stored.shard is None:
        return
    meta, first, arrays = stored.meta, stored.shard == 0, dict(stored.arrays)
    folder, shard = directory / table_folder(meta["name"]), shard_folder(stored.shard, meta["num_shards"])
    pool = {name: arrays.pop(name) for name in [POOL] if name in arrays}
    pending = [_write_array(folder / shard / array_folder(name), array) for name, array in arrays.items()]
    if first:
        pending += [_write_array(folder / name, array) for name, array in pool.items()]
    await asyncio.gather(*pending)
    if first:
        write_text(folder / META, json.dumps(meta, indent=1, sort_keys=True))
    entries = listed(folder, [shard, *([META, *pool] if first else [])])
    write_text(folder / shard_list(stored.shard, meta["num_shards"]), json.dumps(entries, indent=0))
    flush(folder)


async def _write_array(path: Path, array: np.ndarray) -> None:
    spec = array_spec(array.dtype, array.shape) | {"kvstore": {"driver": "file", "path": str(path)}}
    store = await ts.open(spec, create=True, delete_existing=True)
    if array.size:
        await store.write(array)
