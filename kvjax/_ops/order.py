"""Calls that order others, one function per target: once their result exists, what they wait for has happened.

No derivative goes through them: they take the values as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from kvjax._ops.call import WORD, read, types_of
from kvjax._spec.spec import TableSpec


def after(spec: TableSpec, version: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    """The version, once the values exist."""
    return read("kvjax_after", WORD, version, *map(jax.lax.stop_gradient, values), table=spec.name)


def canary(spec: TableSpec, used: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    """The canary of a gradient, once the values exist, if no lookup was used more than once: used ``(lookups,)``."""
    # The same on all devices, whatever it waits for.
    call = jax.ffi.ffi_call("kvjax_canary", types_of(WORD), vmap_method="sequential")
    return call(*map(jax.lax.stop_gradient, (used, *values)), table=spec.name)
