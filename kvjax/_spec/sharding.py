"""Sharding: the arguments that say over which devices a table's rows are sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax._keys.keys import Keys
from kvjax._spec.options import type_made
from kvjax._spec.placement import Placement
from kvjax._spec.unsupported import check_sharding
from kvjax._values.arrays import ArrayLike
from kvjax._values.dtypes import ROW_DTYPES, dtype_name
from kvjax._values.errors import fail


@dataclasses.dataclass(kw_only=True, repr=False)
class Sharding:
    """Arguments that say where a table's rows live, of `kvjax.get_table`, `kvjax.reshard` and `TableRestore`."""

    mesh: Mesh | None = None
    devices: Sequence[object] | None = None  # JAX's devices, whose class type checkers take for a variable
    axis: str | tuple[str, ...] | None = None
    partitioner: Callable[[Keys, int], ArrayLike] | None = None
    replicated: bool = False
    wire: DTypeLike | None = None

    @property
    def given(self) -> bool:
        """Whether it is said where the rows are."""
        return self.mesh is not None or self.devices is not None


def placement_of(sharding: Sharding, name: str, op: str) -> Placement | None:
    """Where the arguments put a table; None without a mesh.

    Args:
      sharding: the arguments.
      name: of the table, for errors.
      op: for errors.

    Raises:
      ValueError: the arguments do not fit each other or the mesh, or this jax cannot run such tables.
    """

    def want(ok: Any, what: str, got: Any) -> None:
        if not ok:
            raise fail(ValueError, name, op, what, repr(got), "see kvjax.get_table")

    partitioner, devices = sharding.partitioner, sharding.devices
    want(sharding.mesh is None or devices is None, "mesh= or devices=, not both", devices)
    mesh = sharding.mesh if devices is None else _mesh_of(devices, want)
    if mesh is None:
        for key in ("axis", "partitioner", "replicated", "wire"):
            want(not getattr(sharding, key), f"mesh= or devices= beside {key}=", getattr(sharding, key))
        return None
    want(isinstance(mesh, Mesh), "a jax.sharding.Mesh", mesh)  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
    want(mesh.local_devices, "a mesh with devices of this process", mesh)
    check_sharding(name, op)
    names, axis = tuple(mesh.axis_names), sharding.axis
    axes = names if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    fits = axes and len(set(axes)) == len(axes) and set(axes) <= set(names)
    want(fits, f"axis of the mesh's {names}", axis)
    want(partitioner is None or callable(partitioner), "a function (keys, num_shards)", partitioner)
    want(partitioner is None or not sharding.replicated, "no partitioner beside replicated=True", partitioner)
    if partitioner is not None:
        num_shards = math.prod(mesh.shape[axis] for axis in axes)
        got = type_made(partitioner, lambda words: partitioner(Keys(words), num_shards), np.zeros((3, 2), np.uint32))
        want(got in ("int32[3]", "int64[3]", "uint32[3]"), "partitioner(keys (3,), num_shards) -> int32[3]", got)
    wire = None if sharding.wire is None else dtype_name(sharding.wire)
    want(wire is None or wire in ROW_DTYPES, f"wire in {ROW_DTYPES}", wire)
    return Placement.of(mesh, axes, partitioner=partitioner, replicated=bool(sharding.replicated), wire=wire)


def _mesh_of(devices: Sequence[object], want: Callable[[Any, str, Any], None]) -> Mesh:
    """The mesh of one axis, "devices", that has these; equal lists give equal meshes."""
    kind: Any = jax.Device
    fits = isinstance(devices, (list, tuple)) and all(isinstance(device, kind) for device in devices)
    want(fits and len(set(devices)) == len(devices) > 0, "devices as a list of different JAX devices", devices)
    return Mesh(np.array(devices), ("devices",))
