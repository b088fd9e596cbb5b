"""Hashing: strings, bytes and integers to 64-bit keys, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvjax._values.arrays import HasArray
from kvjax._values.integers import as_array, as_bits, salt_of
from kvjax._values.key_width import check_whole
from kvjax.ffi import host

HashedLike: TypeAlias = HasArray | str | bytes | int | Sequence["HashedLike"]
"""What `hash_keys` takes."""


def hash_keys(items: HashedLike, salt: int = 0) -> np.ndarray:
    """Hashes strings, bytes or integers to 64-bit keys, on the host.

    Strings are hashed as UTF-8 by XXH64 with the salt as its seed. Integers are mixed by a bijection that is different
    for each salt, so equal ids of two features get different keys in one table.

    Args:
      items: array or (nested) sequence of str, bytes or integers, of any shape ``(...)``.
      salt: 64-bit integer, for instance the number of a feature.

    Returns:
      ``(...)`` int64.

    Raises:
      TypeError: the items are not strings, bytes or integers; JAX may have cut them (see `kvjax.keys`); or they or the
        salt have more than 64 bits.
      ValueError: the items are lists of different lengths, which are no array.

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
    check_whole(items, "hash_keys")
    array = as_array(items, "hash_keys")
    if array.dtype.kind not in "iu" and not isinstance(items, np.ndarray):
        array = np.array(items, dtype=object)  # NumPy's own types cut trailing zero bytes, and round integers
    objects = array.dtype == object and all(isinstance(item, (int, np.integer)) for item in array.flat)
    if array.size == 0 or array.dtype.kind in "iu" or objects:
        hashed = host.hash_integers(as_bits(array, "hash_keys").reshape(-1).view(np.int64), salt)
    else:
        hashed = host.hash_strings([_encode(item) for item in array.reshape(-1).tolist()], salt)
    return hashed.reshape(array.shape)


def _encode(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise TypeError(
        f"kvjax: hash_keys: want str and bytes, or integers alone, got {type(item).__name__} {item!r} among them; make "
        "strings or integers of what you have"
    )
