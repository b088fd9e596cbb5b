"""Reading: what one process needs of a table on disk, all of it or the rows that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._values.snapshot import ADMISSION_COLUMNS, column_types, concat
from kvjax.checkpoint._arrays import Reading
from kvjax.checkpoint._files import Files
from kvjax.checkpoint._format import FORMAT, POOL, REMOVED, Damaged, array_folder, shard_folder, shards_of
from kvjax.checkpoint._stored import Stored
from kvjax.ffi import host

if TYPE_CHECKING:
    from kvjax._spec.placement import Placement

# Keys of which the owners are asked at once.
_PIECE = 1 << 18
_ALL = slice(None)


def read(meta: dict[str, Any], files: Files, placement: Placement | None = None) -> Stored:
    """Reads of one table the rows that this process owns.

    Args:
      meta: what it is, as `Catalog.open` gives it.
      files: of the table.
      placement: where its rows shall be; None for all here.

    Raises:
      Damaged: a file is not there, or not as it was written.
    """
    shards = [Shard(files, meta, i) for i in range(meta["num_shards"])]
    arrays = joined([shard.read(placement) for shard in shards])
    return Stored(meta, arrays | read_pool(files, meta))


def read_pool(files: Files, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """The rows of an initializer that is made of some, by their name.

    Raises:
      Damaged: as `read`.
    """
    if meta["initializer"]["kind"] != "pool":
        return {}
    shape = tuple(meta["initializer"]["shape"])
    return at_once({POOL: _Array(files, POOL, np.dtype(np.float32), shape, meta["format"] != FORMAT)})


class _Array:
    """An array on disk, of the dtype and shape that were written: nothing that lies beside it is believed."""

    def __init__(self, files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...], packed: bool) -> None:
        self.files, self.folder, self.dtype, self.shape, self.packed = files, folder, dtype, shape, packed

    def begin(self, rows: slice = _ALL) -> Callable[[], np.ndarray]:
        """Begins to read some rows; the call that it gives ends it."""
        start, stop, _ = rows.indices(self.shape[0])
        shape = (max(stop - start, 0), *self.shape[1:])
        if 0 in shape:
            return lambda: np.zeros(shape, self.dtype)
        if self.packed:
            from kvjax.checkpoint._packed import PackedReading as Way  # and TensorStore, which is large
        else:
            Way = Reading
        return Way(self.files, self.folder, self.dtype, self.shape, start, stop).end


class Shard:
    """One shard on disk."""

    def __init__(self, files: Files, meta: dict[str, Any], number: int) -> None:
        shard, folder = shards_of(meta)[number], shard_folder(number, meta["num_shards"])

        def array(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Array:
            return _Array(files, f"{folder}/{array_folder(name)}", dtype, shape, meta["format"] != FORMAT)

        types = column_types(meta["dim"], np.dtype(meta["dtype"]), meta["key_dtype"], dict(meta["slots"]))
        del types["pinned"]  # which is an extra
        extras = {name: array(name, np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in shard["extras"].items()}
        self.num_rows: int = shard["rows"]
        self.rows = {name: array(name, dtype, (self.num_rows, *shape)) for name, (dtype, shape) in types.items()}
        self.rows |= {name: store for name, store in extras.items() if name == "pinned"}
        self.extras = {name: store for name, store in extras.items() if name in ADMISSION_COLUMNS}
        self.removed = {name: store for name, store in extras.items() if name == REMOVED}
        self.offsets = array("offsets", np.dtype(np.int64), (host.NUM_BUCKETS + 1,))

    def read(self, placement: Placement | None) -> dict[str, np.ndarray]:
        return self._read(placement) | at_once(self.removed)

    def _read(self, placement: Placement | None) -> dict[str, np.ndarray]:
        if placement is None or placement.num_shards == len({shard.shard for shard in placement.local}):
            return at_once(self.rows | self.extras)
        waiting = {name: store for name, store in self.extras.items() if name != "sketch"}
        pending = _owned(waiting, "pending_keys", placement) if waiting else {}
        if placement.partitioner is not None:
            sketch = at_once({name: self.extras[name] for name in self.extras if name == "sketch"})
            return _owned(self.rows, "keys", placement) | pending | sketch
        ranges = list(_shards(placement))
        buckets = [placement.buckets(first, last) for first, last in ranges]
        offsets = self.read_offsets()
        out = at_once(self.rows, [slice(int(offsets[a]), int(offsets[b])) for a, b in buckets]) | pending
        if not placement.owned(out["keys"]).all():
            raise Damaged("want keys where the offsets say, got keys of other buckets")
        if "sketch" in self.extras:
            out["sketch"] = self._cells(placement, ranges)
        return out

    def read_offsets(self) -> np.ndarray:
        """The first row of each bucket."""
        (offsets,) = at_once({"offsets": self.offsets}).values()
        if offsets[0] != 0 or offsets[-1] != self.num_rows or (np.diff(offsets) < 0).any():
            raise Damaged(f"want offsets from 0 to {self.num_rows}, got {offsets[0]} to {offsets[-1]}")
        return offsets

    def _cells(self, placement: Placement, ranges: list[tuple[int, int]]) -> np.ndarray:
        """The cells of the sketch that some shards use; the others are 0."""
        store = self.extras["sketch"]
        cells = np.zeros(store.shape, np.uint16)
        for first, last in ranges:
            own = placement.cells(first, last, len(cells))
            cells[own] = store.begin(own)()
        return cells


def _shards(placement: Placement) -> Iterator[tuple[int, int]]:
    """The shards of this process, as ranges first..last."""
    numbers = sorted({shard.shard for shard in placement.local})
    while numbers:
        first = last = numbers.pop(0)
        while numbers and numbers[0] == last + 1:
            last = numbers.pop(0)
        yield first, last


def at_once(stores: dict[str, _Array], slices: Sequence[slice] = (_ALL,)) -> dict[str, np.ndarray]:
    """Some rows of each array; while the files of one are read, others are decoded."""
    pending = {name: [store.begin(rows) for rows in slices] for name, store in stores.items()}
    return {name: _concat([end() for end in ends]) for name, ends in pending.items()}


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _owned(stores: dict[str, _Array], keys: str, placement: Placement) -> dict[str, np.ndarray]:
    """The rows of the arrays whose keys this process owns, found piece by piece."""
    n = stores[keys].shape[0]
    parts = [{name: np.zeros((0, *store.shape[1:]), store.dtype) for name, store in stores.items()}]
    for start in range(0, n, _PIECE):
        piece = slice(start, min(n, start + _PIECE))
        mine = placement.owned(stores[keys].begin(piece)())
        if mine.any():
            parts.append({name: array[mine] for name, array in at_once(stores, [piece]).items()})
    return concat(parts)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
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
