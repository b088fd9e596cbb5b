"""Reading: the arrays of a shard on disk, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax._values.snapshot import ADMISSION_COLUMNS, column_types
from kvjax.checkpoint._disk import arrays
from kvjax.checkpoint._disk.arrays import Reading
from kvjax.checkpoint._disk.files import Files
from kvjax.checkpoint._disk.format import FORMAT, POOL, REMOVED, Damaged, array_folder, shard_folder, shards_of
from kvjax.ffi import host

_ALL = slice(None)


def read_pool(files: Files, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """The rows of an initializer that is made of some, by their name.

    Raises:
      Damaged: a file is not there, or not as it was written.
    """
    return at_once(_pool(files, meta))


def check_sizes(files: Files, meta: dict[str, Any], shards: Sequence[Shard]) -> None:
    """Whether the bytes of all arrays of a table are there, whatever they are.

    Raises:
      Damaged: they are not.
    """
    arrays = [array for shard in shards for array in shard.arrays.values()]
    for array in [*arrays, *_pool(files, meta).values()]:
        array.check_sizes()


def _pool(files: Files, meta: dict[str, Any]) -> dict[str, _Array]:
    if meta["initializer"]["kind"] != "pool":
        return {}
    shape = tuple(meta["initializer"]["shape"])
    return {POOL: _Array(files, POOL, np.dtype(np.float32), shape, meta["format"] != FORMAT)}


class _Array:
    """An array on disk, of the dtype and shape that were written: nothing that lies beside it is believed."""

    def __init__(self, files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...], packed: bool) -> None:
        self.files, self.folder, self.dtype, self.shape, self.packed = files, folder, dtype, shape, packed
        self._kept: dict[int, np.ndarray] = {}

    def begin(self, rows: slice = _ALL) -> Callable[[], np.ndarray]:
        """Begins to read some rows; the call that it gives ends it."""
        start, stop, _ = rows.indices(self.shape[0])
        shape = (max(stop - start, 0), *self.shape[1:])
        if 0 in shape:
            return lambda: np.zeros(shape, self.dtype)
        if self.packed:
            from kvjax.checkpoint._disk.packed import PackedReading as Way  # and TensorStore, which is large
        else:
            Way = Reading
        return Way(self.files, self.folder, self.dtype, self.shape, start, stop, self._kept).end

    def check_sizes(self) -> None:
        """Whether its bytes are there, whatever they are.

        Raises:
          Damaged: they are not.
        """
        if self.packed:
            from kvjax.checkpoint._disk.packed import check_sizes as check
        else:
            check = arrays.check_sizes
        check(self.files, self.folder, self.dtype, self.shape)


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
        self.arrays = self.rows | extras | {"offsets": self.offsets}

    def read_offsets(self) -> np.ndarray:
        """The first row of each bucket."""
        (offsets,) = at_once({"offsets": self.offsets}).values()
        if offsets[0] != 0 or offsets[-1] != self.num_rows or (np.diff(offsets) < 0).any():
            raise Damaged(f"want offsets from 0 to {self.num_rows}, got {offsets[0]} to {offsets[-1]}")
        return offsets


def at_once(stores: dict[str, _Array], slices: Sequence[slice] = (_ALL,)) -> dict[str, np.ndarray]:
    """Some rows of each array; while the files of one are read, others are decoded."""
    pending = {name: [store.begin(rows) for rows in slices] for name, store in stores.items()}
    return {name: _concat([end() for end in ends]) for name, ends in pending.items()}


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
