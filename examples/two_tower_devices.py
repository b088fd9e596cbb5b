"""The devices of ``two_tower.py``: one, several, or those of several processes.

Tables are sharded over the devices of a mesh, batches are cut along it, and the dense parameters are on all of them.
Every process reads the same stream and keeps its pieces of each batch; process 0 alone prints and writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
from arguments import natural, positive
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=positive, default=1, help="of each process, to shard tables and batches over")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, for several processes")
    parser.add_argument("--processes", type=positive, default=1, help="how many there are")
    parser.add_argument("--process", type=natural, default=0, help="which one this is")


@dataclasses.dataclass
class Devices:
    """The mesh, or None: everything is on one device then."""

    mesh: Mesh | None = None

    @classmethod
    def join(cls, args: argparse.Namespace) -> Devices:
        """To be called before JAX is used: where there are not enough devices, the host makes them."""
        if args.process >= args.processes or (args.processes > 1 and not args.coordinator):
            raise SystemExit("several processes want --coordinator, and --process from 0 to --processes - 1")
        n = args.devices * args.processes
        if args.batch % n:
            raise SystemExit(f"--batch {args.batch} cannot be cut into {n} equal pieces")
        if args.devices > 1:
            os.environ.setdefault("NPROC", str(4 * args.devices))  # threads: collectives of host devices wait in them
        jax.config.update("jax_num_cpu_devices", args.devices)
        if args.coordinator:
            jax.distributed.initialize(
                args.coordinator, args.processes, args.process,
                heartbeat_timeout_seconds=20, shutdown_timeout_seconds=60,
            )  # fmt: skip
        if n == 1:
            return cls()
        devices = jax.devices() if jax.local_device_count() >= args.devices else jax.devices("cpu")
        own = {p: [d for d in devices if d.process_index == p][: args.devices] for p in range(args.processes)}
        return cls(Mesh(np.array([d for some in own.values() for d in some]), ("x",)))

    @property
    def everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, state: Any) -> Any:
        """A state, whose tables are where they are and whose other values all devices get."""
        if self.mesh is None:
            return state
        dense, tables = kvjax.orbax.split(state)
        return kvjax.orbax.combine(jax.tree.map(lambda x: self._put(x, PartitionSpec()), dense), tables)

    def cut(self, batch: Any) -> Any:
        """Arrays `(n, ...)` along their first axis."""
        return batch if self.mesh is None else jax.tree.map(lambda x: self._put(x, PartitionSpec("x")), batch)

    def _put(self, x: Any, spec: PartitionSpec) -> jax.Array:
        x, sharding = np.asarray(x), NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)  # each process gives its own pieces


def whole(rows: kvjax.Exported) -> kvjax.Exported:
    """The exports of all processes as one; each has the rows of its own devices, in the order of the devices."""
    if jax.process_count() == 1:
        return rows
    names = ("keys", "values", "freqs", "versions", "has_slots", "pinned")
    return dataclasses.replace(rows, **{name: _joined(getattr(rows, name)) for name in names})


def _joined(array: np.ndarray) -> np.ndarray:
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(array))))
    # As bytes: JAX would cut integers of 64 bits.
    own = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.itemsize * math.prod(array.shape[1:]))
    padded = np.pad(own, ((0, int(lengths.max()) - len(own)), (0, 0)))
    parts = multihost_utils.process_allgather(padded)
    flat = np.concatenate([part[:n] for part, n in zip(parts, lengths, strict=True)])
    return flat.reshape(-1).view(array.dtype).reshape(-1, *array.shape[1:])


def is_first() -> bool:
    """Whether this process prints and writes."""
    return jax.process_index() == 0


def meet(where: str) -> None:
    """Waits for the other processes."""
    multihost_utils.sync_global_devices(where)
