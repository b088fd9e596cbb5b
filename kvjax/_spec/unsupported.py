"""Combinations that are not supported yet: of options with a backend, and of sharded tables with a version of JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvjax import ffi
from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._values.errors import fail
from kvjax.storage import External, Hybrid, given_by_user

# What tables in the memory of a GPU cannot be yet, by the argument of kvjax.get_table that asks for it.
_NOT_ON_CUDA: dict[str, Callable[[TableSpec], bool]] = {
    "mesh= beside max_capacity=": lambda spec: spec.sharded and spec.max_capacity is not None,
    "mesh= beside evict=": lambda spec: spec.sharded and spec.evict is not None,
    # Pinned memory may wait for a GPU, which may wait for another one of the process.
    "mesh= over several GPUs of a process beside storage.Hybrid": lambda spec: (
        isinstance(spec.storage, Hybrid) and spec.placement is not None and len(spec.placement.local) > 1
    ),
    "mesh= beside a row that unadmitted keys share": lambda spec: spec.sharded and spec.shares_row,
}


def check_backend(spec: TableSpec, op: str) -> None:
    """Whether the backend of the table's storage is here, and can do what the table is asked for.

    Raises:
      RuntimeError: it is not here.
      ValueError: the table asks for what it cannot do yet.
    """
    if isinstance(spec.storage, External):
        _check_external(spec, spec.storage, op)
    backend = spec.storage.backend
    if backend == ffi.DEVICE and (trouble := ffi.trouble(backend)):
        raise fail(
            RuntimeError, spec.name, op, f"the backend {backend!r} for storage={spec.storage}",
            f"kvjax.backends()[{backend!r}] == {trouble!r}", "see docs/cuda.md, or storage=kvjax.storage.Host()",
        )  # fmt: skip
    if not ffi.is_device(backend):
        return
    for option, asked in _NOT_ON_CUDA.items():
        if asked(spec):
            mend = "leave it out, or storage=kvjax.storage.Host() in programs for the CPU"
            raise _not_on_cuda(spec, op, option, mend)


def _check_external(spec: TableSpec, storage: External, op: str) -> None:
    if ffi.is_device(spec.storage.backend):  # as host threads emulate one
        raise _not_on_cuda(spec, op, "storage.External", "test it without KVJAX_EMULATED")
    if spec.placement is not None:
        raise fail(
            ValueError, spec.name, op, "a table in one place beside storage.External", "one with mesh=",
            "leave mesh= out, or the storage",
        )  # fmt: skip
    if given_by_user(storage) is None:
        raise fail(
            ValueError, spec.name, op, "an engine", "the storage of a table that is gone, as is its engine",
            "give kvjax.storage.External(engine)",
        )  # fmt: skip
    for name, other in PROCESS.all_specs().items():
        if name != spec.name and other.storage == spec.storage:
            raise fail(
                ValueError, spec.name, op, "an engine of its own", f"that of table {name!r}",
                "give each table another object, whose keys are apart",
            )  # fmt: skip


def check_evict(spec: TableSpec, op: str) -> None:
    """Whether the backend can choose rows of the table by a policy that a call brings.

    Raises:
      ValueError: it cannot yet.
    """
    if ffi.is_device(spec.storage.backend) and spec.sharded:
        mend = "kvjax.reshard(table, None), and back to the mesh afterwards"
        raise _not_on_cuda(spec, op, f"{op} of a table with mesh=", mend)


def check_together(specs: Sequence[TableSpec], op: str) -> None:
    """Whether one program can write all of these tables: it runs on the devices of one mesh, and XLA has no place in it
    for a write in one place.

    Raises:
      ValueError: it cannot.
    """
    alone = next((spec for spec in specs if spec.placement is None), None)
    spread = next((spec for spec in specs if spec.placement is not None and spec.placement.num_devices > 1), None)
    if alone is not None and spread is not None:
        raise fail(
            ValueError, alone.name, op, f"a table over the mesh of table {spread.name!r}, which is trained with it",
            "one in one place", f"get_table({alone.name!r}, ..., mesh=mesh), also with replicated=True for a copy on "
            "each device; or train it by an optimizer and a program of its own",
        )  # fmt: skip
    placed = [(spec, frozenset(spec.placement.mesh.devices.flat)) for spec in specs if spec.placement is not None]
    for spec, devices in placed[1:]:
        first, others = placed[0]
        if devices != others:
            raise fail(
                ValueError, spec.name, op, f"a table over the devices of table {first.name!r}, which is trained with "
                f"it: {_numbers(others)}", f"one over {_numbers(devices)}", "make both over one mesh (axis= takes some "
                "of its axes), or train them by an optimizer and a program each",
            )  # fmt: skip


def _numbers(devices: frozenset[Any]) -> list[int]:
    return sorted(device.id for device in devices)


def _not_on_cuda(spec: TableSpec, op: str, got: str, mend: str) -> Exception:
    want = f"what tables on CUDA can do with storage={spec.storage}"
    return fail(ValueError, spec.name, op, want, f"{got}, which is not on CUDA yet", mend)


# By the first two numbers of jax's version. Seen with 0.11.2, on the CPU, at the first lookup; 0.11.0 and 0.11.1
# passed what was tried, and are not tested. Tables in one place work there.
_CRASHES_WITH_MESH = {
    (0, 11): "XLA's compiler may end the process on programs over a mesh (a segmentation fault in Shardy, seen in "
    "0.11.2)",
}


def mesh_trouble(version: str) -> str | None:
    """Why sharded tables are refused on a version of JAX, or None.

    Example:
      >>> mesh_trouble("0.10.2"), mesh_trouble("0.12.0.1")
      (None, None)
      >>> "segmentation fault" in mesh_trouble("0.11.2")
      True
    """
    first_two = re.match(r"(\d+)\.(\d+)", version)
    return _CRASHES_WITH_MESH.get((int(first_two[1]), int(first_two[2]))) if first_two else None


def check_sharding(name: str, op: str) -> None:
    """Whether this process's JAX can run programs of sharded tables; asked before there is one.

    Raises:
      RuntimeError: it cannot.
    """
    if trouble := mesh_trouble(jax.__version__):
        raise fail(
            RuntimeError, name, op, "a jax that runs tables with mesh=", f"jax {jax.__version__}, where {trouble}",
            "install jax 0.10 (Python 3.11 and newer) or 0.12 (3.12 and newer), or leave mesh= out",
        )  # fmt: skip
