"""Narrow ids: integers of JAX that may have been cut to 32 bits, and the error for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def x64_enabled() -> bool:
    """Whether JAX has 64-bit integers now."""
    return jnp.result_type(int).itemsize == 8


def is_narrow(ids: Any) -> bool:
    """Whether these are integers that ``jit`` or ``jnp`` may have cut to 32 bits, or nested sequences with such."""
    return not x64_enabled() and _holds_narrow(ids)


def _holds_narrow(ids: Any) -> bool:
    if isinstance(ids, (list, tuple)):  # by their few types first, as there may be many ids
        some = any(issubclass(each, (list, tuple, jax.Array)) for each in set(map(type, ids)))
        return some and any(map(_holds_narrow, ids))
    return isinstance(ids, jax.Array) and ids.dtype.itemsize == 4 and jnp.issubdtype(ids.dtype, jnp.integer)


def narrow_error(where: str) -> TypeError:
    return TypeError(
        f"kvjax: {where}: want ids of 64 bits, got a JAX array of 32-bit integers while jax_enable_x64 is off, to "
        "which jit and jnp cut NumPy's 64-bit ids; make keys of NumPy's ids, before a compiled function takes "
        "them; for ids that never had more than 32 bits say kvjax.keys(ids, key_dtype='int32')"
    )
