"""Sizes: how many rows shards have, those of this process or of the whole table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax._sharded.processes import allgather, together
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle


def num_rows(table: Handle, shards: Sequence[int]) -> int:
    """The rows of some shards of this process, once all writes up to the handle are done; of a following one, now."""
    if table.follows:
        return sum(table.spec.host.rows(table.name, shard)[0] for shard in shards)
    version = version_on_host(table.stored, "size")
    return sum(table.spec.host.size(table.name, shard, version) for shard in shards)


def total_rows(table: Handle) -> int:
    """The rows of the whole table; all processes of its mesh ask together."""
    placement, spec = table.spec.placement, table.spec
    mine = together(placement, table.name, "size", lambda: num_rows(table, spec.originals))
    return int(allgather(placement, np.int64(mine)).sum())


def rows_by_shard(table: Handle, all_processes: bool) -> dict[int, int]:
    """The rows of each shard by its number: of this process, or of the whole table as `total_rows`."""
    placement, spec = table.spec.placement, table.spec
    numbers = {0: 0} if placement is None else {local.shard: i for i, local in placement.kept}
    if not all_processes:
        return {shard: num_rows(table, [i]) for shard, i in sorted(numbers.items())}

    def count() -> np.ndarray:
        out = np.zeros(spec.num_shards, np.int64)
        for shard, i in numbers.items():
            out[shard] = num_rows(table, [i])
        return out

    everywhere = allgather(placement, together(placement, table.name, "size", count)).max(axis=0)
    return dict(enumerate(everywhere.tolist()))
