"""Narrow ids: integers of JAX that may have been cut to 32 bits, and the error for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def x64_enabled() -> bool:
    """Whether JAX has 64-bit integers now."""
    return jnp.result_type(int).itemsize == 8


def is_narrow(ids: jax.Array) -> bool:
    """Whether ``jit`` or ``jnp`` may have cut these integers to 32 bits."""
    return ids.dtype.itemsize == 4 and not x64_enabled()


def narrow_error(where: str) -> TypeError:
    return TypeError(
        f"kvjax: {where}: want ids of 64 bits, got a JAX array of 32-bit integers while jax_enable_x64 is off, to "
        "which jit and jnp cut NumPy's 64-bit ids; make keys of NumPy's ids, before a compiled function takes "
        "them; for ids that never had more than 32 bits say kvjax.keys(ids, key_dtype='int32')"
    )
