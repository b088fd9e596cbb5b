"""Collectives: what the devices of a mesh tell each other in one device's part of an operation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._spec.placement import Placement
from kvjax._spmd.varying import known, manual_axes, varying, varying_over


def agreed(number: jax.Array) -> jax.Array:
    """The largest of the devices' numbers ``()``: what all of them, copies included, go by."""
    axes = tuple(manual_axes())
    return jax.lax.pmax(varying_over(number, axes if known(axes) else ()), axes) if axes else number


def repeated(placement: Placement, values: Any) -> tuple[str, ...]:
    """Axes of the table over which values of a ``shard_map`` are the same on all devices.

    JAX knows that with ``check_vma=True``. Without it, and under ``pmap``, each device is taken to have its own.
    """
    return tuple(axis for axis in placement.axes if known([axis]) and axis not in varying(values))


def position(placement: Placement) -> jax.Array:
    """``()`` int32: which shard this device is."""
    return jnp.int32(0) if placement.replicated else jax.lax.axis_index(placement.axes)


def swap(placement: Placement, x: jax.Array) -> jax.Array:
    """``(num_shards, ...)``, what there is for each shard, to the same of what has come from each."""
    return jax.lax.all_to_all(x, placement.axes, 0, 0, tiled=True)


def from_all(axes: tuple[str, ...], values: Any) -> Any:
    """A tree of arrays ``(n, ...)``, each joined with those of the other devices along the axes, in their order."""
    if not axes:
        return values
    over = varying(values)
    return jax.tree.map(lambda x: jax.lax.all_gather(varying_over(x, over), axes, axis=0, tiled=True), values)
