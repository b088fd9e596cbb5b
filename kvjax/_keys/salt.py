"""Salts: the hash of integers in JAX, elementwise, so that each device of a program does its own keys.

The same as ``Salted`` in ``kvjax/ffi/core/hash.h``, on the two 32-bit words of a key: JAX may have no wider integers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.ffi import host

_Words = tuple[jax.Array, jax.Array]  # low and high


def salted(words: jax.Array, salt: int) -> jax.Array:
    """A bijection of keys for every salt: words ``(..., 2)`` uint32, the low one first."""
    odd = 0x9E3779B97F4A7C15
    # With salt 0 the host adds `odd` alone before it mixes.
    (first,) = host.hash_integers(np.array([(salt - odd) % 2**64], np.uint64).view(np.int64), 0).tolist()
    return jnp.stack(mixed(*_add((words[..., 0], words[..., 1]), (first + odd) % 2**64)), -1)


def mixed(low: jax.Array, high: jax.Array) -> _Words:
    """The frozen hash of keys, ``Mix``: the low and the high word, each ``(...)`` uint32."""
    x = _times(_shifted((low, high), 30), 0xBF58476D1CE4E5B9)
    x = _times(_shifted(x, 27), 0x94D049BB133111EB)
    return _shifted(x, 31)


def _add(x: _Words, constant: int) -> _Words:
    low = x[0] + jnp.uint32(constant & 0xFFFFFFFF)
    carry = (low < x[0]).astype(jnp.uint32)
    return low, x[1] + jnp.uint32(constant >> 32) + carry


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
