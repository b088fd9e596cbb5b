"""What a table in the memory of a GPU cannot be yet, in one place."""

from __future__ import annotations

from collections.abc import Callable

from kvjax import ffi
from kvjax._spec import TableSpec, fail

# By the argument of kvjax.get_table that asks for it.
_NOT_YET: dict[str, Callable[[TableSpec], bool]] = {
    "mesh= (a table spread over devices)": lambda spec: spec.placement is not None,
}


def check_backend(spec: TableSpec, op: str) -> None:
    """Whether the backend of the table's storage is here, and can do what the table is asked for.

    Raises:
      RuntimeError: it is not here.
      ValueError: the table asks for what it cannot do yet.
    """
    backend = spec.storage.backend
    if not ffi.loaded(backend):
        raise fail(
            RuntimeError, spec.name, op, f"the backend {backend!r} for storage={spec.storage}",
            f"kvjax.backends()[{backend!r}] == {ffi.backends()[backend]!r}",
            "build kvjax where the CUDA toolkit is, or storage=kvjax.storage.Host()",
        )  # fmt: skip
    if backend != ffi.DEVICE:
        return
    for option, asked in _NOT_YET.items():
        if asked(spec):
            raise fail(
                ValueError, spec.name, op, f"what tables on CUDA can be with storage={spec.storage}",
                f"{option}, which is not on CUDA yet", "leave it out, or storage=kvjax.storage.Host()",
            )  # fmt: skip
