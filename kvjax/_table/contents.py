"""Contents: all rows of a table at once, copied out of its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvjax._keys.buckets import by_bucket
from kvjax._spec.spec import TableSpec
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle
from kvjax._table.live import of_newest
from kvjax._values.exported import Exported
from kvjax._values.snapshot import Snapshot, from_native, joined_admission, take, waiting_of
from kvjax.ffi import host


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
