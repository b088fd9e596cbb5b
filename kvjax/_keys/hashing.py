"""Hashing: strings, bytes and integers to 64-bit keys, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvjax._keys.shapes import check_salts
from kvjax._keys.spans import Spans, spans_of
from kvjax._values.arrays import HasArray, check_no_mask, first_of
from kvjax._values.errors import fail
from kvjax._values.integers import as_array, as_bits, is_missing, mend_of, salt_of, telling
from kvjax._values.key_width import check_whole
from kvjax.ffi import host

ODD = 0x9E3779B97F4A7C15
"""What the hash of the format adds before it mixes."""

HashedLike: TypeAlias = HasArray | str | bytes | int | Sequence["HashedLike"]
"""What `hash_keys` takes."""


def hash_keys(items: HashedLike, salt: int | HasArray | Sequence[int] = 0) -> np.ndarray:
    """Hashes strings, bytes or integers to 64-bit keys, on the host.

    Strings are hashed as UTF-8 by XXH64 with the salt as its seed. Integers are mixed by a bijection that is different
    for each salt, so equal ids of two features get different keys in one table. An integer and its digits as text are
    two keys.

    Strings of Arrow (columns of pyarrow, pandas or polars while pyarrow is loaded), of NumPy's bytes and of ASCII in
    NumPy's text are read where they lie, and other threads run meanwhile. This loads no JAX.

    Args:
      items: array or (nested) sequence of str, bytes or integers, of any shape ``(...)``; or a column of a data frame.
        NumPy's own types of strings end before their last zero bytes: give bytes that may end so as objects.
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
    found = spans_of(items)
    array = _array_of(items) if found is None else found
    if isinstance(salts, np.ndarray):
        check_salts(salts.shape, array.shape, "hash_keys")
        salts = np.broadcast_to(salts, array.shape).reshape(-1)
    if isinstance(array, Spans):
        hashed = _by_salt(salts, array.hashed)
    elif array.size == 0 or array.dtype.kind in "iu" or _all_integers(array):
        hashed = hash_integers(as_bits(array, "hash_keys").reshape(-1).view(np.int64), salts)
    else:
        strings = array.reshape(-1).tolist()
        try:
            hashed = _by_salt(salts, lambda at, salt: host.hash_strings(_some(strings, at), salt))
        except UnicodeEncodeError as error:
            mend = "hash bytes of your choice, such as text.encode('utf-8', 'surrogatepass')"
            raise fail(ValueError, None, "hash_keys", "text that UTF-8 can hold", repr(error.object), mend) from None
        except TypeError:
            if any(isinstance(item, (list, tuple, np.ndarray)) for item in strings):
                as_array(items, "hash_keys")  # says if their lengths differ
            raise _error_of(strings) from None
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
    """Whether these are salts in an array or a sequence, and not one number; a JAX array of one may be traced. Arrays
    of Arrow have no `ndim`."""
    several = isinstance(salt, Sequence) and not isinstance(salt, (str, bytes))
    if several or (hasattr(salt, "aval") and hasattr(salt, "dtype")):
        return True
    return getattr(salt, "ndim", 1 if hasattr(salt, "__array__") else 0) > 0


def hash_integers(bits: np.ndarray, salt: int | np.ndarray) -> np.ndarray:
    """The hash of integers ``(n,)`` int64 by one salt, or by salts ``(n,)`` of 64 bits."""
    if isinstance(salt, int):
        return host.hash_integers(bits, salt)
    # The hash by salt s is the mix of bits + mix(s) + ODD, and by salt 0 that of bits + ODD.
    first = host.hash_integers((salt.view(np.uint64) - np.uint64(ODD)).view(np.int64), 0)
    return host.hash_integers((bits.view(np.uint64) + first.view(np.uint64)).view(np.int64), 0)


def _all_integers(array: np.ndarray) -> bool:
    return array.dtype == object and all(isinstance(item, (int, np.integer)) for item in array.flat)


def _by_salt(salts: int | np.ndarray, hashed: Callable[[np.ndarray | None, int], np.ndarray]) -> np.ndarray:
    """The keys of strings by one salt, or by salts ``(n,)`` of 64 bits: those of one salt at a time."""
    if isinstance(salts, int):
        return hashed(None, salts)
    made, order = np.empty(len(salts), np.int64), np.argsort(salts, kind="stable")
    for at in np.split(order, 1 + np.flatnonzero(np.diff(salts[order]))):
        if len(at):
            made[at] = hashed(at, int(salts[at[0]]) % 2**64)
    return made


def _some(strings: list[Any], at: np.ndarray | None) -> list[Any]:
    return strings if at is None else [strings[i] for i in at]


def _error_of(items: list[Any]) -> Exception:
    """The error of items of which some are neither text nor bytes."""
    others = [item for item in items if not isinstance(item, (str, bytes))]
    first = telling(others)
    got = f"{type(first).__name__} {first!r} among them"
    if is_missing(first) and len(others) < len(items):
        mend = (
            "drop missing ones, or fill them with a string and leave them out by mask=; str() would make one key of all"
        )
    else:
        mend = mend_of(first, "make strings, bytes or integers of them, as a UUID's bytes or the days of a date")
    return fail(TypeError, None, "hash_keys", "str and bytes, or integers alone", got, mend)
