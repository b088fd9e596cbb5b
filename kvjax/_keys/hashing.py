"""Hashing: strings, bytes and integers to 64-bit keys, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvjax._values.arrays import HasArray
from kvjax._values.integers import salt_of
from kvjax.ffi import host

HashedLike: TypeAlias = HasArray | str | bytes | int | Sequence["HashedLike"]
"""What `hash_keys` takes."""


def hash_keys(items: HashedLike, salt: int = 0) -> np.ndarray:
    """Hashes strings, bytes or integers to 64-bit keys, on the host.

    Strings are hashed as UTF-8 by XXH64 with the salt as its seed. Integers are mixed by a bijection that
    differs from salt to salt: equal ids of different features get different keys of one table.

    Args:
      items: array or (nested) sequence of str, bytes or integers, of any shape ``(...)``.
      salt: 64-bit integer, for instance the number of a feature.

    Returns:
      ``(...)`` int64.

    Raises:
      TypeError: the items are neither strings nor bytes nor integers, or the salt is no integer.

    Source:
      XXH64: Y. Collet, xxHash. The integer mixer is the finaliser of splitmix64.

    Example:
      >>> import kvjax
      >>> kvjax.hash_keys(["cat", "dog", "cat"]).tolist()
      [-5315903814719137477, 1854447679198500061, -5315903814719137477]
      >>> bool((kvjax.hash_keys([1, 2], salt=0) != kvjax.hash_keys([1, 2], salt=1)).all())
      True
    """
    salt = salt_of(salt, "hash_keys")
    array = np.asarray(items)
    if array.dtype.kind in "US" and not isinstance(items, np.ndarray):
        array = np.array(items, dtype=object)  # NumPy's own string types cut trailing zero bytes
    if array.dtype == object and all(isinstance(item, int) for item in array.flat):
        array = np.array(array.tolist())  # integers that NumPy was told to keep as objects
    flat = array.reshape(-1)
    if array.size == 0 or array.dtype.kind == "i":
        hashed = host.hash_integers(flat.astype(np.int64), salt)
    elif array.dtype.kind == "u":
        hashed = host.hash_integers(flat.astype(np.uint64).view(np.int64), salt)
    else:
        hashed = host.hash_strings([_encode(item) for item in flat.tolist()], salt)
    return hashed.reshape(array.shape)


def _encode(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise TypeError(f"kvjax: hash_keys wants str, bytes or integers, got {type(item).__name__}: {item!r}")
