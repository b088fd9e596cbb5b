"""Taken rows: which rows a restore takes from a checkpoint, and which parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax._formats.source import Source
from kvjax._keys.table_keys import keys_of
from kvjax._values.dtypes import cast
from kvjax._values.exported import SLOT
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import among
from kvjax._values.snapshot import take, waiting_of
from kvjax.checkpoint._chains.chain_rows import ChainRows, ranges_of

if TYPE_CHECKING:
    from kvjax._spec.placement import Placement


def own_rows(source: Source, placement: Placement | None, offsets: np.ndarray | None) -> Source:
    """The rows of the shards of this process.

    Args:
      source: of which they are taken.
      placement: of the shards.
      offsets: the first row of each bucket and behind the last one, ``(buckets + 1,)``; None if it is not known.
    """
    if placement is None or placement.num_shards == len({shard.shard for shard in placement.local}):
        return source
    if offsets is None or placement.partitioner is not None:
        return _where(source, placement.owned)
    buckets = [placement.buckets(first, last) for first, last in _shards(placement)]
    return source.slices([(int(offsets[begin]), int(offsets[end])) for begin, end in buckets])


def only(rows: ChainRows, counts: dict[str, np.ndarray], wanted: Any) -> tuple[Source, dict[str, np.ndarray]]:
    """The rows of some keys, near which alone anything is read, and what is counted of those that wait.

    Raises:
      TypeError: they are no keys, or JAX may have cut them.
    """
    keys = np.unique(np.asarray(keys_of(wanted, rows.name, rows.meta["key_dtype"], "restore")).reshape(-1))
    if "pending_keys" in counts:
        counts = counts | take(waiting_of(counts), among(counts["pending_keys"], keys))
    offsets = rows.offsets
    near = [(int(offsets[first]), int(offsets[last])) for first, last in ranges_of(rows, keys)]
    return _where(rows.source().slices(near or [(0, 0)]), lambda piece: among(as_int64(piece), keys)), counts


def converted(source: Source, dtype: str, table: str) -> Source:
    """The rows in another dtype; a value that is too large for it is a ValueError when it is read."""
    kind = jnp.dtype(dtype)

    def change(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return cast(values, kind, keys, table, "restore")

    return source.changed("values", kind, change)


def without_slots(source: Source) -> Source:
    """The rows as of a table that no optimizer has come to."""
    columns = source.only([name for name in source.types if not name.startswith(SLOT)])
    return columns.changed("has_slots", np.dtype(bool), lambda has, _: np.zeros_like(has))


def _where(source: Source, keep: Callable[[np.ndarray], np.ndarray]) -> Source:
    """The rows of whose keys ``(n,)`` `keep` says so."""
    return source.where(np.concatenate([np.zeros(0, bool), *(keep(keys) for keys in source.pieces("keys"))]))


def _shards(placement: Placement) -> Iterator[tuple[int, int]]:
    """The shards of this process, as ranges first..last."""
    numbers = sorted({shard.shard for shard in placement.local})
    while numbers:
        first = last = numbers.pop(0)
        while numbers and numbers[0] == last + 1:
            last = numbers.pop(0)
        yield first, last
