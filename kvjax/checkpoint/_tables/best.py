"""Top-k over several processes: how many of the rows that they keep together are in each process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from kvjax._keys.buckets import buckets_of
from kvjax._sharded.processes import allgather_json
from kvjax._spec.placement import Placement
from kvjax._values.integers import as_int64


def part_of_best(placement: Placement, k: int, keys: np.ndarray, freqs: np.ndarray, versions: np.ndarray) -> int:
    """How many of this process's rows are among the k most frequent of all; all ask together.

    Ties go to the row that was written later, then to the order of the disk, as in `kvjax.Prune`. Processes tell each
    other one row at a time, some 2 log(n) times for each of them, and never all of theirs.

    Args:
      placement: of the table.
      k: rows of all.
      keys: ``(n,)``, of this process.
      freqs: ``(n,)`` int64.
      versions: ``(n,)`` int64.
    """
    words, buckets = as_int64(keys), buckets_of(keys)
    order = np.lexsort((words, buckets, -versions, -freqs))

    def place(i: int) -> list[int]:
        at = order[i]
        return [-int(freqs[at]), -int(versions[at]), int(buckets[at]), int(words[at])]

    # Of the rows in order those before `low` are among them, and those from `high` on are not.
    low, high, every = 0, len(order), range(len(order))
    while True:
        said = allgather_json(placement, [low, high, place((low + high) // 2) if low < high else None])
        lows, highs, middles = zip(*said, strict=True)
        if sum(highs) <= k:
            return high
        if sum(lows) == sum(highs):
            return low
        pivot = max(zip(highs, lows, middles, strict=True), key=lambda one: one[0] - one[1])[2]
        through = min(max(bisect_right(every, pivot, key=place), low), high)
        if sum(allgather_json(placement, through)) <= k:
            low = through
        else:
            high = min(max(bisect_left(every, pivot, key=place), low), high)
