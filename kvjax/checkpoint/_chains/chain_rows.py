"""Rows of a chain: a table on disk, some buckets at a time, for code that need not have all of it in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats import source
from kvjax._formats.source import Source, Type, concat, offsets_of, row_bytes
from kvjax._keys.buckets import buckets_of, by_bucket
from kvjax._values.behind import LAST_COLUMN, can_be_behind, warn_if_saved_behind
from kvjax._values.exported import ROW_COLUMNS, SLOT
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import NONE, among, overlaid_counts
from kvjax._values.snapshot import Columns, column_types, joined_admission, take, waiting_of
from kvjax.checkpoint._chains.chain import Chain, Link
from kvjax.checkpoint._disk.format import REMOVED, Damaged
from kvjax.checkpoint._disk.read_shard import Shard, at_once, check_sizes, read_pool
from kvjax.checkpoint._disk.rules import shared_key
from kvjax.ffi import host


class ChainRows:
    """The rows of one table of a checkpoint, by ranges of buckets; those of a delta with what it builds on.

    Args:
      chain: of the checkpoint.
      name: of the table.
      since: digests of a checkpoint: if deltas build on that, only what has changed since.

    Attributes:
      name: of the table.
      meta: what the table is, as `Catalog.open` gives it, but for the number of its rows.
      since: the digest of the checkpoint since which these are the changes; None if these are all rows.
      types: dtype and shape of what a row has in each column.
      bounds: ``(buckets + 1,)`` int64: from one bucket to another there are at most so many rows.
      row_bytes: of all columns of a row.

    Raises:
      CheckpointError: it is not there, or damaged; so do its methods.
    """

    def __init__(self, chain: Chain, name: str, since: Collection[str] = ()) -> None:
        self.name = name
        self._links = [_LinkRows(link, name) for link in chain.links(name, since)]
        self.since: str | None = self._links[0].meta.get("delta", {}).get("since")
        self.meta: dict[str, Any] = _meta_of([link.meta for link in self._links])
        self.types = _types_of(self.meta)
        self.row_bytes = sum(map(row_bytes, self.types.values()))
        self.bounds: np.ndarray = np.sum([link.offsets for link in self._links], axis=0)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """The first row of each bucket, ``(buckets + 1,)`` int64. Of a chain, whose rows take the place of others, the
        first call reads all keys."""
        if len(self._links) == 1:
            return self.bounds
        counts = np.zeros(host.NUM_BUCKETS, np.int64)
        for first, last in cuts([self], 8):
            counts += np.bincount(buckets_of(self.between(first, last, ())["keys"]), minlength=host.NUM_BUCKETS)
        return offsets_of(counts)

    @property
    def num_rows(self) -> int:
        """How many there are; as `offsets`."""
        return int(self.offsets[-1])

    @property
    def shared_key(self) -> int | None:
        """The key whose row unadmitted keys share; None if they share none."""
        return shared_key(self.meta.get("options", {}).get("admit"))

    def between(self, first: int, last: int, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """The columns of the rows of the buckets first..last - 1, sorted by (bucket, key).

        Args:
          first: bucket.
          last: bucket after them.
          names: of the columns; by default all. There are always keys.
        """
        wanted = {name: kind for name, kind in self.types.items() if names is None or name in ("keys", *names)}
        parts = [link.between(first, last, list(wanted)) for link in self._links]
        columns = _overlaid(parts, wanted)
        return take(columns, by_bucket(columns["keys"])[0]) if len(parts) > 1 else columns

    def warn_if_behind(self, op: str) -> None:
        """Says that a call takes rows as they were saved, where steps have left some of them out."""
        if can_be_behind(dict(self.meta["slots"])):
            names = [LAST_COLUMN, "has_slots"]
            width = sum(row_bytes(self.types[name]) for name in ("keys", *names))
            warn_if_saved_behind(self.name, op, (self.between(*some, names) for some in cuts([self], width)))

    def source(self, progress: Callable[[int], object] | None = None) -> Source:
        """The rows as a `Source`, sorted by (bucket, key).

        Args:
          progress: is called with the bytes of each piece that has been read.
        """
        kinds = {name: self.types[name] for name in [*ROW_COLUMNS, *(n for n in self.types if n.startswith(SLOT))]}
        offsets = self.offsets

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            if start >= stop:
                return {name: np.zeros((0, *kinds[name][1]), kinds[name][0]) for name in names}
            first = int(np.searchsorted(offsets, start, "right")) - 1
            last = int(np.searchsorted(offsets, stop, "left"))
            own = slice(start - int(offsets[first]), stop - int(offsets[first]))
            found = {name: array[own] for name, array in self.between(first, last, names).items() if name in names}
            if progress is not None:
                progress(sum(array.nbytes for array in found.values()))
            return {name: found[name] for name in names}

        return Source(kinds, self.num_rows, read, {name: str(self.meta[name]) for name in ("last_step", "key_dtype")})

    def check_sizes(self) -> None:
        """Whether there are as many bytes on the disk as the rows have, before memory is taken for them."""
        for link in self._links:
            link.check_sizes()

    def check(self) -> None:
        """Whether a restore would take all of it, whose files are as they were written."""
        self.check_sizes()
        self.counts()
        self.pool()
        for first, last in cuts([self]):
            self.between(first, last, ["freqs", "versions", "has_slots", "pinned"])

    def removed(self) -> np.ndarray:
        """Keys ``(m,)`` int64 that went, and are not there again, if these are changes; sorted by (bucket, key)."""
        parts = [NONE]
        for first, last in cuts([self], 8):
            gone = functools.reduce(np.union1d, [link.removed_between(first, last) for link in self._links])
            if len(gone):
                gone = np.setdiff1d(gone, as_int64(self.between(first, last, ())["keys"]), assume_unique=True)
                parts.append(gone[by_bucket(gone)[0]])
        return np.concatenate(parts)

    def counts(self) -> dict[str, np.ndarray]:
        """What admission knows of keys without a row, whole; waiting keys are sorted by (bucket, key)."""
        counts = overlaid_counts(_counts_of(link.meta, link.counts(), link.all_keys) for link in self._links)
        if "pending_keys" in counts:
            counts |= take(waiting_of(counts), by_bucket(counts["pending_keys"])[0])
        return counts

    def pool(self) -> dict[str, np.ndarray]:
        """The rows of the initializer, by their name; empty if it is none of rows."""
        return self._links[-1].pool()


class _LinkRows:
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
        removed = np.concatenate(removed)
        order, buckets = by_bucket(removed)
        self._removed = removed[order]
        self._removed_offsets = np.searchsorted(buckets, np.arange(host.NUM_BUCKETS + 1))
        self.offsets: np.ndarray = np.sum(self._by_shard, axis=0)

    def between(self, first: int, last: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """A part of `overlaid`."""
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
        if (columns.get("freqs", NONE) < 0).any():
            raise Damaged("want freqs of 0 or more, got others")
        versions, step = columns.get("versions", NONE), self.meta["last_step"]
        if ((versions < 0) | (versions > step)).any():
            raise Damaged(f"want versions from 0 to last_step={step}, got others")
        return columns | {REMOVED: self.removed_between(first, last)}

    def removed_between(self, first: int, last: int) -> np.ndarray:
        """The keys ``(m,)`` int64 of the buckets first..last - 1 that went, sorted by (bucket, key)."""
        return self._removed[self._removed_offsets[first] : self._removed_offsets[last]]

    def check_sizes(self) -> None:
        self._catalog.checked(self._name, lambda: check_sizes(self._files, self.meta, self._shards))

    def all_keys(self) -> dict[str, np.ndarray]:
        return self.between(0, host.NUM_BUCKETS, ["keys"])

    def pool(self) -> dict[str, np.ndarray]:
        return self._catalog.checked(self._name, lambda: read_pool(self._files, self.meta))

    def counts(self) -> dict[str, np.ndarray]:
        return self._catalog.checked(
            self._name, lambda: joined_admission([at_once(shard.extras) for shard in self._shards])
        )


def cuts(tables: Sequence[ChainRows], bytes_of_row: int | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of buckets, of which the tables have whole rows of at most about four times `source.PIECE_BYTES`.

    Args:
      tables: of which they are.
      bytes_of_row: by default of all columns.
    """
    total: np.ndarray = np.sum([table.bounds * (bytes_of_row or table.row_bytes) for table in tables], axis=0)
    size = 4 * source.PIECE_BYTES  # a chunk has so many rows that less would read chunks of narrow columns often
    first = 0
    while first < host.NUM_BUCKETS:
        last = int(np.searchsorted(total, total[first] + size, side="right")) - 1
        last = min(max(last, first + 1), host.NUM_BUCKETS)
        yield first, last
        first = last


def ranges_of(table: ChainRows, keys: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of buckets, in order, that have all rows of some keys ``(n,)`` int64. What one has between these is
    little, and mostly in chunks that are read for them anyway."""
    buckets, begins = np.unique(buckets_of(keys)), table.bounds * table.row_bytes
    last: tuple[int, int] | None = None
    for bucket in buckets[begins[buckets + 1] > begins[buckets]].tolist():
        if last is not None and begins[bucket + 1] - begins[last[0]] <= _NEAR_BYTES:
            last = last[0], bucket + 1
            continue
        if last is not None:
            yield last
        last = bucket, bucket + 1
    if last is not None:
        yield last


_NEAR_BYTES = 1 << 22
"""As many as a chunk has."""


def _check_sorted(keys: np.ndarray, first: int, last: int) -> None:
    """Whether the keys of a piece are distinct, sorted, and of its buckets.

    Raises:
      Damaged: they are not.
    """
    words, buckets = as_int64(keys), buckets_of(keys)
    after = (buckets[1:] > buckets[:-1]) | ((buckets[1:] == buckets[:-1]) & (words[1:] > words[:-1]))
    if len(words) and not (after.all() and buckets[0] >= first and buckets[-1] < last):
        raise Damaged(f"want distinct keys by (bucket, key) in buckets {first} to {last - 1}, got others")


def _overlaid(parts: Sequence[Columns], types: Mapping[str, Type]) -> dict[str, np.ndarray]:
    """Rows over rows, in no order: of each key that of the last part that has touched it, if that has one.

    Args:
      parts: columns of rows, those below first; where keys went, their "removed" ``(m,)`` int64.
      types: of the columns to give. What a part lacks of them is zeros.
    """
    out: list[dict[str, np.ndarray]] = []
    later = NONE  # keys that the parts above have touched; so the rows of each are copied once
    for i, part in reversed(list(enumerate(parts))):
        n = len(part["keys"])
        rows = {
            name: part[name] if name in part else np.zeros((n, *shape), dtype) for name, (dtype, shape) in types.items()
        }
        out.append(take(rows, ~among(as_int64(part["keys"]), later)) if len(later) else rows)
        if i > 0:
            later = np.union1d(later, _touched(part))
    return concat(out[::-1])


def _meta_of(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a table is at the last checkpoint of a chain, all but the number of its rows."""
    slots = next((meta["slots"] for meta in metas if meta["slots"]), [])
    return {name: value for name, value in metas[-1].items() if name not in ("delta", "rows")} | {"slots": slots}


def _types_of(meta: Mapping[str, Any]) -> dict[str, Type]:
    """Dtype and shape of what a row has in each column."""
    return column_types(meta["dim"], np.dtype(meta["dtype"]), meta["key_dtype"], dict(meta["slots"]))


def _touched(part: Columns) -> np.ndarray:
    """Which keys are not as below a part, sorted: those that it has, and those that it says went."""
    return np.union1d(as_int64(part["keys"]), part.get(REMOVED, NONE))


def _counts_of(
    meta: Mapping[str, Any], counts: Columns, rows: Callable[[], Columns]
) -> tuple[Columns, np.ndarray | None]:
    """A part of `overlaid_counts`: what one checkpoint of a chain has, of a sketch always all."""
    of_all = meta.get("delta", {}).get("counts_of_all", True)
    return {"sketch": NONE, **counts}, None if of_all else _touched(rows())
