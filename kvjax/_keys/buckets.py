"""Buckets: to which of the ranges of hashes keys belong, and the order of keys by them; by NumPy alone."""

from __future__ import annotations

import numpy as np

from kvjax._values.integers import as_int64
from kvjax.ffi import host


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """The virtual bucket of each key: int64 ``(n,)`` to int32 ``(n,)``."""
    return host.owners(as_int64(keys), host.NUM_BUCKETS)


def by_bucket(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts keys ``(n,)`` by (bucket, key): where they stand now, and their buckets then."""
    buckets = buckets_of(keys)
    order = np.lexsort((keys.view(np.int64), buckets))
    return order, buckets[order]
