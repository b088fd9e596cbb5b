"""Pieces: the rows of a table on disk, some buckets at a time, for what need not have all of them in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax._values.snapshot import ADMISSION_COLUMNS, concat, take
from kvjax.checkpoint._catalog import Catalog
from kvjax.checkpoint._format import Damaged
from kvjax.checkpoint._read import Shard, at_once, joined
from kvjax.ffi import host

PIECE_BYTES = 1 << 26
"""Of rows that are in memory at once."""


class Pieces:
    """The rows of one table, by ranges of buckets.

    Args:
      catalog: of the checkpoint.
      name: of the table.

    Raises:
      CheckpointError: it is not there, or damaged; so do its methods.
    """

    def __init__(self, catalog: Catalog, name: str) -> None:
        self.catalog, self.name = catalog, name
        self.meta, files = catalog.open(name)
        self.shards = [Shard(files, self.meta, i) for i in range(self.meta["num_shards"])]
        self.by_shard = catalog.checked(name, lambda: [shard.read_offsets() for shard in self.shards])
        self.offsets: np.ndarray = np.sum(self.by_shard, axis=0)
        self.row_bytes = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in self.shards[0].rows.values())

    def between(self, first: int, last: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The columns of the rows of the buckets first..last - 1, sorted by (bucket, key).

        Args:
          first: bucket.
          last: bucket after them.
          names: of the columns; by default all. There are always keys.
        """
        return self.catalog.checked(self.name, lambda: self._between(first, last, names))

    def _between(self, first: int, last: int, names: Sequence[str] | None) -> dict[str, np.ndarray]:
        parts: list[dict[str, np.ndarray]] = []
        for shard, offsets in zip(self.shards, self.by_shard, strict=True):
            rows = slice(int(offsets[first]), int(offsets[last]))
            stores = {name: array for name, array in shard.rows.items() if names is None or name in ("keys", *names)}
            part = at_once(stores, [rows])
            if (names is None or "pinned" in names) and "pinned" not in part:
                part["pinned"] = np.zeros(rows.stop - rows.start, bool)
            parts.append(part)
        columns = concat(parts)
        if len(parts) > 1:
            columns = take(columns, order(columns["keys"]))
        _check_sorted(columns["keys"], first, last)
        return columns

    def extras(self) -> dict[str, np.ndarray]:
        """What admission knows of keys without a row, whole, sorted by (bucket, key)."""
        found = self.catalog.checked(self.name, lambda: joined([at_once(shard.extras) for shard in self.shards]))
        found = {name: array for name, array in found.items() if name in ADMISSION_COLUMNS}
        if len(self.shards) > 1 and "pending_keys" in found:
            by_key = order(found["pending_keys"])
            found |= {name: found[name][by_key] for name in ("pending_keys", "pending_counts")}
        return found


def order(keys: np.ndarray) -> np.ndarray:
    """Where keys are that come sorted by (bucket, key)."""
    words = np.ascontiguousarray(keys).view(np.int64)
    return np.lexsort((words, host.owners(words, host.NUM_BUCKETS)))


def cuts(tables: Sequence[Pieces]) -> Iterator[tuple[int, int]]:
    """Ranges of buckets of which tables have, together, rows of about `PIECE_BYTES`."""
    total = np.sum([table.offsets * table.row_bytes for table in tables], axis=0)
    first = 0
    while first < host.NUM_BUCKETS:
        last = int(np.searchsorted(total, total[first] + PIECE_BYTES, side="right")) - 1
        last = min(max(last, first + 1), host.NUM_BUCKETS)
        yield first, last
        first = last


def _check_sorted(keys: np.ndarray, first: int, last: int) -> None:
    """Whether the keys of a piece are distinct, sorted, and of its buckets.

    Raises:
      Damaged: they are not.
    """
    words = np.ascontiguousarray(keys).view(np.int64)
    buckets = host.owners(words, host.NUM_BUCKETS)
    after = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (words[1:] > words[:-1]))
    if len(words) and not (after.all() and buckets[0] >= first and buckets[-1] < last):
        raise Damaged(f"want distinct keys by (bucket, key) in buckets {first} to {last - 1}, got others")
