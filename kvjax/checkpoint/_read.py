"""Reading: what one process needs of a table on disk, all of it or the rows that it owns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from kvjax._spec.placement import Placement
from kvjax._values.snapshot import ADMISSION_COLUMNS, column_types, concat
from kvjax.checkpoint._format import POOL, CheckpointError, Stored, shard_folder, shards_of, store_spec, table_folder
from kvjax.ffi import host

# Keys of which the owners are asked at once.
_PIECE = 1 << 18


def read(directory: Path, name: str, meta: dict[str, Any], placement: Placement | None = None) -> Stored:
    """Reads of one table below `directory` the rows that this process owns.

    Args:
      directory: of the checkpoint.
      name: of the table in it.
      meta: as `read_meta` gives it.
      placement: where its rows shall be; None for all here.

    Raises:
      CheckpointError: it is not there, of another format, incomplete or damaged.
    """
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
        types = column_types(meta["dim"], jnp.dtype(meta["dtype"]), meta["key_dtype"], dict(meta["slots"]))
        del types["pinned"]  # which is an extra
        wanted = {name: (dtype, (shard["rows"], *shape)) for name, (dtype, shape) in types.items()}
        wanted |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in shard["extras"].items()}
        wanted["offsets"] = (np.dtype(np.int64), (host.NUM_BUCKETS + 1,))
        self.folder = folder / shard_folder(number, meta["num_shards"])
        stores = {array: _open(self.folder / quote(array, safe=""), *kind) for array, kind in wanted.items()}
        self.rows = {array: store for array, store in stores.items() if array in (*types, "pinned")}
        self.extras = {array: store for array, store in stores.items() if array in ADMISSION_COLUMNS}
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
        ranges = list(_shards(placement))
        buckets = [placement.buckets(first, last) for first, last in ranges]
        offsets = self.offsets.read().result()
        rows = self.rows["keys"].shape[0]
        if offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
            raise _Damaged(f"want offsets from 0 to {rows}, got {offsets[0]} to {offsets[-1]}")
        out = _at_once(self.rows, [slice(int(offsets[a]), int(offsets[b])) for a, b in buckets]) | pending
        if not placement.owned(out["keys"]).all():
            raise _Damaged("want keys where the offsets say, got keys of other buckets")
        if "sketch" in self.extras:
            out["sketch"] = self._cells(placement, ranges)
        return out

    def _cells(self, placement: Placement, ranges: list[tuple[int, int]]) -> np.ndarray:
        """The cells of the sketch that some shards use; the others are 0."""
        store = self.extras["sketch"]
        cells = np.zeros(store.shape, np.uint16)
        for first, last in ranges:
            own = placement.cells(first, last, len(cells))
            cells[own] = store[own].read().result()
        return cells


def _shards(placement: Placement) -> Iterator[tuple[int, int]]:
    """The shards of this process, as ranges first..last."""
    numbers = sorted({shard.shard for shard in placement.local})
    while numbers:
        first = last = numbers.pop(0)
        while numbers and numbers[0] == last + 1:
            last = numbers.pop(0)
        yield first, last


def _at_once(stores: dict[str, Any], slices: list[slice]) -> dict[str, np.ndarray]:
    pending = {name: [store[piece].read() for piece in slices] for name, store in stores.items()}
    return {name: _concat([f.result() for f in futures]) for name, futures in pending.items()}


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _owned(stores: dict[str, Any], keys: str, placement: Placement) -> dict[str, np.ndarray]:
    """The rows of the arrays whose keys this process owns, found piece by piece."""
    n = stores[keys].shape[0]
    parts = [{name: np.zeros((0, *store.shape[1:]), store.dtype.numpy_dtype) for name, store in stores.items()}]
    for start in range(0, n, _PIECE):
        piece = slice(start, min(n, start + _PIECE))
        mine = placement.owned(stores[keys][piece].read().result())
        if mine.any():
            parts.append({name: array[mine] for name, array in _at_once(stores, [piece]).items()})
    return concat(parts)


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
