"""Words: integers of 64 bits in JAX as pairs of 32 bits, the low one first, and back.

By arithmetic and not ``bitcast_convert_type``: XLA does not find the shapes of those casts again where a program was
exported for any batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def words_of(integers: jax.Array) -> jax.Array:
    """``(..., 2)`` uint32 of integers ``(...)`` of 64 bits."""
    with jax.enable_x64(True):  # the integers may be from where it was on, and be used where it is off
        high = jax.lax.shift_right_logical(integers, jnp.asarray(32, integers.dtype))
        return jnp.stack([integers.astype(jnp.uint32), high.astype(jnp.uint32)], -1)


def integers_of(words: jax.Array, dtype: Any) -> jax.Array:
    """Integers ``(...)`` of 64 bits of words ``(..., 2)``, where JAX has such integers."""
    low, high = (words[..., i].astype(jnp.uint64) for i in (0, 1))
    return (low | jax.lax.shift_left(high, jnp.uint64(32))).astype(dtype)
