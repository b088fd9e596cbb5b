"""Array-likes: what is taken where an array is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvjax._values.errors import fail

if TYPE_CHECKING:
    import jax


class HasArray(Protocol):
    """What NumPy can make an array of: its own arrays and numbers, JAX's arrays, data frames' columns."""

    def __array__(self) -> np.ndarray: ...


class HasJaxArray(Protocol):
    """What JAX can make an array of, such as an ``nnx.Param``."""

    def __jax_array__(self) -> Any: ...


PyTree: TypeAlias = Any
"""Any tree of JAX's: what type checkers cannot say more of."""

ArrayLike: TypeAlias = HasArray | HasJaxArray | complex | Sequence["ArrayLike"]
"""An array, a number, or nested sequences of them; no strings."""


def uncut(given: Any) -> jax.Array:
    """The array of JAX of what a caller gives as real numbers. Integers of the host that JAX would cut to 32 bits, as
    times in milliseconds, become float32."""
    import jax
    import jax.numpy as jnp

    if isinstance(given, (np.ndarray, np.generic)) and given.dtype.kind in "iu" and given.size:
        kept = np.iinfo(jax.dtypes.canonicalize_dtype(given.dtype))
        if not kept.min <= int(given.min()) <= int(given.max()) <= kept.max:
            return jnp.asarray(given.astype(np.float32))
    try:
        return jnp.asarray(given)
    except OverflowError:  # of Python's integers
        return uncut(np.asarray(given))


def array_of(given: Any, table: str | None, op: str, want: str) -> jax.Array:
    """The array of what a caller gives as rows.

    Raises:
      TypeError: it is none, as of strings.
    """
    first = given
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    try:
        if isinstance(first, (str, bytes)):  # which JAX takes for names of dtypes
            raise TypeError
        return uncut(given)
    except (TypeError, ValueError):
        try:
            got = str(np.asarray(given).dtype)
        except (TypeError, ValueError):
            got = "lists that make no array"
        raise fail(TypeError, table, op, want, got, "convert them first") from None
