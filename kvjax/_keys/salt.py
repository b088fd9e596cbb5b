"""Salts: the hash of integers in JAX, elementwise, so that each device of a program does its own keys.

The same as ``Salted`` in ``kvjax/ffi/core/hash.h``. Programs have integers of 64 bits, whether or not x64 is on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.hashing import ODD, hash_integers
from kvjax._keys.shapes import check_salts
from kvjax._keys.words import integers_of, words_of
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._values.arrays import one_program
from kvjax.ffi import host


def salted(words: Any, salt: Any, where: str) -> Any:
    """A bijection of keys for every salt.

    Args:
      words: ``(..., 2)`` uint32 of NumPy or JAX, the low one first.
      salt: of 64 bits; or the words of salts, in a shape that broadcasts.
      where: for errors.

    Returns:
      Words ``(..., 2)``, in NumPy if all that was given is.

    Raises:
      ValueError: the salts do not broadcast to the keys.
    """
    shape = tuple(words.shape[:-1])
    if not isinstance(salt, int):
        check_salts(salt.shape[:-1], shape, where)
    if not isinstance(words, jax.Array) and not isinstance(salt, jax.Array):
        salts = salt if isinstance(salt, int) else _flat(np.broadcast_to(salt, words.shape))
        return hash_integers(_flat(words), salts).view(np.uint32).reshape(words.shape)
    if isinstance(salt, int):
        return _mixed_with(words, _first(salt))

    def run(words: Any, salt: Any) -> Any:
        return (_mixed_with_each(words, salt),), ()

    return as_auto(run, sharding_of(words, len(shape)), jnp.asarray(words), jnp.asarray(salt))[0][0]


def salted_parts(words: jax.Array, salts: Sequence[int | None], lengths: Sequence[int]) -> jax.Array:
    """Keys in parts, each of which has a salt, or None for none. The hash is one loop for XLA to compile, which takes
    it 35 ms, and not one for each part.

    Args:
      words: ``(..., n, 2)`` uint32.
      salts: one for each part.
      lengths: of the parts, in sum n.
    """
    if all(salt is None for salt in salts):
        return words

    def each(values: Sequence[np.ndarray]) -> jax.Array:
        """Of each key what its part has, ``(..., n, m)``. Neighbours of one length are one array."""
        pairs = itertools.groupby(zip(lengths, values, strict=True), lambda pair: pair[0])
        parts = [(length, np.stack([value for _, value in same])) for length, same in pairs]
        wide = [jnp.broadcast_to(x[:, None], (len(x), length, x.shape[1])) for length, x in parts]
        joined = jnp.concatenate([x.reshape(-1, x.shape[2]) for x in wide])
        return jnp.broadcast_to(joined, (*words.shape[:-1], joined.shape[1]))

    made = _mixed_with(words, each([_first(salt or 0) for salt in salts]))
    if None not in salts:
        return made
    return jnp.where(each([np.array([salt is not None]) for salt in salts]), made, words)


def _flat(words: np.ndarray) -> np.ndarray:
    """Keys ``(n,)`` int64 of words ``(..., 2)``."""
    return np.ascontiguousarray(words).reshape(-1, 2).view(np.int64)[:, 0]


def _first(salt: int) -> np.ndarray:
    """The words ``(2,)`` that are added to keys: with salt 0 the host adds `ODD` alone before it mixes."""
    mix = host.hash_integers(np.array([(salt - ODD) % 2**64], np.uint64).view(np.int64), 0)
    return (mix.view(np.uint64) + np.uint64(ODD)).view(np.uint32)


@one_program()  # of any number that is added, so that all salts share its trace
def _mixed_with(words: Any, first: Any) -> jax.Array:
    with jax.enable_x64(True):
        return words_of(_mixed(integers_of(words, jnp.uint64) + integers_of(first, jnp.uint64)))


@one_program()
def _mixed_with_each(words: Any, salt: Any) -> jax.Array:
    with jax.enable_x64(True):
        first = _mixed(integers_of(jnp.broadcast_to(salt, words.shape), jnp.uint64)) + jnp.uint64(ODD)
        return words_of(_mixed(integers_of(words, jnp.uint64) + first))


def mixed(words: jax.Array) -> jax.Array:
    """The hash of the format, ``Mix``, as words ``(..., 2)``."""
    with jax.enable_x64(True):
        return words_of(_mixed(integers_of(words, jnp.uint64)))


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ x >> jnp.uint64(30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> jnp.uint64(27)) * jnp.uint64(0x94D049BB133111EB)
    return x ^ x >> jnp.uint64(31)
