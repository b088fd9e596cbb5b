"""Agreement between the processes of a table's mesh, on the host, between compiled programs.

All of them must come here together, as they do for compiled programs. One that fails says so, and all raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax._spec.placement import Placement
from kvjax._values.errors import fail

T = TypeVar("T")


def everyone() -> Placement | None:
    """What all processes have in common, for `together`; None if there is one."""
    return None if jax.process_count() == 1 else Placement.of(Mesh(np.array(jax.devices()), ("all",)), ("all",))


def allgather(placement: Placement | None, x: Any) -> np.ndarray:
    """What each process of the mesh has.

    Args:
      placement: of the table; None for one in one place, which no other process has to do with.
      x: an array of one shape and dtype in all of them.

    Returns:
      ``(processes, ...)``, in the order of `Placement.processes`.
    """
    x = np.asarray(x)
    if placement is None or placement.num_processes == 1:
        return x[None]
    firsts = [next(d for d in placement.mesh.devices.flat if d.process_index == p) for p in placement.processes]
    mesh = Mesh(np.array(firsts), ("process",))
    words = np.frombuffer(x.tobytes(), np.uint8)  # as bytes: JAX may have no 64-bit types
    mine = jax.device_put(words[None], firsts[placement.processes.index(jax.process_index())])
    shape = (len(firsts), *words.shape)
    split = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("process")), [mine])
    whole = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(split)
    return np.ascontiguousarray(whole).view(x.dtype).reshape(len(firsts), *x.shape)


def _same(x: jax.Array) -> jax.Array:
    return x


def allgather_json(placement: Placement | None, value: Any) -> list[Any]:
    """As `allgather`, for values that JSON can say, of any size."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = allgather(placement, np.int64(len(text)))
    padded = allgather(placement, np.pad(text, (0, int(sizes.max()) - len(text))))
    return [json.loads(row[:n].tobytes()) for row, n in zip(padded, sizes, strict=True)]


def together(placement: Placement | None, name: str | None, op: str, body: Callable[[], T]) -> T:
    """Runs body() in each process of the mesh.

    Args:
      placement: of the table, or `everyone`.
      name: of the table; None for what is not of one table.
      op: the operation, which errors name.
      body: what to do; its errors name their own table.

    Raises:
      Exception: what body() has raised here; or, if it has raised in another process alone, a RuntimeError that says
        what.
    """
    if placement is None or placement.num_processes == 1:
        return body()
    result, error = None, None
    try:
        result = body()
    except Exception as e:
        error = e
    if not allgather(placement, np.uint8(error is not None)).any():
        return result  # pyright: ignore[reportReturnType]  # without an error there is one
    texts = allgather_json(placement, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    process, text = next((p, t) for p, t in zip(placement.processes, texts, strict=True) if t is not None)
    raise fail(
        RuntimeError, name, op, "a call that all processes can do", f"a failure in process {process} ({text})",
        "mend it there; nothing has changed here",
    )  # fmt: skip
