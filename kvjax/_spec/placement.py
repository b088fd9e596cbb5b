"""Placement: on which devices of a mesh the rows of a table live, and by which rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax._keys.keys import Keys, as_keys
from kvjax.ffi import host, ordinal


class Local(NamedTuple):
    """A shard that this process holds.

    Attributes:
      device: the device ordinal of its FFI calls.
      shard: which of the table's shards it is.
      replica: 0, or more for copies of the same shard.
    """

    device: int
    shard: int
    replica: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """A table that is sharded over the devices of some axes of a mesh, or that each of them has a copy of.

    Over the axes of the mesh that it does not name it is replicated, as an array with such a sharding is.

    Attributes:
      mesh: with Auto axes, whatever those of the user's mesh are.
      axes: names of the axes, in the order that numbers the shards.
      partitioner: ``(keys (n,), num_shards) -> (n,)`` int32, or None for virtual buckets.
      replicated: whether every device of the axes has all rows.
      wire: the type in which rows travel, or None for the table's own.
      explicit: the user's mesh, where that has Explicit axes: rows of keys that are on no mesh are on this one.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    partitioner: Callable[[Keys, int], Any] | None = None
    replicated: bool = False
    wire: str | None = None
    explicit: Mesh | None = None

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...], **options: Any) -> Placement:
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return cls(auto, axes, **options, explicit=mesh if AxisType.Explicit in mesh.axis_types else None)

    def __str__(self) -> str:
        """ "4 shards over mesh {'x': 4}", in errors."""
        rows = "a copy on each device" if self.replicated else f"{self.num_shards} shards"
        axes = "" if self.axes == self.mesh.axis_names else f" along {', '.join(map(repr, self.axes))}"
        by = getattr(self.partitioner, "__name__", repr(self.partitioner))
        rest = "" if self.partitioner is None else f" by {by}"
        return f"{rows} over mesh {dict(self.mesh.shape)}{axes}{rest}{f', wire {self.wire}' if self.wire else ''}"

    def is_like(self, other: Placement | None) -> bool:
        """Whether rows live in the same way on the same devices, whatever the kinds of axes."""
        return other is not None and dataclasses.replace(self, explicit=other.explicit) == other

    @property
    def num_devices(self) -> int:
        """Along the axes: into so many pieces a batch is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def alone(self) -> bool:
        """Whether one device is all of the mesh: then nobody has to agree with another."""
        return self.mesh.size == 1

    @property
    def num_shards(self) -> int:
        return 1 if self.replicated else self.num_devices

    @property
    def everywhere(self) -> NamedSharding:
        """Of values that every device has."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """Those that have devices of the mesh, in order."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))

    @property
    def num_processes(self) -> int:
        return len(self.processes)

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """``(num_shards, replicas)``."""
        names = list(self.mesh.axis_names)
        order = [names.index(axis) for axis in self.axes]
        rest = [i for i in range(len(names)) if i not in order]
        return np.transpose(self.mesh.devices, order + rest).reshape(self.num_shards, -1)

    @property
    def writers(self) -> tuple[int, ...]:
        """The processes that have the first copy of a shard, in order: together they have each row once."""
        return tuple(sorted({device.process_index for device in self.devices[:, 0]}))

    @functools.cached_property
    def local(self) -> tuple[Local, ...]:
        """The shards of this process, in the order of the mesh."""
        return tuple(
            Local(ordinal(device), shard, replica)
            for (shard, replica), device in np.ndenumerate(self.devices)
            if device.process_index == jax.process_index()
        )

    @property
    def kept(self) -> list[tuple[int, Local]]:
        """One copy of each shard that this process has, and its number among the local ones."""
        first: dict[int, tuple[int, Local]] = {}
        for i, shard in enumerate(self.local):
            first.setdefault(shard.shard, (i, shard))
        return list(first.values())

    def buckets(self, first: int, last: int) -> tuple[int, int]:
        """The virtual buckets [begin, end) that the shards first..last own; ``OwnerOf`` in C++ is the inverse."""
        n = self.num_shards
        return -(-first * host.NUM_BUCKETS // n), -(-(last + 1) * host.NUM_BUCKETS // n)

    def cells(self, first: int, last: int, size: int) -> slice:
        """Those of the `size` cells of a sketch that the shards first..last use; a partitioner knows no buckets, so all
        are used then."""
        if self.partitioner is not None or self.replicated:
            return slice(0, size)
        begin, end = self.buckets(first, last)
        width = size // host.NUM_BUCKETS
        return slice(begin * width, end * width)

    def owned(self, keys: np.ndarray) -> np.ndarray:
        """Which keys ``(n,)``, of 64 bits, belong to a shard of this process: ``(n,)`` bool."""
        return np.isin(self.owners(keys.view(np.int64)), [shard.shard for shard in self.local])

    def owners(self, keys: np.ndarray) -> np.ndarray:
        """The shard of each key.

        Args:
          keys: ``(n,)`` int64.

        Returns:
          ``(n,)`` int32.

        Raises:
          ValueError: the partitioner gives something else.
        """
        if self.partitioner is None or self.replicated:
            return host.owners(np.ascontiguousarray(keys, np.int64), self.num_shards)
        asked = Keys(jnp.asarray(as_keys(keys).words))  # as in a program
        owners = np.asarray(self.partitioner(asked, self.num_shards), np.int32)
        if owners.shape != keys.shape or ((owners < 0) | (owners >= self.num_shards)).any():
            got = f"{owners.shape}" if owners.shape != keys.shape else f"{owners.min()}..{owners.max()}"
            raise ValueError(
                f"kvjax: partitioner: want ({len(keys)},) shards in 0..{self.num_shards - 1}, got {got}; "
                "partitioner(keys, num_shards) returns the shard of each key"
            )
        return owners


def described(placement: Placement | None) -> dict[str, Any] | None:
    """Where rows are, as far as processes can compare it: of a partitioner, the shards that it gives to some keys."""
    if placement is None or placement.num_processes == 1:  # which has nobody to compare it with
        return None
    devices = [device.id for device in placement.mesh.devices.flat]
    try:
        shards = None if placement.partitioner is None else placement.owners(np.arange(_PROBES)).tolist()
    except ValueError as error:  # which the operation comes to, where the others hear of it
        shards = str(error)
    return {
        "devices": devices, "axes": list(placement.axes), "replicated": placement.replicated,
        "shards of 0 to 63": shards,
    }  # fmt: skip


_PROBES = 64
"""Keys whose shards are compared."""
