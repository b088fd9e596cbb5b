"""Reads of a checkpoint what one process needs: all of it, ranges of virtual buckets, or the keys of some owners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from kvjax._export import ADMISSION_ARRAYS, slot_type
from kvjax._placement import Placement
from kvjax.ffi import host
from kvjax.orbax._layout import (
    POOL,
    CheckpointError,
    Stored,
    read_meta,
    shard_folder,
    shards_of,
    store_spec,
    table_folder,
)

# Keys of which the owners are asked at once.
_PIECE = 1 << 18


def read(directory: Path, name: str, placement: Placement | None = None) -> Stored:
    """Reads of one table below `directory` the rows that this process owns.

    Args:
      directory: of the checkpoint.
      name: of the table in it.
      placement: where its rows shall be; None for all here.

    Raises:
      CheckpointError: it is not there, of another format, incomplete or damaged.
    """
    meta = read_meta(directory, name)
    folder = directory / table_folder(name)
    try:
        pool = {}
        if meta["initializer"]["kind"] == "pool":
            pool = {POOL: _open(folder / POOL, "float32", meta["initializer"]["shape"]).read()}
        shards = [_Shard(folder, meta, i) for i in range(meta["num_shards"])]
        parts = [shard.read(placement) for shard in shards]
        return Stored(meta, _joined(parts) | {name: future.result() for name, future in pool.items()})
    except _Damaged as error:
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: {error} in {folder}; the checkpoint is damaged, restore an older one"
        ) from error
    except ValueError as error:  # what TensorStore raises for missing and damaged files
        if isinstance(error, CheckpointError) or str(error).startswith("kvjax: "):
            raise
        raise CheckpointError(
            f"kvjax: table {name!r}, restore: want whole arrays in {folder}, got: {error}; restore an older checkpoint"
        ) from error


class _Damaged(ValueError):
    """What is not as it was written: "want ..., got ..."."""


def _open(path: Path, dtype: Any, shape: Any) -> Any:
    store = ts.open(store_spec(path)).result()
    if store.dtype.name != str(dtype) or tuple(store.shape) != tuple(shape):
        got = f"{tuple(store.shape)} {store.dtype.name}"
        raise _Damaged(f"want {path.name} {tuple(shape)} {dtype}, got {got}")
    return store


class _Shard:
    """One shard on disk: its arrays, opened and of the shapes that were written."""

    def __init__(self, folder: Path, meta: dict[str, Any], number: int):
        shard = shards_of(meta)[number]
        per_row = {
            "keys": ("uint64" if meta["key_dtype"].startswith("u") else "int64", ()),
            "values": (meta["dtype"], (meta["dim"],)),
            "freqs": ("int64", ()),
            "versions": ("int64", ()),
            "has_slots": ("bool", ()),
        }
        per_row |= {f"slot.{slot}": slot_type(text) for slot, text in meta["slots"]}
        wanted = {array: (dtype, (shard["rows"], *shape)) for array, (dtype, shape) in per_row.items()}
        wanted |= {array: (dtype, tuple(shape)) for array, (dtype, shape) in shard["extras"].items()}
        wanted["offsets"] = ("int64", (host.NUM_BUCKETS + 1,))
        self.folder = folder / shard_folder(number, meta["num_shards"])
        stores = {array: _open(self.folder / quote(array, safe=""), *kind) for array, kind in wanted.items()}
        self.rows = {array: store for array, store in stores.items() if array in (*per_row, "pinned")}
        self.extras = {array: store for array, store in stores.items() if array in ADMISSION_ARRAYS}
        self.offsets = stores["offsets"]

    def read(self, placement: Placement | None) -> dict[str, np.ndarray]:
        if placement is None or placement.num_shards == len({shard.shard for shard in placement.local}):
            return _at_once(self.rows | self.extras, [slice(None)])
        pending = {name: store for name, store in self.extras.items() if name != "sketch"}
        if pending:
            pending = _owned(pending, "pending_keys", placement)
        if placement.partitioner is not None:
            sketch = _at_once({name: self.extras[name] for name in self.extras if name == "sketch"}, [slice(None)])
            return _owned(self.rows, "keys", placement) | pending | sketch
        ranges = list(_buckets(placement))
        offsets = self.offsets.read().result()
        rows = self.rows["keys"].shape[0]
        if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
            raise _Damaged(f"want offsets from 0 to {rows}, got {offsets[0]} to {offsets[-1]}")
        out = _at_once(self.rows, [slice(int(offsets[a]), int(offsets[b])) for a, b in ranges]) | pending
        if not _is_here(placement, out["keys"]).all():
            raise _Damaged("want keys where the offsets say, got keys of other buckets")
        if "sketch" in self.extras:
            out["sketch"] = self._cells(ranges)
        return out

    def _cells(self, ranges: list[tuple[int, int]]) -> np.ndarray:
        """The cells of the sketch that belong to some buckets; the others are 0."""
        store = self.extras["sketch"]
        width = store.shape[0] // host.NUM_BUCKETS
        cells = np.zeros(store.shape, np.uint16)
        for a, b in ranges:
            cells[a * width : b * width] = store[a * width : b * width].read().result()
        return cells


def _buckets(placement: Placement) -> Iterator[tuple[int, int]]:
    """The ranges of virtual buckets that this process owns."""
    numbers = sorted({shard.shard for shard in placement.local})
    while numbers:
        first = last = numbers.pop(0)
        while numbers and numbers[0] == last + 1:
            last = numbers.pop(0)
        yield placement.buckets(first, last)


def _at_once(stores: dict[str, Any], slices: list[slice]) -> dict[str, np.ndarray]:
    pending = {name: [store[piece].read() for piece in slices] for name, store in stores.items()}
    return {name: _concatenated([f.result() for f in futures]) for name, futures in pending.items()}


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _owned(stores: dict[str, Any], keys: str, placement: Placement) -> dict[str, np.ndarray]:
    """The rows of the arrays whose keys this process owns, found piece by piece."""
    n = stores[keys].shape[0]
    parts = [{name: np.zeros((0, *store.shape[1:]), store.dtype.numpy_dtype) for name, store in stores.items()}]
    for start in range(0, n, _PIECE):
        piece = slice(start, min(n, start + _PIECE))
        mine = _is_here(placement, stores[keys][piece].read().result())
        if mine.any():
            parts.append({name: array[mine] for name, array in _at_once(stores, [piece]).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in stores}


def _is_here(placement: Placement, keys: np.ndarray) -> np.ndarray:
    """Which keys this process owns: ``(n,)`` bool."""
    return np.isin(placement.owners(keys.view(np.int64)), [shard.shard for shard in placement.local])


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of several shards as one. A shard that lacks an extra array has nothing to keep there."""
    if len(parts) == 1:
        return parts[0]
    if any("pinned" in part for part in parts):
        parts = [{"pinned": np.zeros(len(part["keys"]), bool)} | part for part in parts]
    out = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        arrays = [part[name] for part in parts if name in part]
        # Of the cells of a sketch, each is used by one shard alone.
        out[name] = np.max(arrays, axis=0) if name == "sketch" else np.concatenate(arrays)
    return out
