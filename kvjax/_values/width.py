"""Width: the key of 64 bits that an id of 32 bits is in a table whose ``key_dtype`` says that its ids have 32.

There is one rule, for arrays of NumPy and of JAX, in programs and out of them: 32 bits are one key, whether they were
read with a sign or without one. A table of "int32" has it with the sign, one of "uint32" without. So what JAX makes of
ids on their way into a program changes no key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax._values.errors import fail
from kvjax._values.integers import as_bits


def is_of_32_bits(key_dtype: str) -> bool:
    """Whether a table says that its ids have 32 bits."""
    return key_dtype in ("int32", "uint32")


def own_words(xp: Any, words: Any, key_dtype: str) -> tuple[Any, Any]:
    """Keys as a table of ids of 32 bits has them.

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      words: ``(..., 2)`` uint32, the low word first.
      key_dtype: "int32" or "uint32".

    Returns:
      The words ``(..., 2)`` uint32, those of keys that need more bits as they were; and which do not, ``(...)`` bool.
    """
    low, high = words[..., 0], words[..., 1]
    ones, none = xp.uint32(2**32 - 1), xp.uint32(0)
    negative = low > xp.uint32(2**31 - 1)
    fits = (high == none) | ((high == ones) & negative)
    own = none if key_dtype == "uint32" else xp.where(negative, ones, none)
    return xp.stack([low, xp.where(fits, own, high)], -1), fits


def check_fit(words: np.ndarray, fits: np.ndarray, table: str, key_dtype: str, op: str) -> None:
    """Whether all ids have the 32 bits that a table says they have.

    Args:
      words: ``(..., 2)`` uint32.
      fits: ``(...)`` bool, as `own_words` gives it.
      table: its name, for the error.
      key_dtype: of it.
      op: for the error.

    Raises:
      ValueError: one has more.
    """
    if not fits.all():
        first = int(np.ascontiguousarray(words[~fits][0]).view(np.int64)[0])
        raise fail(
            ValueError, table, op, f"ids of 32 bits, as its key_dtype={key_dtype!r} says", f"{first}",
            "make the table without key_dtype=, which takes any id of 64 bits, or give kvjax.keys(ids) of salted ones",
        )  # fmt: skip


def own_bits(ids: Any, table: str, key_dtype: str, op: str) -> np.ndarray:
    """Keys as a table has them, ``(...)`` uint64, by NumPy alone.

    Args:
      ids: ``(...)``, `kvjax.Keys`, integers of NumPy or JAX, or what NumPy makes an array of.
      table: its name, for errors.
      key_dtype: of it.
      op: for errors.

    Raises:
      TypeError: they are no integers of 64 bits.
      ValueError: they need more than the 32 bits that the table says they have, and are no `kvjax.Keys`.
    """
    bits = as_bits(ids, f"table {table!r}, {op}").view(np.uint64)
    if not is_of_32_bits(key_dtype):
        return bits
    words = bits[..., None].view(np.uint32)
    own, fits = own_words(np, words, key_dtype)
    if not holds_keys(ids):
        check_fit(words, fits, table, key_dtype, op)
    return np.ascontiguousarray(own).view(np.uint64)[..., 0]


def own_key(key: int, key_dtype: str) -> int:
    """One key as a table has it, 64 bits without a sign; what needs more than 32 is taken as it is.

    Args:
      key: of 64 bits, with a sign or without.
      key_dtype: of the table.
    """
    bits = np.array([key % 2**64], np.uint64)
    words = own_words(np, bits.view(np.uint32), key_dtype)[0] if is_of_32_bits(key_dtype) else bits
    return int(words.view(np.uint64)[0])


def holds_keys(ids: Any) -> bool:
    """Whether these are `kvjax.Keys`, or a sequence with such: keys of 64 bits, which salts and hashes make."""
    if isinstance(ids, (list, tuple)):
        return any(hasattr(each, "words") for each in ids)
    return hasattr(ids, "words")
