"""Replicated arrays, moved to the mesh of the program around them without waiting for them."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def on_mesh_around(x: Any, table: Mesh | None) -> Any:
    """A replicated array as one of the mesh of the program around it; anything else as it is.

    JAX takes an array of no other mesh as soon as one of the two has Explicit axes. A mesh of other devices is left to
    JAX and to the call that meets it.

    Args:
      x: an array that each device of its mesh has. Its buffers stay, so that it is donated where the result is.
      table: the mesh of its table. ``pmap`` returns an array of this process's devices alone, which becomes one of all.
    """
    own = mesh = _mesh_of(x)
    if own is None or mesh is None:
        return x
    if table is not None and table.is_multi_process and set(own.devices.flat) == set(table.local_devices):
        mesh = table
    around = jax.sharding.get_abstract_mesh()
    if _clash(mesh, around) and mesh.size == around.size:
        types = (AxisType.Auto,) * len(around.axis_names) if around.manual_axes else around.axis_types
        mesh = Mesh(mesh.devices.reshape(around.axis_sizes), around.axis_names, axis_types=types)
    if mesh is own:
        return x
    with jax.ensure_compile_time_eval():  # of a handle that a program closes over, too
        return jax.make_array_from_single_device_arrays(
            x.shape, NamedSharding(mesh, P()), [shard.data for shard in x.addressable_shards]
        )


def clashes(x: Any) -> bool:
    """Whether JAX would refuse an array in the program around it, for its mesh."""
    own = _mesh_of(x)
    return own is not None and _clash(own, jax.sharding.get_abstract_mesh())


def _mesh_of(x: Any) -> Mesh | None:
    """By ``x.device``: JAX makes the sharding of an opaque word anew each time, which takes as long as a lookup."""
    return getattr(x.device, "mesh", None) if isinstance(x, jax.Array) and not isinstance(x, Tracer) else None


def _clash(mesh: Mesh, around: AbstractMesh) -> bool:
    own = mesh.abstract_mesh
    if around.manual_axes:  # one device's program closes over arrays of any mesh without Explicit axes
        return AxisType.Explicit in own.axis_types
    return not around.empty and own != around and not (own.are_all_axes_auto and around.are_all_axes_auto)
