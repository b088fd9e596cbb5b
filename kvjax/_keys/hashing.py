"""Hashing: strings, bytes and integers to 64-bit keys, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvjax._keys.shapes import check_salts
from kvjax._values.arrays import HasArray, check_no_mask, first_of
from kvjax._values.integers import as_array, as_bits, salt_of
from kvjax._values.key_width import check_whole
from kvjax.ffi import host

ODD = 0x9E3779B97F4A7C15
"""What the frozen hash adds before it mixes."""

HashedLike: TypeAlias = HasArray | str | bytes | int | Sequence["HashedLike"]
"""What `hash_keys` takes."""


def hash_keys(items: HashedLike, salt: int | HasArray = 0) -> np.ndarray:
    """Hashes strings, bytes or integers to 64-bit keys, on the host.

    Strings are hashed as UTF-8 by XXH64 with the salt as its seed. Integers are mixed by a bijection that is different
    for each salt, so equal ids of two features get different keys in one table.

    Args:
      items: array or (nested) sequence of str, bytes or integers, of any shape ``(...)``.
      salt: 64-bit integer, for instance the number of a feature; or an array of integers that broadcasts to the items,
        a salt for each.

    Returns:
      ``(...)`` int64.

    Raises:
      TypeError: the items are not strings, bytes or integers; JAX may have cut them (see `kvjax.keys`); or they or the
        salt have more than 64 bits.
      ValueError: the items are nested lists of different lengths; UTF-8 cannot encode one; or the salts do not
        broadcast to them.

    Source:
      XXH64: Y. Collet, xxHash. The integer mixer is the finaliser of splitmix64.

    Example:
      >>> import kvjax
      >>> kvjax.hash_keys(["cat", "dog", "cat"]).tolist()
      [-5315903814719137477, 1854447679198500061, -5315903814719137477]
      >>> bool((kvjax.hash_keys([1, 2], salt=0) != kvjax.hash_keys([1, 2], salt=1)).all())
      True
    """
    salts = as_bits(salt, "hash_keys, salt") if is_salts(salt) else salt_of(salt, "hash_keys")
    check_no_mask(items, "hash_keys")
    check_whole(items, "hash_keys")
    array = _array_of(items)
    objects = array.dtype == object and all(isinstance(item, (int, np.integer)) for item in array.flat)
    if isinstance(salts, np.ndarray):
        check_salts(salts.shape, array.shape, "hash_keys")
    if array.size == 0 or array.dtype.kind in "iu" or objects:
        bits = as_bits(array, "hash_keys").reshape(-1).view(np.int64)
        hashed = hash_integers(bits, _each(salts, array))
    else:
        strings = array.reshape(-1).tolist()
        try:
            hashed = _hash_strings(strings, _each(salts, array))
        except (TypeError, UnicodeEncodeError):
            if any(isinstance(item, (list, tuple, np.ndarray)) for item in strings):
                as_array(items, "hash_keys")  # says if their lengths differ
            for item in strings:
                _check_text(item)
            raise
    return hashed.reshape(array.shape)


def _array_of(items: Any) -> np.ndarray:
    """NumPy's own types of strings cut trailing zero bytes, and of numbers round integers: so all but arrays and
    integers is an array of objects."""
    if isinstance(items, np.ndarray):
        return items
    if not isinstance(first_of(items), (str, bytes)) and (array := as_array(items, "hash_keys")).dtype.kind in "iuO":
        return array
    return np.array(items, dtype=object)


def is_salts(salt: object) -> bool:
    """Whether this is an array of salts, and not one number; a JAX array of one may be traced."""
    return getattr(salt, "ndim", 0) > 0 or (hasattr(salt, "aval") and hasattr(salt, "dtype"))


def hash_integers(bits: np.ndarray, salt: int | np.ndarray) -> np.ndarray:
    """The hash of integers ``(n,)`` int64 by one salt, or by salts ``(n,)`` of 64 bits."""
    if isinstance(salt, int):
        return host.hash_integers(bits, salt)
    # The hash by salt s is the mix of bits + mix(s) + ODD, and by salt 0 that of bits + ODD.
    first = host.hash_integers((salt.view(np.uint64) - np.uint64(ODD)).view(np.int64), 0)
    return host.hash_integers((bits.view(np.uint64) + first.view(np.uint64)).view(np.int64), 0)


def _hash_strings(items: list[Any], salt: int | np.ndarray) -> np.ndarray:
    if isinstance(salt, int):
        return host.hash_strings(items, salt)
    hashed = np.empty(len(items), np.int64)
    for one in np.unique(salt).tolist():
        at = np.flatnonzero(salt == one)
        hashed[at] = host.hash_strings([items[i] for i in at], one % 2**64)
    return hashed


def _each(salts: int | np.ndarray, items: np.ndarray) -> int | np.ndarray:
    return salts if isinstance(salts, int) else np.broadcast_to(salts, items.shape).reshape(-1)


def _check_text(item: object) -> None:
    if isinstance(item, str):
        try:
            item.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"kvjax: hash_keys: want text that UTF-8 can hold, got {item!r}; hash bytes of your choice, such as "
                "text.encode('utf-8', 'surrogatepass')"
            ) from None
    elif not isinstance(item, bytes):
        raise TypeError(
            f"kvjax: hash_keys: want str and bytes, or integers alone, got {type(item).__name__} {item!r} among them; "
            "make strings or integers of what you have"
        )
