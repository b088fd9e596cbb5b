"""Shapes of keys: what they broadcast to, and whether salts and indices fit them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax._values.arguments import is_integer
from kvjax._values.errors import fail


def shape_of(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What shapes broadcast to, some of which may be symbolic.

    Raises:
      ValueError: they do not.
    """
    import jax.numpy as jnp  # a server that hashes its ids has none

    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"kvjax: Keys: want shapes that broadcast, got {', '.join(map(str, shapes))}; reshape or index one of "
            "them, as keys[:, None]"
        ) from None


def check_salts(salts: tuple[int, ...], shape: tuple[int, ...], where: str) -> None:
    """Whether an array has a salt for each key of a shape.

    Raises:
      ValueError: it does not broadcast to them.
    """
    pairs = zip(salts[::-1], shape[::-1], strict=False)
    if len(salts) > len(shape) or not all(n in (1, want) for n, want in pairs):
        mend = "give one salt, or an array that broadcasts to the keys"
        raise fail(ValueError, None, where, f"a salt for each key {shape}", f"salts {tuple(salts)}", mend)


def check_shape(sizes: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Whether keys of a shape may have another, in which one size may be -1; of symbolic sizes nobody knows.

    Raises:
      TypeError: a size is no integer.
      ValueError: it has another number of keys.
    """
    want, mend = "another shape of these keys", "give integers, of which one may be -1"
    if any(size is None or isinstance(size, (bool, float, str, tuple, list, np.ndarray)) for size in sizes):
        raise fail(TypeError, None, "Keys.reshape", want, f"{sizes}", mend)
    if not all(map(is_integer, (*sizes, *shape))):
        return
    known, size = math.prod(each for each in sizes if each != -1), math.prod(shape)
    free = sizes.count(-1)
    fits = known == size if free == 0 else free == 1 and (size % known == 0 if known else size == 0)
    if min(sizes, default=0) < -1 or not fits:
        raise fail(ValueError, None, "Keys.reshape", f"another shape of keys {shape}", f"{sizes}", mend)


def check_joined(shapes: Sequence[tuple[Any, ...]], axis: Any) -> None:
    """Whether keys of these shapes can be joined along an axis; a symbolic size fits any other.

    Raises:
      TypeError: the axis is no integer.
      ValueError: they have no such axis, or differ in another one.
    """
    op, got = "Keys.concatenate", f"axis {axis!r} of keys {', '.join(map(str, shapes))}"
    if not is_integer(axis):
        raise fail(TypeError, None, op, "an integer as axis", f"{axis!r}", "give the number of an axis")
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes) or not -ndim <= axis < ndim:
        raise fail(ValueError, None, op, "keys that all have the axis, and as many others", got, "reshape them first")
    for i, sizes in enumerate(zip(*shapes, strict=True)):
        if i != axis % ndim and len({size for size in sizes if is_integer(size)}) > 1:
            raise fail(ValueError, None, op, "shapes that are equal but for the axis", got, "reshape them first")


def check_index(index: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Whether keys of a shape have what an index asks for, as far as the host knows: JAX would clamp an integer that
    NumPy would refuse, or take the axis of the words.

    Raises:
      IndexError: it has more axes than the keys, or an integer that is out of bounds.
    """
    axis = 0
    for i, each in enumerate(index):
        if each is Ellipsis:
            axis = len(shape) - sum(map(_axes, index[i + 1 :]))
        if axis < len(shape) and is_integer(size := shape[axis]):
            known = _integers(each)
            if (beyond := known[(known < -size) | (known >= size)]).size:
                raise IndexError(
                    f"kvjax: Keys: want an index of axis {axis} of keys {shape}, got {beyond[0]}: out of bounds"
                )
        axis += _axes(each)
    if sum(map(_axes, index)) > len(shape):
        raise IndexError(f"kvjax: Keys: want at most {len(shape)} indices for keys of shape {shape}, got {index}")


def _integers(index: Any) -> np.ndarray:
    """The integers ``(n,)`` of an index that the host knows."""
    from jax.core import Tracer

    if index is None or isinstance(index, (slice, Tracer)) or not getattr(index, "is_fully_addressable", True):
        return np.zeros(0, int)
    known = np.asarray(index)
    return known.reshape(-1) if known.dtype.kind in "iu" else np.zeros(0, int)


def _axes(index: Any) -> int:
    """How many axes an index takes: a mask all of its own."""
    if index is None or index is Ellipsis:
        return 0
    known = index if hasattr(index, "dtype") else np.asarray(index)
    return known.ndim if known.dtype == bool else 1
