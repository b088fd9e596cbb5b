"""Agreement between the processes of a table's mesh, on the host, between compiled programs.

All of them must come here together, as they do for compiled programs. One that fails says so, and all raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax._spec.placement import Placement
from kvjax._values.errors import fail
from kvjax.ffi import host

T = TypeVar("T")


def everyone() -> Placement | None:
    """What all processes have in common, for `together`; None if there is one."""
    return None if jax.process_count() == 1 else _over(jax.devices())


def all_of(placements: Iterable[Placement | None]) -> Placement | None:
    """What the processes of some tables have in common, for `together`; None if each table is of one process."""
    several = {p for each in placements if each is not None and each.num_processes > 1 for p in each.processes}
    return _over([device for device in jax.devices() if device.process_index in several]) if several else None


def _over(devices: Sequence[object]) -> Placement:
    return Placement.of(Mesh(np.array(devices), ("all",)), ("all",))


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


def together(
    placement: Placement | None, name: str | None, op: str, body: Callable[[], T], call: Mapping[str, Any] | None = None
) -> T:
    """Runs body() in each process of the mesh.

    Args:
      placement: of the table, `everyone`, or `all_of` some tables.
      name: of the table; None for what is not of one table.
      op: the operation, which errors name.
      body: what to do; its errors name their own table.
      call: what else has to be the same in all processes, by its name.

    Raises:
      Exception: what body() has raised here; or, if it has raised in another process alone, a RuntimeError that says
        what.
      ValueError: another process has come here for another operation or table, or with another `call`.
    """
    if placement is None or placement.num_processes == 1:
        return body()
    result, error = None, None
    try:
        result = body()
    except Exception as e:
        error = e
    said = json.dumps({"operation": op, "table": name} | dict(call or {}), default=repr)
    # Of one size whatever is said, or processes with different calls would wait for words that do not come.
    digest = host.digest(np.frombuffer(said.encode(), np.uint8))
    statuses = allgather(placement, np.array([error is not None, digest], np.uint64))
    if len(set(statuses[:, 1].tolist())) > 1:
        raise _another_call(placement, name, op, json.loads(said)) from error
    if not statuses[:, 0].any():
        return result  # pyright: ignore[reportReturnType]  # without an error there is one
    texts = allgather_json(placement, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    process, text = next((p, t) for p, t in zip(placement.processes, texts, strict=True) if t is not None)
    raise fail(
        RuntimeError, name, op, "a call that all processes can do", f"a failure in process {process} ({text})",
        "mend it there; nothing has changed here",
    )  # fmt: skip


def _another_call(placement: Placement, name: str | None, op: str, said: dict[str, Any]) -> Exception:
    """What is not the same in the call of the first process and in the first one that differs from it."""
    first, *others = zip(placement.processes, allgather_json(placement, said), strict=True)
    other = next(each for each in others if each[1] != first[1])
    differ = [key for key in first[1] | other[1] if first[1].get(key) != other[1].get(key)]
    parts = [key for key in differ if key in ("operation", "table")] or differ  # of another operation all is other
    calls = [
        f"{', '.join(f'{key} {each.get(key)!r}' for key in parts)} in process {process}"
        for process, each in (first, other)
    ]
    mend = "make the same calls in the same order in all processes; nothing has changed"
    return fail(ValueError, name, op, "the same call in all processes", " and ".join(calls), mend)


def each_together(
    placement: Placement | None, op: str, tables: Mapping[str, Sequence[int]], body: Callable[[str], T]
) -> dict[str, T]:
    """Runs body(name) for each of some tables, in one order in all processes. If it fails for one, all processes stop.

    Args:
      placement: as `together` has it.
      op: as there.
      tables: by the names of this process's tables, the processes that have to take part, which have a part of it.
      body: what to do, in which the processes of the table may meet, too.

    Returns:
      What body has given for each of this process's tables, sorted by name.

    Raises:
      Exception: as `together`.
      ValueError: one of these processes lacks the table.
    """
    if placement is None or placement.num_processes == 1:
        return {name: body(name) for name in sorted(tables)}
    said = dict(
        zip(placement.processes, allgather_json(placement, {n: list(of) for n, of in tables.items()}), strict=True)
    )
    names = sorted(set().union(*said.values()))
    for name in names:
        got = [process for process, given in said.items() if name in given]
        want = sorted({process for given in said.values() for process in given.get(name, ())})
        if not set(want) <= set(got):
            raise fail(
                ValueError, name, op, f"it in the call of each process that has a part of it, {want}", f"it in {got}",
                "give all processes the same tables, made with the same mesh=; what is not sharded over processes is "
                "of process 0",
            )  # fmt: skip
    done = {name: together(placement, name, op, lambda n=name: body(n) if n in tables else None) for name in names}
    return {name: done[name] for name in sorted(tables)}  # pyright: ignore[reportReturnType]  # of these there is one
