"""Mixing: words of 32 bits in JAX whose bits each depend on all of the words that they are made of.

Source: the 32-bit finaliser of MurmurHash3 (A. Appleby).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def mix(x: jax.Array) -> jax.Array:
    """Mixes the 32 bits of uint32 of any shape; a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def mixed(words: Iterable[Any]) -> jax.Array:
    """One word of several, uint32 of shapes that broadcast, in this order."""
    state = jnp.uint32(0)
    for word in words:
        # Adding an odd constant between the mixings keeps zeros from mapping to zero.
        state = mix((state ^ jnp.asarray(word, jnp.uint32)) + jnp.uint32(0x9E3779B9))
    return state
