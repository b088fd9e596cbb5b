"""Varying axes: over which axes of a ``shard_map`` JAX knows values to differ between devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType


def varying(x: Any) -> frozenset[str]:
    """The axes over which a tree of values differs between devices, as far as JAX knows."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(x):
        axes |= frozenset(getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", ()))
    return axes


def varies(x: Any) -> bool:
    """Whether JAX takes a value to differ between the devices of a ``shard_map``."""
    return bool(varying(x))


def varying_like(results: Any, *operands: Any) -> Any:
    """Results that vary over the axes of a ``shard_map`` over which any operand does; FFI calls don't say so."""
    return varying_over(results, varying(operands))


def varying_over(results: Any, axes: Iterable[str]) -> Any:
    """Results that vary over these axes at least."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(frozenset(axes) - varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, results) if axes else results


def known(axes: Iterable[str]) -> bool:
    """Whether JAX keeps track of it here: it does with ``check_vma=True``, and nowhere else."""
    return all(varies(jax.lax.axis_index(axis)) for axis in axes)


def manual_axes() -> dict[str, int]:
    """The axes of the ``shard_map`` or ``pmap`` around, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ())}


def axis_index(axes: tuple[str, ...]) -> Any:
    """The place of this device along some axes, 0 along none."""
    return jax.lax.axis_index(axes) if axes else 0


def zeros(kind: Any) -> jax.Array:
    """float32 zeros of the shape of a type that ``jax.typeof`` gave, with its sharding and over its varying axes."""
    sharding = getattr(kind, "sharding", None)
    explicit = sharding is not None and AxisType.Explicit in getattr(sharding.mesh, "axis_types", ())
    x = jax.lax.full(kind.shape, 0, jnp.float32, sharding=sharding if explicit else None)
    return varying_over(x, getattr(getattr(kind, "manual_axis_type", None), "varying", ()))
