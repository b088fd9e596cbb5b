"""Explicit mesh axes, made Auto around a part of a program that knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def explicit_mesh(operands: Any) -> Any:
    """The mesh with Explicit axes that the program around is on, or None: also where some are Manual, from which JAX
    makes none Auto."""
    meshes = [jax.sharding.get_abstract_mesh(), *_meshes(operands)]
    kinds = [({*m.axis_types}, m) for m in meshes if not m.empty]
    return next((m for types, m in kinds if AxisType.Explicit in types and AxisType.Manual not in types), None)


def on_some_mesh(operands: Any) -> bool:
    """Whether the type of an array says that it is on a mesh."""
    return any(not mesh.empty for mesh in _meshes(operands))


def _meshes(operands: Any) -> list[Any]:
    return [x.sharding.mesh for x in map(jax.typeof, jax.tree.leaves(operands)) if getattr(x, "sharding", None)]


def as_auto(run: Callable[..., Any], leading: tuple[Any, ...], *operands: Any) -> Any:
    """Calls run(*operands) with Explicit axes made Auto. Of its results, a pair of tuples, the arrays of the first get
    the sharding `leading` (and are whole along their other axes), and those of the second none."""
    explicit = explicit_mesh(operands)
    if explicit is None:
        return run(*operands)
    shardings = (NamedSharding(explicit, P(*leading)), NamedSharding(explicit, P()))
    return jax.sharding.auto_axes(run, out_sharding=shardings)(*operands)


def sharding_of(x: Any, ndim: int) -> tuple[Any, ...]:
    """What the type of an array says about the sharding of its first axes."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return tuple(sharding.spec)[:ndim] if sharding is not None and not sharding.mesh.empty else ()
