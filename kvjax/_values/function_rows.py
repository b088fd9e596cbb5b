"""Initial rows by any function ``(rng, shape, dtype)``, such as those of ``jax.nn.initializers``.

The function is called for each key by itself, with a random key made of the table's seed and the key. So the row of a
key is the same in any batch, and the same under any flags: the generator is pinned to the threefry2x32 of partitionable
arrays, and the types to those of 32-bit JAX.

Source: threefry2x32: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, as JAX implements it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._values.generators import check_held
from kvjax._values.tracing import computed_now

_PROBES = np.array([[0, 0], [7, 0], [1, 2**31]], np.uint32)


def probes(function: Any, dim: int, dtype: str) -> tuple[float, ...]:
    """Elements of the rows that a function gives a few probe keys, to 4 digits.

    Raises:
      TypeError: the function takes or returns something else.
      ValueError: its numbers are not finite in the dtype of a table's rows, or do not depend on the rng alone.
    """
    want = f"want an initializer (rng, shape, dtype) -> array of shape (1, {dim}) float32"
    try:
        with _pinned():
            row = jax.eval_shape(lambda words: _call(function, 0, words, dim), jnp.zeros(2, jnp.uint32))
    except Exception as error:
        raise TypeError(
            f"{want}, got one that raises {type(error).__name__}: {error}; a table calls it for each key by itself"
        ) from error
    if not isinstance(row, jax.ShapeDtypeStruct) or row.shape != (1, dim) or row.dtype != jnp.float32:
        raise TypeError(f"{want}, got {row}; a table calls it for each key by itself")
    with computed_now():
        found, again = (np.asarray(rows(function, 0, jnp.asarray(_PROBES), dim)) for _ in range(2))
    if not np.array_equal(found, again, equal_nan=True):
        raise ValueError(
            f"{want}, the same for the same rng, got one that gives others in a second call, and so one row for all "
            "keys of a batch; draw by jax.random of the rng"
        )
    check_held(found, dtype, "a function")
    return tuple(float(f"{x:.4g}") for x in found[:, [0, dim // 2, dim - 1]].reshape(-1))


def rows(function: Any, seed: int, words: jax.Array, dim: int) -> jax.Array:
    """Initial rows ``(n, dim)`` float32 of keys, whose words are ``(n, 2)`` uint32."""
    with _pinned():
        return jax.vmap(lambda key: _call(function, seed, key, dim)[0])(words)


def rng_of(seed: int, words: jax.Array) -> jax.Array:
    """The random key ``()`` of one key, whose words ``(2,)`` uint32 are folded into the table's seed."""
    high, low = seed >> 32, seed & 0xFFFFFFFF
    rng = jax.random.wrap_key_data(jnp.array([high, low], jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(rng, words[0]), words[1])


def _call(function: Any, seed: int, words: jax.Array, dim: int) -> Any:
    return function(rng_of(seed, words), (1, dim), jnp.float32)


@contextlib.contextmanager
def _pinned():
    with (
        jax.threefry_partitionable(True),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
