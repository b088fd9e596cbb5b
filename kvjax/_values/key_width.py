"""Key width: ids that JAX may have cut to 32 bits, and the key of an id of which ``key_dtype`` says that it has 32.

It needs NumPy alone, and knows JAX's arrays where there are some. There is one rule, for arrays of NumPy and of JAX, in
programs and out of them: 32 bits are one key, whether they were read with a sign or without one. A table of "int32" has
it with the sign, one of "uint32" without. So what JAX makes of ids on their way into a program changes no key.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvjax._values.integers import as_bits, holds

KEY_DTYPES = ("int64", "uint64", "int32", "uint32")


def x64_enabled() -> bool:
    """Whether JAX has 64-bit integers now, or is not loaded, so that nobody has any of its arrays."""
    if sys.modules.get("jax") is None:
        return True
    import jax.numpy as jnp  # so that this waits for a thread that is loading it

    return jnp.result_type(int).itemsize == 8


def is_narrow(ids: Any) -> bool:
    """Whether these are integers that ``jit`` or ``jnp`` may have cut to 32 bits, or nested sequences with such."""
    if sys.modules.get("jax") is None:
        return False
    import jax

    return holds(jax.Array, ids, lambda x: x.dtype in (np.int32, np.uint32)) and not x64_enabled()


def narrow_error(where: str) -> TypeError:
    return TypeError(
        f"kvjax: {where}: want ids of 64 bits, got a JAX array of 32-bit integers while jax_enable_x64 is off, to "
        "which jit and jnp cut NumPy's 64-bit ids; pass kvjax.keys(numpy_ids) into compiled functions, which is "
        "exact; for ids that never had more than 32 bits, kvjax.keys(ids, key_dtype='int32') says so, or "
        "key_dtype='int32' where a table is made"
    )


def check_whole(ids: Any, where: str) -> None:
    """Whether JAX has not cut integers to 32 bits.

    Raises:
      TypeError: it may have.
    """
    if is_narrow(ids):
        raise narrow_error(where)


def is_of_32_bits(key_dtype: str) -> bool:
    """Whether a table says that its ids have 32 bits."""
    return key_dtype in ("int32", "uint32")


def own_words(xp: Any, words: Any, key_dtype: str) -> Any:
    """Keys as a table of ids of 32 bits has them; those that need more bits, as salted and hashed ones do, stay.

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      words: ``(..., 2)`` uint32, the low word first.
      key_dtype: "int32" or "uint32".

    Returns:
      ``(..., 2)`` uint32.
    """
    low, high = words[..., 0], words[..., 1]
    ones, none = xp.uint32(2**32 - 1), xp.uint32(0)
    negative = low > xp.uint32(2**31 - 1)
    fits = (high == none) | ((high == ones) & negative)
    own = none if key_dtype == "uint32" else xp.where(negative, ones, none)
    return xp.stack([low, xp.where(fits, own, high)], -1)


def own_bits(ids: Any, key_dtype: str, where: str) -> np.ndarray:
    """Keys as a table has them, ``(...)`` uint64, by NumPy alone.

    Args:
      ids: ``(...)``, `kvjax.Keys`, integers of NumPy or JAX, or what NumPy makes an array of.
      key_dtype: of the table.
      where: for errors.

    Raises:
      TypeError: they are no integers of 64 bits.
    """
    bits = as_bits(ids, where).view(np.uint64)
    if not is_of_32_bits(key_dtype):
        return bits
    own = own_words(np, bits[..., None].view(np.uint32), key_dtype)
    return np.ascontiguousarray(own).view(np.uint64)[..., 0]


def whole_bits(ids: Any, key_dtype: str, where: str) -> np.ndarray:
    """The same of what a user gives: ids that JAX may have cut are refused.

    Raises:
      TypeError: they are no integers of 64 bits, or JAX may have cut them, and the table does not say that it has not.
    """
    if not is_of_32_bits(key_dtype):
        check_whole(ids, where)
    return own_bits(ids, key_dtype, where)


def own_key(key: int, key_dtype: str) -> int:
    """One key as a table has it, 64 bits without a sign.

    Args:
      key: of 64 bits, with a sign or without.
      key_dtype: of the table.
    """
    return int(own_bits(np.array([key % 2**64], np.uint64), key_dtype, "a key")[0])
