"""The equality of what devices and processes were given, by sums of its bytes, which travel in the place of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._ops import routing
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._values.mixing import mix


def check_equal(spec: TableSpec, op: str, values: Any, axes: tuple[str, ...]) -> jax.Array:
    """A status ``()`` uint32: that of a failure where devices along these axes have other values."""
    return _check(spec, op, _sum(values), axes)


def checksum(placement: Placement, values: Any) -> jax.Array | None:
    """What a program over several processes hands to `check_processes`; None in one process.

    Each process has made its own array of what is not sharded, and JAX does not compare them.
    """
    return _sum(values) if placement.num_processes > 1 else None


def check_processes(spec: TableSpec, op: str, sum_: jax.Array | None) -> jax.Array:
    """A status ``()`` uint32: that of a failure where processes have other values."""
    return jnp.uint32(0) if sum_ is None else _check(spec, op, sum_, spec.mesh_placement.mesh.axis_names)


def _check(spec: TableSpec, op: str, sum_: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return routing.check_equal(spec, op, jax.lax.pmin(sum_, axes), jax.lax.pmax(sum_, axes))


def _sum(values: Any) -> jax.Array:
    return sum((_checksum(x, i) for i, x in enumerate(jax.tree.leaves(values))), jnp.uint32(0))


def _checksum(x: jax.Array, number: int) -> jax.Array:
    """``()`` uint32 of the bits of an array, and of its size."""
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    words = jax.lax.bitcast_convert_type(bits, f"uint{min(8 * bits.dtype.itemsize, 32)}").astype(jnp.uint32).reshape(-1)
    places = mix(jnp.arange(words.size, dtype=jnp.uint32) ^ mix(jnp.uint32(number)))
    # Without the mixing of words small ids have sums in common.
    return mix(jnp.uint32(words.size + 1)) + jnp.sum(mix(words ^ places), dtype=jnp.uint32)
