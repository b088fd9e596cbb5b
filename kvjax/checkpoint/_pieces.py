"""Pieces: the rows of a table on disk, some buckets at a time, for what need not have all of them in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._table.contents import buckets_of, by_bucket
from kvjax._values.snapshot import WAITING_COLUMNS, column_types, concat, take
from kvjax.checkpoint._catalog import Catalog
from kvjax.checkpoint._chain import Chain, Link
from kvjax.checkpoint._format import REMOVED, Damaged
from kvjax.checkpoint._overlay import among, overlaid_counts
from kvjax.checkpoint._read import Shard, at_once, joined, read_pool
from kvjax.ffi import host

PIECE_BYTES = 1 << 26
"""Of rows that are in memory at once."""


class Pieces:
    """The rows of one table, by ranges of buckets; those of a delta with what it builds on.

    Args:
      checkpoint: the catalog or the chain of it.
      name: of the table.

    Attributes:
      meta: what the table is, as `Catalog.open` gives it.
      offsets: ``(buckets + 1,)`` int64, the first row of each bucket.
      row_bytes: of all columns of a row.

    Raises:
      CheckpointError: it is not there, or damaged; so do its methods.
    """

    def __init__(self, checkpoint: Catalog | Chain, name: str) -> None:
        chain = checkpoint if isinstance(checkpoint, Chain) else Chain(checkpoint)
        self._layers = [_Layer(link, name) for link in chain.links(name)]
        last = self._layers[-1].meta
        slots = next((layer.meta["slots"] for layer in self._layers if layer.meta["slots"]), [])
        self.meta: dict[str, Any] = {field: last[field] for field in last if field != "delta"} | {"slots": slots}
        self.types = column_types(last["dim"], jnp.dtype(last["dtype"]), last["key_dtype"], dict(slots))
        self.row_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.types.values())
        self.offsets: np.ndarray = np.sum([layer.offsets for layer in self._layers], axis=0)
        if len(self._layers) > 1:
            self.offsets = self._counted()
            self.meta["rows"] = int(self.offsets[-1])

    def _counted(self) -> np.ndarray:
        """The offsets of rows of which some take the place of others."""
        counts = np.zeros(host.NUM_BUCKETS, np.int64)
        for first, last in cuts([self], 8):  # which has bounds of them by now
            counts += np.bincount(buckets_of(self.between(first, last, ())["keys"]), minlength=host.NUM_BUCKETS)
        return np.concatenate([[0], np.cumsum(counts)])

    def between(self, first: int, last: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The columns of the rows of the buckets first..last - 1, sorted by (bucket, key).

        Args:
          first: bucket.
          last: bucket after them.
          names: of the columns; by default all. There are always keys.
        """
        wanted = {name: kind for name, kind in self.types.items() if names is None or name in ("keys", *names)}
        columns: dict[str, np.ndarray] = {}
        for layer in self._layers:
            above = layer.between(first, last, list(wanted))
            for name, (dtype, shape) in wanted.items():  # pins and slots that this layer knew none of
                above.setdefault(name, np.zeros((len(above["keys"]), *shape), dtype))
            if not columns:
                columns = above
            elif layer.touched(above["keys"]).size:
                stay = ~among(columns["keys"].view(np.int64), layer.touched(above["keys"]))
                columns = concat([take(columns, stay), {name: above[name] for name in columns}])
        return take(columns, by_bucket(columns["keys"])[0]) if len(self._layers) > 1 else columns

    def extras(self) -> dict[str, np.ndarray]:
        """What admission knows of keys without a row, whole; waiting keys are sorted by (bucket, key)."""
        counts: dict[str, np.ndarray] = {}
        for layer in self._layers:
            above, counts_of_all = layer.counts(), layer.meta.get("delta", {}).get("counts_of_all", True)
            keys = np.zeros(0, np.int64) if counts_of_all else layer.touched(layer.all_keys())
            counts.pop("sketch", None)  # of which a delta has all
            counts = overlaid_counts(counts, above, keys, counts_of_all)
        if "pending_keys" in counts:
            counts |= take({name: counts[name] for name in WAITING_COLUMNS}, by_bucket(counts["pending_keys"])[0])
        return counts

    def pool(self) -> dict[str, np.ndarray]:
        """The rows of the initializer, by their name; empty if it is none of rows."""
        return self._layers[-1].pool()


class _Layer:
    """The rows of a table in one checkpoint of a chain."""

    def __init__(self, link: Link, name: str) -> None:
        self.meta, self._files, self._catalog, self._name = link.meta, link.files, link.catalog, name
        self._shards = [Shard(link.files, link.meta, i) for i in range(link.meta["num_shards"])]
        self._by_shard, removed = link.catalog.checked(
            name,
            lambda: (
                [shard.read_offsets() for shard in self._shards],
                [at_once(shard.removed).get(REMOVED, np.zeros(0, np.int64)) for shard in self._shards],
            ),
        )
        self.removed = np.concatenate(removed)
        self.offsets: np.ndarray = np.sum(self._by_shard, axis=0)

    def between(self, first: int, last: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self._catalog.checked(self._name, lambda: self._between(first, last, names))

    def _between(self, first: int, last: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        parts: list[dict[str, np.ndarray]] = []
        for shard, offsets in zip(self._shards, self._by_shard, strict=True):
            rows = slice(int(offsets[first]), int(offsets[last]))
            part = at_once({name: array for name, array in shard.rows.items() if name in names}, [rows])
            if "pinned" in names:
                part.setdefault("pinned", np.zeros(rows.stop - rows.start, bool))
            parts.append(part)
        columns = concat(parts)
        if len(parts) > 1:
            columns = take(columns, by_bucket(columns["keys"])[0])
        _check_sorted(columns["keys"], first, last)
        return columns

    def all_keys(self) -> np.ndarray:
        return self.between(0, host.NUM_BUCKETS, ["keys"])["keys"]

    def touched(self, keys: np.ndarray) -> np.ndarray:
        """Which keys of the checkpoints before are not as they were: these and those that were removed, sorted."""
        return np.unique(np.concatenate([keys.view(np.int64), self.removed]))

    def pool(self) -> dict[str, np.ndarray]:
        return self._catalog.checked(self._name, lambda: read_pool(self._files, self.meta))

    def counts(self) -> dict[str, np.ndarray]:
        return self._catalog.checked(self._name, lambda: joined([at_once(shard.extras) for shard in self._shards]))


def cuts(tables: Sequence[Pieces], row_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of buckets of which tables have, together, rows of about `PIECE_BYTES`.

    Args:
      tables: of which they are.
      row_bytes: that a row has; by default those of all columns.
    """
    total: np.ndarray = np.sum([table.offsets * (row_bytes or table.row_bytes) for table in tables], axis=0)
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
    words, buckets = np.ascontiguousarray(keys).view(np.int64), buckets_of(keys)
    after = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (words[1:] > words[:-1]))
    if len(words) and not (after.all() and buckets[0] >= first and buckets[-1] < last):
        raise Damaged(f"want distinct keys by (bucket, key) in buckets {first} to {last - 1}, got others")
