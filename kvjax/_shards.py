"""Whole tables that are spread over devices, from the host: one export of all shards, and a load that splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax._admit import NUM_BUCKETS
from kvjax._export import Exported, Snapshot, from_host
from kvjax._processes import gather, together
from kvjax._spec import TableSpec, fail
from kvjax.ffi import host

_BY_ROW = ("keys", "values", "freqs", "versions", "has_slots", "pinned")


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """The virtual bucket of each key: int64 ``(n,)`` to int32 ``(n,)``."""
    return host.owners(np.ascontiguousarray(keys).view(np.int64), NUM_BUCKETS)


def joined(parts: Sequence[Snapshot]) -> Snapshot:
    """The snapshots of some shards as one, sorted by (bucket, key)."""
    if len(parts) == 1:
        return parts[0]
    rows = [part.rows for part in parts]
    keys = np.concatenate([r.keys for r in rows])
    buckets = buckets_of(keys)
    order = np.lexsort((keys.view(np.int64), buckets))
    names = next((part.slot_types for part in parts if part.slot_types), {})

    def join(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[order]

    whole = Exported(
        **{name: join([getattr(r, name) for r in rows]) for name in _BY_ROW},
        slots={name: join([r.slots[name] for r in rows]) for name in rows[0].slots},
        last_step=max(r.last_step for r in rows),
        total=sum(r.total for r in rows),
    )
    offsets = np.searchsorted(buckets[order], np.arange(NUM_BUCKETS + 1)).astype(np.int64)
    return Snapshot(whole, offsets, names, _joined_admission([part.admission for part in parts]))


def _joined_admission(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    keys = np.concatenate([part["pending_keys"] for part in parts])
    order = np.lexsort((keys, buckets_of(keys)))
    return {
        "pending_keys": keys[order],
        "pending_counts": np.concatenate([part["pending_counts"] for part in parts])[order],
        # The cells of a bucket are used by the shard that owns it alone.
        "sketch": np.max([part["sketch"] for part in parts], axis=0),
    }


def snapshot(spec: TableSpec, version: int, slots: bool, shards: Sequence[int]) -> Snapshot:
    """What some shards of this process hold together.

    Args:
      spec: of the table.
      version: of the handle.
      slots: whether to copy the optimizer's slots too.
      shards: numbers of local shards, which are no copies of each other; may be empty.
    """
    parts = [
        from_host(spec.host.export_table(spec.name, shard, version, slots), spec.dim, spec.row_dtype, spec.key_dtype)
        for shard in shards or spec.shards[:1]
    ]
    return joined(parts) if shards else _emptied(parts[0])


def _emptied(part: Snapshot) -> Snapshot:
    rows = dataclasses.replace(part.rows.take(np.zeros(len(part.rows), bool)), total=0)
    admission = {name: array[:0] for name, array in part.admission.items()}
    return Snapshot(rows, np.zeros_like(part.offsets), part.slot_types, admission)


def split(spec: TableSpec, arrays: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by shard of this process; those that it does not own are left out.

    arrays: as ``spec.host.prepare_load`` takes them.
    """
    placement = spec.placement
    if placement is None:
        return [arrays]
    keys = arrays["keys"]
    n = len(keys)
    owners = placement.owners(keys)
    waiting = placement.owners(arrays["pending_keys"]) if "pending_keys" in arrays else None
    parts: dict[int, dict[str, Any]] = {}  # copies of a shard share their arrays
    for shard in {shard.shard for shard in placement.local}:
        mine = owners == shard
        part = {name: _take(arrays[name], mine, n) for name in _BY_ROW} | {"last_step": arrays["last_step"]}
        part["slots"] = [(slot, kind, width, _take(data, mine, n)) for slot, kind, width, data in arrays["slots"]]
        if waiting is not None:
            for name in ("pending_keys", "pending_counts"):
                part[name] = arrays[name][waiting == shard]
            part["sketch"] = _own_cells(arrays["sketch"], placement, shard)
        parts[shard] = part
    return [parts[shard.shard] for shard in placement.local]


def load(spec: TableSpec, op: str, version: Callable[[], int], contents: Callable[[], dict[str, Any]]) -> int:
    """Replaces the rows of every shard, or of none if that fails in any process; gives the next version.

    Args:
      spec: of the table.
      op: for errors.
      version: gives that of the handle.
      contents: gives what `split` takes. In several processes, each has the rows of its own shards, or all have those
        of the whole table.
    """
    placement = spec.placement

    def prepare() -> tuple[list[Any], np.ndarray]:
        now, arrays = version(), contents()
        keys = arrays["keys"]
        parts = split(spec, arrays)
        prepared = [spec.host.prepare_load(spec.name, i, now, part) for i, part in enumerate(parts)]
        return prepared, _summary(spec, keys, parts)

    prepared, mine = together(placement, spec.name, op, prepare)
    _check_summaries(spec, op, gather(placement, mine))
    (next_version,) = {spec.host.commit_load(part) for part in prepared}
    return next_version


def _summary(spec: TableSpec, keys: np.ndarray, parts: list[dict[str, Any]]) -> np.ndarray:
    """For each shard of the table and then for all that was given: whether it is here, rows, and a sum of their hashes;
    ``(num_shards + 1, 3)`` uint64."""
    out = np.zeros((spec.num_shards + 1, 3), np.uint64)
    numbers = [shard.shard for shard in spec.placement.local] if spec.placement else [0]
    for number, part in [*zip(numbers, parts, strict=True), (-1, {"keys": keys})]:
        out[number] = 1, len(part["keys"]), host.hash_integers(part["keys"], 0).view(np.uint64).sum(dtype=np.uint64)
    return out


def _check_summaries(spec: TableSpec, op: str, summaries: np.ndarray) -> None:
    """summaries: ``(processes, num_shards + 1, 3)``."""
    shards, given = summaries[:, :-1], summaries[:, -1]
    total = shards.max(axis=0)  # of each shard, whoever has it
    agree = (shards[..., :1] == 0) | (shards == total)
    whole = total[:, 1:].sum(axis=0, dtype=np.uint64)
    # Whoever gives more than its own rows must have given all, or some of them may have no place to go.
    own = (shards[..., 1].sum(axis=1) == given[:, 1]) | (given[:, 1:] == whole).all(axis=1)
    if len(summaries) > 1 and not (agree.all() and own.all()):
        raise fail(
            ValueError, spec.name, op, "the rows of its own shards in each process, or all rows in all of them",
            f"{given[:, 1].tolist()} rows of which {shards[..., 1].sum(axis=1).tolist()} have their place there",
            "give what table.export() gives in each process, or the same arrays in all",
        )  # fmt: skip
    n = int(whole[0])
    if spec.max_capacity is not None and n > spec.max_capacity and spec.on_full != "grow":
        raise fail(
            MemoryError, spec.name, op, f"at most max_capacity={spec.max_capacity} rows", f"{n}",
            "give the table more capacity, or prune the rows first",
        )  # fmt: skip


def _take(flat: np.ndarray, mine: np.ndarray, n: int) -> np.ndarray:
    """Rows of a flat array of n rows."""
    return np.ascontiguousarray(flat.reshape(n, -1)[mine]).reshape(-1) if n else flat


def _own_cells(sketch: np.ndarray, placement: Any, shard: int) -> np.ndarray:
    """The sketch with the cells of other shards' buckets at 0; a partitioner knows no buckets, and keeps all."""
    if placement.partitioner is not None or placement.replicated or not len(sketch):
        return sketch
    begin, end = placement.buckets(shard, shard)
    cells = np.zeros_like(sketch).reshape(NUM_BUCKETS, -1)
    cells[begin:end] = sketch.reshape(NUM_BUCKETS, -1)[begin:end]
    return cells.reshape(-1)
