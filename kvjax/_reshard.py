"""Moves a live table to other devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from kvjax._export import Exported, Snapshot
from kvjax._move import move
from kvjax._options import placement_of
from kvjax._placement import Placement
from kvjax._processes import gather, gather_json, together
from kvjax._spec import TableSpec, fail
from kvjax._table import Table
from kvjax.ffi import host

# What a process sends at once.
_PIECE_BYTES = 1 << 24


def reshard(
    table: Table,
    mesh: Mesh | None,
    axis: str | tuple[str, ...] | None = None,
    partitioner: Callable[[Any, int], Any] | None = None,
    replicated: bool = False,
) -> Table:
    """Moves a live table to other devices: rows, slots, frequencies, versions, pins, counts of admission and its sink.

    Not inside ``jit``. Handles from before are stale: put the new one where they stood, for instance into ``params``.
    The counts of `Table.stats` begin anew. While it moves, the table is there twice.

    In several processes all of them call this together, and the devices are of the same processes as before. From one
    place to a mesh, each process takes the rows of its shards from its own copy, and the copies must be equal; the
    other way each gets a copy of all rows.

    Args:
      table: the live handle.
      mesh: devices over which to spread it, as in `kvjax.get_table`; None for a table in one place.
      axis: as there.
      partitioner: as there; the table's own is not taken over.
      replicated: as there.

    Returns:
      The live handle of the table in its new place. Rows travel to lookups in the type in which they did.

    Raises:
      RuntimeError: the handle is stale, or another process has failed; as for all errors, the table is as it was.
      ValueError: the mesh does not fit the processes, or the partitioner its shards.

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
    old = table.spec.placement
    wire = old.wire if old is not None and mesh is not None else None
    place = {"mesh": mesh, "axis": axis, "partitioner": partitioner, "replicated": replicated, "wire": wire}
    new = placement_of(table.name, place, "reshard")
    spec = dataclasses.replace(table.spec, placement=new)
    if old is not None and new is not None and old.processes != new.processes:
        raise fail(
            ValueError, table.name, "reshard", f"devices of the same processes, {old.processes}", f"{new.processes}",
            "save a checkpoint and restore it in the other processes",
        )  # fmt: skip

    def bring(mine: Snapshot) -> Snapshot:
        return _copied(spec, mine) if old is None else _exchanged(old, spec, mine)

    return Table(move(table, spec, "reshard", once=True, bring=bring), spec)


def _copied(spec: TableSpec, mine: Snapshot) -> Snapshot:
    """Rows for a mesh of a table of which each process has a copy."""
    keys = mine.rows.keys.view(np.int64)
    sum_of_hashes = host.hash_integers(keys, 0).view(np.uint64).sum(dtype=np.uint64)
    facts = gather(spec.placement, np.array([len(keys), sum_of_hashes], np.uint64))
    if not (facts == facts[0]).all():
        raise fail(
            ValueError, spec.name, "reshard", "the same rows in the copies of all processes",
            f"{facts[:, 0].tolist()} rows", "restore a checkpoint into one of them on all, or drop the others",
        )  # fmt: skip
    return mine


def _exchanged(old: Placement, spec: TableSpec, mine: Snapshot) -> Snapshot:
    """The rows that this process owns in the new place, from all processes that have some in the old one.

    They go around in pieces that all processes get, and each keeps what it owns: that is more than need be sent, but no
    process holds more than its rows and one piece of each other.
    """
    if len(old.processes) == 1:
        return mine
    rows, error = mine.rows, None
    columns = {"keys": rows.keys, "values": rows.values, "freqs": rows.freqs, "versions": rows.versions}
    columns |= {"has_slots": rows.has_slots, "pinned": rows.pinned}
    columns |= {f"slot.{name}": array for name, array in rows.slots.items()}
    pending = {name: mine.admission[name] for name in ("pending_keys", "pending_counts")}
    taken: list[list[dict[str, np.ndarray]]] = [[], []]
    for kind, (own, keys) in enumerate(((columns, "keys"), (pending, "pending_keys"))):
        for piece in _pieces(old, own):
            try:  # a process that fails goes on with the others, which would wait for it
                taken[kind].append(_own(spec.placement, piece, keys))
            except Exception as e:
                error = error or e

    def join() -> Snapshot:
        if error is not None:
            raise error
        all_rows, counts = (
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} for parts in taken
        )
        slots = {name: all_rows.pop(f"slot.{name}") for name in rows.slots}
        exported = Exported(**all_rows, slots=slots, last_step=last_step, total=len(all_rows["keys"]))
        return Snapshot(exported, np.zeros(0, np.int64), mine.slot_types, counts | {"sketch": sketch})

    last_step = max(gather_json(old, rows.last_step))
    # A process without a first copy of a shard has no cells either; of the others', each has its own.
    size = int(gather(old, np.int64(len(mine.admission["sketch"]))).max())
    cells = mine.admission["sketch"] if len(mine.admission["sketch"]) == size else np.zeros(size, np.uint16)
    sketch = gather(old, cells).max(axis=0)
    return together(old, spec.name, "reshard", join)


def _pieces(old: Placement, columns: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The columns ``(n, ...)`` of all processes together, a piece of each at a time."""
    width = sum(_width(array) for array in columns.values())
    sizes = gather(old, np.int64(len(next(iter(columns.values())))))
    most, step = int(sizes.max()), max(1, _PIECE_BYTES // width)
    for start in range(0, max(most, 1), step):
        room = min(step, most - start)
        mine = [_bytes(array[start : start + room]) for array in columns.values()]
        packed = np.concatenate(mine, axis=1)
        arrived = gather(old, np.pad(packed, ((0, room - len(packed)), (0, 0))))
        meant = np.arange(room) < np.clip(sizes - start, 0, room)[:, None]
        yield _unpacked(arrived[meant], columns)


def _width(array: np.ndarray) -> int:
    return array.dtype.itemsize * math.prod(array.shape[1:])


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


def _own(new: Placement | None, piece: dict[str, np.ndarray], keys: str) -> dict[str, np.ndarray]:
    """Those of the rows that this process owns."""
    if new is None:
        return piece
    mine = np.isin(new.owners(piece[keys].view(np.int64)), [shard.shard for shard in new.local])
    return {name: array[mine] for name, array in piece.items()}
