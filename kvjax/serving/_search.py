"""The search for keys: hashes in order, and where those of each bucket start.

A key's bucket is in the upper bits of its hash. There are about as many buckets as keys, so the hash is one of a few
behind the start of its bucket, which a binary search of as many steps for all finds. Nothing is above a hash but what
is in later buckets: so the search needs no end, and keys that were chosen to collide only add steps.
"""

from __future__ import annotations

import numpy as np

SENTINEL = np.uint64(2**64 - 1)
"""What stands behind the last hash."""


def mixed(keys: np.ndarray) -> np.ndarray:
    """The frozen hash of keys, ``Mix`` of ``kvjax/ffi/core/hash.h``: ``(...)`` uint64; a bijection."""
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


def starts_of(hashes: np.ndarray) -> tuple[np.ndarray, int]:
    """Where the hashes of each bucket start, and how many steps a search takes.

    Args:
      hashes: ``(n,)`` uint64, in order.

    Returns:
      ``(2**bits,)`` uint32 with bits >= 1, and the steps.
    """
    bits = max(1, len(hashes).bit_length() - 1)
    firsts = np.arange(2**bits, dtype=np.uint64) << np.uint64(64 - bits)
    starts = np.searchsorted(hashes, firsts).astype(np.uint32)
    longest = int(np.diff(starts, append=np.uint32(len(hashes))).max())
    return starts, longest.bit_length()


def find(hashes: np.ndarray, starts: np.ndarray, steps: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where hashes are.

    Args:
      hashes: ``(n + 1,)`` uint64 in order, the last one `SENTINEL`. Whatever they are, nothing else is read.
      starts: as `starts_of` gives them.
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
