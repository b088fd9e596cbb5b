"""Resharding: a live table moves to other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax._formats.source import concat, row_bytes
from kvjax._keys.keys import Keys
from kvjax._sharded.processes import allgather, allgather_json, together
from kvjax._spec.placement import Placement
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.spec import TableSpec
from kvjax._table.loads import sum_of_hashes
from kvjax._table.moves import move
from kvjax._table.table import Table, check_table
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.exported import Exported
from kvjax._values.snapshot import Snapshot, take, waiting_of

# What a process sends at once.
_PIECE_BYTES = 1 << 24


def reshard(
    table: Table,
    mesh: Mesh | None,
    axis: str | tuple[str, ...] | None = None,
    partitioner: Callable[[Keys, int], ArrayLike] | None = None,
    replicated: bool = False,
    wire: DTypeLike | None = None,
) -> Table:
    """Moves a live table to other devices: rows, slots, frequencies, versions, pins, counts of admission and its sink.

    Not inside ``jit``. Older handles are stale: put the new one in their place, for instance into ``params``. The
    counts of `Table.stats` begin at 0. The move takes the memory of the new place beside that of the old one, and about
    200 MB. With a partitioner, in several processes or on a device all rows are in the host's memory on the way, too.

    In several processes, all call this together, and the new devices belong to the same processes as before. From one
    place to a mesh, each process takes the rows of its shards from its own copy, so the copies must be equal. From a
    mesh to one place, each process gets a copy of all rows.

    Args:
      table: the live handle.
      mesh: devices over which to shard it, as in `kvjax.get_table`; None for a table in one place.
      axis: as there.
      partitioner: as there; the old partitioner is not kept.
      replicated: as there.
      wire: as there; None to keep that of the old mesh. A table in one place has none to keep.

    Returns:
      The live handle of the table in its new place.

    Raises:
      RuntimeError: the handle is stale, or another process has failed. As with all errors, the table stays as it was.
      ValueError: the mesh does not fit the processes, or the partitioner does not fit its shards.

    Example:
      >>> import jax, kvjax, numpy as np
      >>> table = kvjax.get_table("doc_reshard", dim=1).upsert(np.arange(4), np.ones((4, 1)))
      >>> table = kvjax.reshard(table, jax.make_mesh((jax.device_count(),), ("x",)))
      >>> table.spec.placement.num_shards == jax.device_count(), len(table)
      (True, 4)
      >>> table = kvjax.reshard(table, None)
      >>> table.spec.placement, table.lookup(3).tolist()
      (None, [1.0])
      >>> kvjax.drop_table("doc_reshard")
    """
    check_table(table, "reshard")
    old = table.spec.placement
    if wire is None and old is not None and mesh is not None:
        wire = old.wire
    sharding = Sharding(mesh=mesh, axis=axis, partitioner=partitioner, replicated=replicated, wire=wire)
    new = placement_of(sharding, table.name, "reshard")
    spec = dataclasses.replace(table.spec, placement=new)
    if old is not None and new is not None and old.processes != new.processes:
        raise fail(
            ValueError, table.name, "reshard", f"devices of the same processes, {old.processes}", f"{new.processes}",
            "save a checkpoint and restore it in the other processes",
        )  # fmt: skip

    def bring(mine: Snapshot) -> Snapshot:
        return _copied(spec, mine) if old is None else _exchanged(old, spec, mine)

    several = any(place is not None and place.num_processes > 1 for place in (old, new))
    return Table(move(table, spec, "reshard", once=True, bring=bring if several else None), spec)


def _copied(spec: TableSpec, mine: Snapshot) -> Snapshot:
    """Rows for a mesh of a table of which each process has a copy."""
    rows = np.uint64(len(mine.rows))
    copies = allgather(spec.placement, np.array([rows, sum_of_hashes(mine.rows.keys)], np.uint64))
    if not (copies == copies[0]).all():
        raise fail(
            ValueError, spec.name, "reshard", "the same rows in the copies of all processes",
            f"{copies[:, 0].tolist()} rows", "restore a checkpoint into one of them on all, or drop the others",
        )  # fmt: skip
    return mine


def _exchanged(old: Placement, spec: TableSpec, mine: Snapshot) -> Snapshot:
    """The rows that this process owns in the new place, from all processes that have some in the old one, of several.

    They go around in pieces that all processes get, and each keeps what it owns: that is more than need be sent, but no
    process holds more than its rows and one piece of each other.
    """
    error = None
    waiting = waiting_of(mine.admission)
    taken: list[list[dict[str, np.ndarray]]] = [[], []]
    for kind, (columns, keys) in enumerate(((mine.rows.columns(), "keys"), (waiting, "pending_keys"))):
        for piece in _pieces(old, columns):
            try:  # a process that fails goes on with the others, which would wait for it
                own = slice(None) if spec.placement is None else spec.placement.owned(piece[keys])
                taken[kind].append(take(piece, own))
            except Exception as e:
                error = error or e

    def join() -> Snapshot:
        if error is not None:
            raise error
        rows, counts = map(concat, taken)
        exported = Exported.of_columns(rows, last_step)
        return Snapshot(exported, np.zeros(0, np.int64), mine.slot_types, counts | {"sketch": sketch})

    last_step = max(allgather_json(old, mine.rows.last_step))
    # A process without a first copy of a shard has no cells either; of the others', each has its own.
    size = int(allgather(old, np.int64(len(mine.admission["sketch"]))).max())
    cells = mine.admission["sketch"] if len(mine.admission["sketch"]) == size else np.zeros(size, np.uint16)
    sketch = allgather(old, cells).max(axis=0)
    return together(old, spec.name, "reshard", join)


def _pieces(old: Placement, columns: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The columns ``(n, ...)`` of all processes together, a piece of each at a time."""
    width = sum(_width(array) for array in columns.values())
    sizes = allgather(old, np.int64(len(next(iter(columns.values())))))
    most, step = int(sizes.max()), max(1, _PIECE_BYTES // width)
    for start in range(0, max(most, 1), step):
        size = min(step, most - start)
        mine = [_bytes(array[start : start + size]) for array in columns.values()]
        packed = np.concatenate(mine, axis=1)
        received = allgather(old, np.pad(packed, ((0, size - len(packed)), (0, 0))))
        valid = np.arange(size) < np.clip(sizes - start, 0, size)[:, None]
        yield _unpacked(received[valid], columns)


def _width(array: np.ndarray) -> int:
    return row_bytes((array.dtype, array.shape[1:]))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(len(array), _width(array))


def _unpacked(packed: np.ndarray, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``(n, bytes)`` as columns of the types of those in `like`."""
    out, at = {}, 0
    for name, array in like.items():
        flat = np.ascontiguousarray(packed[:, at : at + _width(array)]).reshape(-1)
        out[name] = flat.view(array.dtype).reshape(len(packed), *array.shape[1:])
        at += _width(array)
    return out
