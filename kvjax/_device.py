"""What a table in the memory of a GPU cannot be yet, in one place."""

from __future__ import annotations

from collections.abc import Callable

from kvjax import ffi
from kvjax._spec import TableSpec, fail
from kvjax._storage import Hybrid

# By the argument of kvjax.get_table that asks for it.
_NOT_YET: dict[str, Callable[[TableSpec], bool]] = {
    "mesh= beside max_capacity=": lambda spec: spec.placement is not None and spec.max_capacity is not None,
    "mesh= beside evict=": lambda spec: spec.placement is not None and spec.evict is not None,
    # Pinned memory may wait for a GPU, which may wait for another one of the process.
    "mesh= over several GPUs of a process beside storage.Hybrid": lambda spec: (
        isinstance(spec.storage, Hybrid) and spec.placement is not None and len(spec.placement.local) > 1
    ),
    "mesh= beside a row that unadmitted keys share": lambda spec: spec.placement is not None and spec.shares_row,
}


def check_backend(spec: TableSpec, op: str) -> None:
    """Whether the backend of the table's storage is here, and can do what the table is asked for.

    Raises:
      RuntimeError: it is not here.
      ValueError: the table asks for what it cannot do yet.
    """
    backend = spec.storage.backend
    if backend == ffi.DEVICE and (trouble := ffi.trouble(backend)):
        raise fail(
            RuntimeError, spec.name, op, f"the backend {backend!r} for storage={spec.storage}",
            f"kvjax.backends()[{backend!r}] == {trouble!r}", "see docs/cuda.md, or storage=kvjax.storage.Host()",
        )  # fmt: skip
    if not ffi.is_device(backend):
        return
    for option, asked in _NOT_YET.items():
        if asked(spec):
            raise _not_yet(spec, op, option, "leave it out, or storage=kvjax.storage.Host() in programs for the CPU")


def check_evict(spec: TableSpec, op: str) -> None:
    """The same of rows that a call chooses by a policy."""
    if ffi.is_device(spec.storage.backend) and spec.placement is not None:
        raise _not_yet(
            spec, op, f"{op} of a table with mesh=", "kvjax.reshard(table, None), and back to the mesh afterwards"
        )


def _not_yet(spec: TableSpec, op: str, got: str, mend: str) -> Exception:
    return fail(
        ValueError, spec.name, op, f"what tables on CUDA can do with storage={spec.storage}",
        f"{got}, which is not on CUDA yet", mend,
    )  # fmt: skip
