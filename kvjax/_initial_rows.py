"""Initial rows that the C++ side cannot make itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._keys import Keys
from kvjax._spec import TableSpec


def initial_rows(spec: TableSpec, version: jax.Array, keys: Keys, mask: jax.Array) -> jax.Array:
    """Rows ``(m, dim)`` for the distinct keys of a call that have no row, in the order in which they first occur.

    None for native initializers, ``(0, dim)``: C++ makes them when it meets such a key.
    """
    return jnp.zeros((0, spec.dim), spec.row_dtype)
