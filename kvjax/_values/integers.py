"""Integers of up to 64 bits, whatever form they come in, as their 64 bits in NumPy."""

from __future__ import annotations

import array as python_array
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kvjax._values.arrays import check_no_mask, first_of
from kvjax._values.errors import fail


def as_bits(ids: Any, where: str) -> np.ndarray:
    """The 64 bits of integers, exactly: -1 and 2**64 - 1 are the same.

    Args:
      ids: ``(...)`` integers, a NumPy array or what NumPy makes one of.
      where: names the table and the operation in errors.

    Returns:
      ``(...)`` int64 or uint64, contiguous, by the type that they came in.

    Raises:
      TypeError: they are not integers, or have more than 64 bits.
      ValueError: they are no array; or two that differ have the same bits.
    """
    check_no_mask(ids, where)
    array = as_array(ids, where)
    if array.size == 0 and array.dtype.kind not in "iu":
        array = array.astype(np.int64)  # NumPy has given it the type of nothing
    if array.dtype.kind not in "iu":
        array = _of_objects(ids, array, where)
    return wide(array)


def wide(integers: np.ndarray) -> np.ndarray:
    """Integers of any width as 64 bits, by the type that they came in."""
    return integers.astype(np.uint64 if integers.dtype.kind == "u" else np.int64, order="C")


def as_int64(keys: np.ndarray) -> np.ndarray:
    """Keys ``(n,)`` of 64 bits as int64."""
    return np.ascontiguousarray(keys).view(np.int64)


def as_array(items: Any, where: str) -> np.ndarray:
    """What NumPy makes of them; objects if there are bools in a list, of which NumPy would make 0 and 1.

    Raises:
      TypeError: they are a buffer of bytes.
      ValueError: they are nested sequences of several lengths.
    """
    if _is_buffer(first := first_of(items)):
        mend = "make bytes of it, bytes(x), for kvjax.hash_keys, or an array by np.frombuffer(x, dtype)"
        mend = _COLUMN if _is_of_arrow(first) else mend
        got = f"a {type(first).__name__}, whose bytes would be an id each"
        raise fail(TypeError, None, where, "an array of ids", got, mend)
    try:
        array = np.asarray(items)
        return np.asarray(items, object) if holds((bool, np.bool_), items) else array
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError(
            f"kvjax: {where}: want an array of ids, got sequences of several lengths; pad them with an id that is none "
            "(pad_id=), or join them for kvjax.lookup_bag(..., lengths=)"
        ) from None


def holds(kind: type | tuple[type, ...], ids: Any, which: Callable[[Any], bool] = lambda _: True) -> bool:
    """Whether these are of a type, and such as is asked for, or nested sequences that hold such."""
    if isinstance(ids, (list, tuple)):  # by their few types first, as there may be many ids
        some = any(issubclass(each, (list, tuple)) or issubclass(each, kind) for each in set(map(type, ids)))
        return some and any(holds(kind, each, which) for each in ids)
    return isinstance(ids, kind) and which(ids)


def _of_objects(ids: Any, array: np.ndarray, where: str) -> np.ndarray:
    """Python's integers as uint64, of which NumPy makes something else if some are below 0 and some above 2**63 - 1."""
    objects = array if isinstance(ids, np.ndarray) else np.array(ids, object)
    if objects.dtype == object:
        integers = [isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in objects.flat]
        others = [x for x, is_integer in zip(objects.flat, integers, strict=True) if not is_integer]
        wide = [x for x, is_integer in zip(objects.flat, integers, strict=True) if is_integer and not _fits(x)]
        if not others and not wide:
            return _bits_of([int(x) for x in objects.flat], where).reshape(objects.shape)
        first: Any = telling(others) if others else ""
        got = f"a missing id ({first!r})" if is_missing(first) else f"{type(first).__name__} {first!r}"
        got = f"{got} among them" if others else f"{wide[0]}, which has more"
    else:
        flat, test = array.reshape(-1), {"f": np.isnan, "M": np.isnat, "m": np.isnat}.get(array.dtype.kind)
        missing = flat[:0] if test is None else flat[test(flat)]
        first: Any = missing[0] if missing.size else np.zeros(1, array.dtype)[0]
        got = f"{array.dtype} with missing ids ({first})" if is_missing(first) else str(array.dtype)
    mend = "hash strings and other values with kvjax.hash_keys, and give missing ids a number that is padding (pad_id=)"
    raise fail(TypeError, None, where, "integers of at most 64 bits", got, mend_of(first, mend))


NO_FLOATS = (
    "read ids as integers (a column of pandas as Int64), and fill or drop missing ones: float64 is exact only up to "
    "2**53, so a cast would give other ids, and make a key of NaN"
)
"""The mend for ids that are floats."""


def telling(items: list[Any]) -> Any:
    """Of elements that are no ids, the first that explains the rest: what is missing explains numbers beside it, as
    NumPy and pandas make floats of integers there; and text, lists and the like explain both."""
    return min(items, key=lambda x: 1 if is_missing(x) else 2 * isinstance(x, (int, float, np.number)))


def mend_of(item: object, otherwise: str) -> str:
    """What helps against an element that is no id, by what it is."""
    if isinstance(item, (bool, np.bool_)):
        return "cast them by np.asarray(ids, np.int64)"
    if is_missing(item) or _is_float(item):
        return NO_FLOATS
    if isinstance(item, tuple):
        return "make keys of each part, and cross them: kvjax.keys(first).salted(second)"
    if isinstance(item, (list, np.ndarray)):
        return (
            "give what is in the lists as one array, and their lengths to kvjax.lookup_bag(..., lengths=); lists of "
            "one length are an array by np.stack(ids)"
        )
    if _is_of_arrow(item):
        return _COLUMN
    if hasattr(item, "keys") and not isinstance(item, Mapping):
        return "give the ids that it has, its .keys, and what else is in it by the other arguments"
    if isinstance(item, Iterable) and not isinstance(item, (str, bytes)):
        return "make a list of it, list(ids)"
    return otherwise


_COLUMN = "give the column of Arrow, of which NumPy makes an array, and not a list of its elements"


def _is_of_arrow(item: object) -> bool:
    return hasattr(item, "as_py")


def _is_buffer(x: object) -> bool:
    """Whether this is bytes by another name, of which NumPy would make an array of small integers. An `array.array`
    says of each element that it is a number."""
    if isinstance(x, (bytes, python_array.array)) or hasattr(x, "dtype") or hasattr(x, "__array__"):
        return False
    try:
        return memoryview(x).format in ("B", "b", "c")  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False


def _is_float(x: object) -> bool:
    return isinstance(x, (float, np.floating))


def is_missing(x: Any) -> bool:
    """Whether it is what Python, NumPy and pandas write where there is no value."""
    return x is None or type(x).__name__ in ("NAType", "NaTType") or (_is_float(x) and x != x) or _is_no_time(x)


def _is_no_time(x: object) -> bool:
    return isinstance(x, (np.datetime64, np.timedelta64)) and bool(np.isnat(x))


def _bits_of(integers: list[int], where: str) -> np.ndarray:
    bits = [x % 2**64 for x in integers]
    if len(set(bits)) < len(set(integers)):
        twice = min(set(integers) & {x - 2**64 for x in integers})
        raise ValueError(
            f"kvjax: {where}: want ids that are all signed or all unsigned, got {twice} and {twice % 2**64}, whose 64 "
            "bits are the same; give arrays of int64 or of uint64"
        )
    return np.array(bits, np.uint64)


def salt_of(salt: Any, where: str) -> int:
    """A salt, in 64 bits.

    Raises:
      TypeError: it is no integer, or has more than 64 bits.
    """
    try:
        number = None if isinstance(salt, bool) else operator.index(salt)
    except TypeError:
        number = None
    if number is None or not _fits(number):
        raise TypeError(
            f"kvjax: {where}: want an integer of at most 64 bits as salt, got {reprlib.repr(salt)}; number the "
            "features by integers, or give an array of integers, a salt for each key"
        )
    return number % 2**64


def _fits(x: int) -> bool:
    return -(2**63) <= x < 2**64
