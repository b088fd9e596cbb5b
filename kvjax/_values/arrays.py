"""Array-likes: what is taken where an array is wanted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvjax._values.errors import fail, where_of

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


def one_program(*static: int) -> Any:
    """A decorator for functions of arrays that are called outside of ``jit``, too: there, each is one program, where it
    would be one for each operation, of 30 ms and 1 MiB each. In a program it is as if it were not there.

    Args:
      *static: positions of arguments that are no arrays.
    """
    import jax

    return functools.partial(jax.jit, static_argnums=static, inline=True)


def by_value(given: Any, dtype: Any = None) -> jax.Array:
    """The array of JAX of what a caller gives, as it is now: JAX may read an array of the host later, in ``jnp.array``,
    too, and a caller may fill it anew as soon as the call returns."""
    import jax
    import jax.numpy as jnp

    if hasattr(given, "__array__") and not isinstance(given, jax.Array) and not hasattr(given, "__jax_array__"):
        given = np.array(given)
    return jnp.asarray(given, dtype)


def host_or_jax(given: Any) -> Any:
    """An array as it is, of NumPy or of JAX; of a list one of JAX if there is a traced number in it."""
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    if isinstance(given, jax.Array):
        return given
    if hasattr(given, "__jax_array__"):
        return jnp.asarray(given)
    if isinstance(given, (list, tuple)) and any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        with jax.enable_x64(True):  # or numbers of 64 bits would be cut
            return jnp.asarray(given)
    return np.asarray(given)


def at_most_32_bits(integers: jax.Array) -> jax.Array:
    """Integers of JAX as they are, but those of 64 bits as int32, where what is beyond becomes the last. They may be
    from where x64 was on, and JAX would cut them where it is off."""
    import jax
    import jax.numpy as jnp

    if integers.dtype not in (jnp.int64, jnp.uint64):
        return integers
    with jax.enable_x64(True):
        least = -1 if integers.dtype == jnp.int64 else 0
        return integers.clip(least, 2**31 - 1).astype(jnp.int32)


def uncut(given: Any) -> jax.Array:
    """The same of real numbers, of the dtype that `uncut_dtype` says."""
    try:
        return by_value(given, uncut_dtype(given) if isinstance(given, (np.ndarray, np.generic)) else None)
    except OverflowError:  # of Python's integers
        return uncut(np.asarray(given))


def uncut_dtype(given: np.ndarray | np.generic) -> Any:
    """The dtype that JAX gives to numbers of the host, but float32 for integers that it would cut to 32 bits, as times
    in milliseconds."""
    import jax

    dtype = jax.dtypes.canonicalize_dtype(given.dtype)
    if given.dtype.kind in "iu" and given.size:
        kept = np.iinfo(dtype)
        if not kept.min <= int(given.min()) <= int(given.max()) <= kept.max:
            return np.dtype(np.float32)
    return dtype


def aligned_copy(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy of another dtype, where programs of the CPU take it as it is: XLA copies what is not at a multiple of 64
    bytes."""
    dtype = np.dtype(dtype)
    buffer = np.empty(array.size * dtype.itemsize + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + array.size * dtype.itemsize].view(dtype).reshape(array.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # as JAX converts
        copy[...] = array
    return copy


def first_of(given: Any) -> Any:
    """The first item of lists in lists; what is no list, or an empty one, is itself."""
    while isinstance(given, (list, tuple)) and given:
        given = given[0]
    return given


def check_no_mask(given: Any, where: str = "") -> None:
    """Raises a TypeError for an array of NumPy's that masks some of its elements.

    Args:
      given: anything.
      where: table and operation; empty if the caller says it.
    """
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise TypeError(
            f"{where and f'kvjax: {where}: '}want all elements, got a masked array of NumPy, whose mask would be lost; "
            "give its .data, and mask=~np.ma.getmaskarray(ids) where masks are taken"
        )


def check_all_there(given: Any, where: str = "") -> None:
    """As `check_no_mask`, and for a column of real numbers with nulls. (Of ids, NumPy makes floats there, which are
    refused.)"""
    check_no_mask(given, where)
    if nulls := _nulls(given):
        raise TypeError(
            f"{where and f'kvjax: {where}: '}want all elements, got a column with {nulls} null, which NumPy does "
            "not have; fill or drop them first, in a mask by false, and leave what was filled out by mask= where masks "
            "are taken"
        )


def _nulls(given: Any) -> int:
    """How many elements of a column of Arrow, polars or pandas are null; a NaN in NumPy's numbers is a number."""
    count, dtype = getattr(given, "null_count", None), getattr(given, "dtype", None)
    if hasattr(given, "isna") and dtype is not None and not isinstance(dtype, np.dtype):
        count = given.isna().sum()
    return 0 if count is None else int(np.asarray(count() if callable(count) else count).sum())


def array_of(
    given: Any, table: str | None, op: str, want: str, mend: str = "convert them first"
) -> jax.Array:  # fmt: skip
    """The array of what a caller gives as rows, or as a mask.

    Raises:
      TypeError: it is none, as of strings, or has masked elements or nulls.
    """
    check_all_there(given, where_of(table, op))
    try:
        if isinstance(first_of(given), (str, bytes)):  # which JAX takes for names of dtypes
            raise TypeError
        return uncut(given)
    except (TypeError, ValueError):
        try:
            got = str(np.asarray(given).dtype)
        except (TypeError, ValueError):
            got = "lists that make no array"
        raise fail(TypeError, table, op, want, got, mend) from None


def check_reals(given: Any, array: Any, dtype: Any, table: str | None, op: str, want: str) -> None:
    """Whether the array of what a caller gives has real numbers (of complex ones a part would be lost, and bools are
    none), which are finite in a dtype as far as they are so. Those of a device are not waited for, and those of a
    program are not known.

    Raises:
      TypeError: it is of something else.
      ValueError: the host has a number that the dtype cannot hold.
    """
    import jax.numpy as jnp
    from jax.core import Tracer

    from kvjax._values.dtypes import too_large  # which needs more than NumPy

    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise fail(TypeError, table, op, want, str(array.dtype), "convert them first")
    if not isinstance(given, np.ndarray) and (not isinstance(given, Sequence) or isinstance(array, Tracer)):
        return
    numbers = np.asarray(given)
    if not np.can_cast(numbers.dtype, dtype) and (lost := too_large(numbers, dtype)).any():
        raise fail(
            ValueError, table, op, f"values that {np.dtype(dtype)} can hold", f"{numbers[lost][0]}",
            "scale them, or make the table with a wider dtype= if there is one",
        )  # fmt: skip


def reals_of(given: Any, dtype: Any, table: str | None, op: str, want: str) -> jax.Array:
    """As `array_of`, of real numbers as a dtype, which holds them."""
    with np.errstate(over="ignore"):  # which `check_reals` says
        array = array_of(given, table, op, want)
    check_reals(given, array, dtype, table, op, want)
    return array.astype(dtype)
