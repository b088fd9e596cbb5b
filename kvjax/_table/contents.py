"""Contents: all rows of a table at once, copied out of its shards, checked, and loaded into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvjax._keys.buckets import by_bucket
from kvjax._process import PROCESS
from kvjax._sharded.processes import allgather, together
from kvjax._spec.spec import TableSpec
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle
from kvjax._table.live import of_newest
from kvjax._values.errors import fail
from kvjax._values.exported import Exported
from kvjax._values.integers import as_int64
from kvjax._values.snapshot import Snapshot, from_native, joined_admission, take, waiting_of
from kvjax.ffi import host

Sink: TypeAlias = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray, np.ndarray, str], object]
"""What `Table.on_evict` takes."""


# ---- numbers of rows -------------------------------------------------------------------------------------------


def num_rows(table: Handle, shards: Sequence[int]) -> int:
    """The rows of some shards of this process, once all writes up to the handle are done; of a following one, now."""
    if table.follows:
        return sum(table.spec.host.rows(table.name, shard)[0] for shard in shards)
    version = version_on_host(table.stored, "size")
    return sum(table.spec.host.size(table.name, shard, version) for shard in shards)


def total_rows(table: Handle) -> int:
    """The rows of the whole table; all processes of its mesh ask together."""
    placement, spec = table.spec.placement, table.spec
    mine = together(placement, table.name, "size", lambda: num_rows(table, spec.originals))
    return int(allgather(placement, np.int64(mine)).sum())


def rows_by_shard(table: Handle, all_processes: bool) -> dict[int, int]:
    """The rows of each shard by its number: of this process, or of the whole table as `total_rows`."""
    placement, spec = table.spec.placement, table.spec
    numbers = {0: 0} if placement is None else {local.shard: i for i, local in placement.kept}
    if not all_processes:
        return {shard: num_rows(table, [i]) for shard, i in sorted(numbers.items())}

    def count() -> np.ndarray:
        out = np.zeros(spec.num_shards, np.int64)
        for shard, i in numbers.items():
            out[shard] = num_rows(table, [i])
        return out

    everywhere = allgather(placement, together(placement, table.name, "size", count)).max(axis=0)
    return dict(enumerate(everywhere.tolist()))


# ---- out -------------------------------------------------------------------------------------------------------


def copied(table: Handle, op: str, slots: bool = True, once: bool = False) -> Snapshot:
    """The rows of this process that a handle reads, and what belongs to the table as a whole.

    Args:
      table: the live handle, or a following one, through which it is the newest version.
      op: for errors.
      slots: whether to copy the optimizer's slots too.
      once: leave out shards of which another process has the first copy.
    """

    def copy(table: Handle, raises: bool) -> Snapshot:
        spec, view = table.spec, table.view
        shards = spec.originals if once else spec.kept
        found = snapshot(spec, op, version_on_host(table.stored, op), slots or view is not None, shards, raises)
        return found if view is None else view.snapshot(spec, found, slots)

    return of_newest(table, copy)


def snapshot(
    spec: TableSpec, op: str, version: int, slots: bool, shards: Sequence[int], raises: bool = True
) -> Snapshot:
    """What some shards of this process hold together.

    Args:
      spec: of the table.
      op: for errors.
      version: of the handle.
      slots: whether to copy the optimizer's slots too.
      shards: numbers of local shards, which are no copies of each other; may be empty.
      raises: as `of_newest` says.
    """
    dim, row_dtype, key_dtype = spec.dim, spec.row_dtype, spec.key_dtype
    parts = [
        from_native(
            spec.host.export_table(spec.name, shard, version, bool(slots), op, raises), dim, row_dtype, key_dtype
        )
        for shard in shards or spec.shards[:1]
    ]
    return joined(parts) if shards else _emptied(parts[0])


def joined(parts: Sequence[Snapshot]) -> Snapshot:
    """The snapshots of some shards as one, sorted by (bucket, key)."""
    if len(parts) == 1:
        return parts[0]
    each = [part.rows.columns() for part in parts]
    order, buckets = by_bucket(np.concatenate([columns["keys"] for columns in each]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    places = np.split(place, np.cumsum([len(columns["keys"]) for columns in each])[:-1])
    rows = {name: np.empty((len(order), *array.shape[1:]), array.dtype) for name, array in each[0].items()}
    for to, columns in zip(places, each, strict=True):  # without a list of all, which would be a third copy of them
        for name, array in rows.items():
            array[to] = columns[name]
    admission = joined_admission([part.admission for part in parts])
    return Snapshot(
        Exported.of_columns(
            rows,
            last_step=max(part.rows.last_step for part in parts),
            total=sum(part.rows.total for part in parts),
            key_dtype=parts[0].rows.key_dtype,
        ),
        offsets=np.searchsorted(buckets, np.arange(host.NUM_BUCKETS + 1)).astype(np.int64),
        slot_types=next((part.slot_types for part in parts if part.slot_types), {}),
        admission=admission | take(waiting_of(admission), by_bucket(admission["pending_keys"])[0]),
    )


def _emptied(part: Snapshot) -> Snapshot:
    rows = dataclasses.replace(part.rows.take(np.zeros(len(part.rows), bool)), total=0)
    admission = {name: array[:0] for name, array in part.admission.items()}
    return Snapshot(rows, np.zeros_like(part.offsets), part.slot_types, admission)


# ---- checks -----------------------------------------------------------------------------------------------------


def sum_of_hashes(keys: np.ndarray) -> np.uint64:
    """What sets of keys that are equal have in common, whatever their order."""
    return host.hash_integers(as_int64(keys), 0).view(np.uint64).sum(dtype=np.uint64)


def check_capacity(spec: TableSpec, op: str, rows: int, mend: str) -> None:
    """Whether so many rows fit the table.

    Raises:
      MemoryError: there are more than ``max_capacity``, unless ``on_full="grow"``.
    """
    if spec.max_capacity is not None and rows > spec.max_capacity and spec.on_full != "grow":
        raise fail(MemoryError, spec.name, op, f"at most max_capacity={spec.max_capacity} rows", f"{rows}", mend)


# ---- evicted rows ----------------------------------------------------------------------------------------------


def set_sink(table: Handle, sink: Sink | None) -> None:
    """Has the shards of this process call `Table.on_evict`'s function with the rows that they evict."""
    spec = table.spec
    spec.host.size(table.name, 0, version_on_host(table, "on_evict"), "on_evict")  # a stale handle says so

    def call(raw: dict[str, Any], reason: str) -> None:
        rows = spec.exported(raw)
        with PROCESS.calling_out():
            # Of a sink that is None there is no call.
            sink(rows.keys, rows.values, rows.slots, rows.freqs, rows.versions, reason)  # pyright: ignore[reportOptionalCall]

    given = None if sink is None else call
    for shard in spec.originals:
        spec.host.set_sink(table.name, shard, given)
    PROCESS.set_sink(table.name, given)
