"""The search for keys: hashes in order, and where those of each bucket start.

A key's bucket is in the upper bits of its hash. There are about as many buckets as keys, so the hash is one of a few
behind the start of its bucket, which a binary search of as many steps for all finds. Nothing is above a hash but what
is in later buckets: so the search needs no end, and keys that were chosen to collide only add steps.
"""

from __future__ import annotations

import numpy as np

RANGES = 2**16
"""Of hashes, by their upper bits: into which a table that is not in memory is spread."""

SENTINEL = np.uint64(2**64 - 1)
"""What stands behind the last hash."""


def mixed(keys: np.ndarray) -> np.ndarray:
    """The hash of the format, ``Mix`` of ``kvjax/ffi/core/hash.h``: ``(...)`` uint64; a bijection."""
    x = keys ^ (keys >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def unmixed(hashes: np.ndarray) -> np.ndarray:
    """The keys that have these hashes."""
    x = hashes ^ (hashes >> np.uint64(31)) ^ (hashes >> np.uint64(62))
    x *= np.uint64(0x319642B2D24D8EC3)
    x ^= (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x *= np.uint64(0x96DE1B173F119089)
    x ^= (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return x


def ranges_of(keys: np.ndarray) -> np.ndarray:
    """The range of each key's hash: ``(n,)`` of 64 bits to ``(n,)`` int64 below `RANGES`."""
    return (mixed(keys.view(np.uint64)) >> np.uint64(65 - RANGES.bit_length())).view(np.int64)


def bits_of(rows: int) -> int:
    """How many bits of a hash choose its bucket, in a table of so many rows."""
    return max(1, rows.bit_length() - 1)


class Starts:
    """Where the hashes of each bucket start, and how many steps a search takes, of hashes that come some at a time.

    Args:
      rows: how many come.
    """

    def __init__(self, rows: int) -> None:
        bits = bits_of(rows)
        self._shift, self._counts = np.uint64(64 - bits), np.zeros(2**bits, np.uint32)

    def add(self, hashes: np.ndarray) -> None:
        """The next hashes, ``(n,)`` uint64, all in order."""
        if len(hashes):
            buckets = (hashes >> self._shift).view(np.int64)
            first = buckets[0]
            self._counts[first : buckets[-1] + 1] += np.bincount(buckets - first).astype(np.uint32)

    def finish(self) -> tuple[np.ndarray, int]:
        """``(2**bits,)`` uint32 and the steps, once all have come; in the place of what was counted."""
        longest, starts = int(self._counts.max()), self._counts
        np.cumsum(starts, out=starts)
        starts[1:] = starts[:-1]
        starts[0] = 0
        return starts, longest.bit_length()


def find(hashes: np.ndarray, starts: np.ndarray, steps: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where hashes are.

    Args:
      hashes: ``(n + 1,)`` uint64 in order, the last one `SENTINEL`. Whatever they are, nothing else is read.
      starts: as `Starts` gives them.
      steps: of the search.
      wanted: ``(m,)`` uint64.

    Returns:
      Positions ``(m,)`` int64, and whether the hash is there ``(m,)`` bool.
    """
    bits = len(starts).bit_length() - 1
    at = starts[(wanted >> np.uint64(64 - bits)).view(np.int64)].astype(np.int64)
    for step in reversed(range(steps)):
        at += (hashes.take(at + (2**step - 1), mode="clip") < wanted).astype(np.int64) << step
    np.minimum(at, len(hashes) - 1, out=at)
    found = hashes.take(at, mode="clip") == wanted
    return at, found & (at < len(hashes) - 1)
