"""Salts: the hash of integers in JAX, elementwise, so that each device of a program does its own keys.

The same as ``Salted`` in ``kvjax/ffi/core/hash.h``, on the two 32-bit words of a key: JAX may have no wider integers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.hashing import ODD, hash_integers
from kvjax._keys.shapes import check_salts
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._values.arrays import one_program
from kvjax.ffi import host

_Words = tuple[jax.Array, jax.Array]  # low and high


def salted(words: Any, salt: Any) -> Any:
    """A bijection of keys for every salt.

    Args:
      words: ``(..., 2)`` uint32 of NumPy or JAX, the low one first.
      salt: of 64 bits; or the words of salts, in a shape that broadcasts.

    Returns:
      Words ``(..., 2)``, in NumPy if all that was given is.

    Raises:
      ValueError: the salts do not broadcast to the keys.
    """
    shape = tuple(words.shape[:-1])
    if not isinstance(salt, int):
        check_salts(salt.shape[:-1], shape, "Keys.salted")
    if not isinstance(words, jax.Array) and not isinstance(salt, jax.Array):
        salts = salt if isinstance(salt, int) else _flat(np.broadcast_to(salt, words.shape))
        return hash_integers(_flat(words), salts).view(np.uint32).reshape(words.shape)
    if isinstance(salt, int):
        return _mixed_with(words, _constant(_first(salt)))

    def run(words: Any, salt: Any) -> Any:
        return (_mixed_with_each(words, salt),), ()

    return as_auto(run, sharding_of(words, len(shape)), jnp.asarray(words), jnp.asarray(salt))[0][0]


def _flat(words: np.ndarray) -> np.ndarray:
    """Keys ``(n,)`` int64 of words ``(..., 2)``."""
    return np.ascontiguousarray(words).reshape(-1, 2).view(np.int64)[:, 0]


def _first(salt: int) -> int:
    """What is added to keys: with salt 0 the host adds `ODD` alone before it mixes."""
    (mix,) = host.hash_integers(np.array([(salt - ODD) % 2**64], np.uint64).view(np.int64), 0).tolist()
    return mix + ODD


@one_program()  # of any number that is added, so that all salts share its trace
def _mixed_with(words: Any, first: _Words) -> jax.Array:
    return jnp.stack(mixed(*_add((words[..., 0], words[..., 1]), first)), -1)


@one_program()
def _mixed_with_each(words: Any, salt: Any) -> jax.Array:
    salt = jnp.broadcast_to(salt, words.shape)
    return _mixed_with(words, _add(mixed(salt[..., 0], salt[..., 1]), _constant(ODD)))


def mixed(low: jax.Array, high: jax.Array) -> _Words:
    """The frozen hash of keys, ``Mix``: the low and the high word, each ``(...)`` uint32."""
    x = _times(_shifted((low, high), 30), 0xBF58476D1CE4E5B9)
    x = _times(_shifted(x, 27), 0x94D049BB133111EB)
    return _shifted(x, 31)


def _constant(number: int) -> Any:
    return np.uint32(number & 0xFFFFFFFF), np.uint32(number >> 32 & 0xFFFFFFFF)


def _add(x: _Words, y: _Words) -> _Words:
    low = x[0] + y[0]
    return low, x[1] + y[1] + (low < x[0]).astype(jnp.uint32)


def _shifted(x: _Words, bits: int) -> _Words:
    """x ^ (x >> bits), for fewer than 32 bits."""
    low, high = x
    return low ^ (low >> bits | high << (32 - bits)), high ^ (high >> bits)


def _times(x: _Words, constant: int) -> _Words:
    low, high = x
    c_low, c_high = jnp.uint32(constant & 0xFFFFFFFF), jnp.uint32(constant >> 32)
    # The upper half of low * c_low, from its four products of 16 bits.
    a, b, c, d = low & 0xFFFF, low >> 16, c_low & 0xFFFF, c_low >> 16
    middle = (a * c >> 16) + (a * d & 0xFFFF) + (b * c & 0xFFFF)
    upper = b * d + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
    return low * c_low, upper + low * c_high + high * c_low
