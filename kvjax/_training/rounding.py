"""Stochastic rounding: how an updated row goes into 16 bits without losing updates that are smaller than its spacing.

A value between two neighbours of the row type goes to either, with the probability that makes the mean exact. The
random bits are a hash of the table's seed, the step, the key, the column and the value itself, so training gives the
same rows however a batch is split, sharded or cut into chunks, and after a restore.

Source: stochastic rounding in training: Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited
Numerical Precision", ICML 2015.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._values.mixing import mix, mixed


def random_bits(rows: jax.Array, keys: jax.Array, step: jax.Array, seed: int) -> jax.Array:
    """32 random bits for each element.

    Args:
      rows: ``(n, dim)`` float32.
      keys: ``(n, 2)`` uint32, the words of the rows' keys.
      step: ``(2,)`` uint32, the words of the step.
      seed: the table's, 64 bits.

    Returns:
      ``(n, dim)`` uint32.
    """
    state = mixed((jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32), step[0], step[1], keys[:, 0], keys[:, 1]))
    columns = mix(jnp.arange(1, rows.shape[1] + 1, dtype=jnp.uint32))
    values = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    return mix(mix(state[:, None] ^ columns[None, :]) + values)


def stochastic(x: jax.Array, dtype: Any, random: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours, in the mean to `x` itself.

    What the type holds exactly stays as it is, and so do zeros, infinities and NaN. Beyond the largest finite value,
    where one neighbour would be infinity, values are rounded to nearest.

    Args:
      x: ``(...)`` float32.
      dtype: bfloat16 or float16.
      random: ``(...)`` uint32.

    Returns:
      ``(...)`` of that type.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bits = jax.random.bits(jax.random.key(0), (10_000,), "uint32")
      >>> rounded = stochastic(jnp.full(10_000, 1.0001), jnp.bfloat16, bits).astype(jnp.float32)
      >>> sorted(set(rounded.tolist())), f"{rounded.mean():.4f}"
      ([1.0, 1.0078125], '1.0001')
    """
    info = jnp.finfo(dtype)
    # The bits of a float are in the order of its magnitude: a random amount below the last bit that stays carries
    # into it with the right probability.
    tail = np.uint32((1 << (23 - info.nmant)) - 1)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + (random & tail)) & ~tail, jnp.float32)
    if info.minexp > jnp.finfo(jnp.float32).minexp:
        # Subnormal numbers of the type, which are normal ones of float32, are multiples of the smallest.
        unit = np.float32(info.smallest_subnormal)
        multiple = jnp.abs(x) / unit
        low = jnp.floor(multiple)
        chance = (random >> 8).astype(jnp.float32) * np.float32(2**-24)
        small = jnp.copysign((low + (chance < multiple - low).astype(jnp.float32)) * unit, x)
        rounded = jnp.where(jnp.abs(x) < np.float32(info.smallest_normal), small, rounded)
    return jnp.where(jnp.abs(x) <= np.float32(info.max), rounded, x).astype(dtype)
