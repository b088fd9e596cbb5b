"""Contents: all rows of a table at once, copied out of its shards, checked, and loaded into them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvjax._keys.buckets import by_bucket
from kvjax._process import PROCESS
from kvjax._sharded.processes import allgather, together
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._table.behind import all_present, note_present
from kvjax._table.handle import Handle, version_leaf, version_on_host
from kvjax._values.errors import fail
from kvjax._values.exported import Exported
from kvjax._values.slot_layout import parse_type, type_text
from kvjax._values.snapshot import (
    ADMISSION_COLUMNS,
    WAITING_COLUMNS,
    Snapshot,
    concat,
    from_native,
    take,
    to_native,
)
from kvjax.ffi import host

H = TypeVar("H", bound=Handle)
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


def snapshot(spec: TableSpec, version: int, slots: bool, shards: Sequence[int]) -> Snapshot:
    """What some shards of this process hold together.

    Args:
      spec: of the table.
      version: of the handle.
      slots: whether to copy the optimizer's slots too.
      shards: numbers of local shards, which are no copies of each other; may be empty.
    """
    parts = [
        from_native(spec.host.export_table(spec.name, shard, version, slots), spec.dim, spec.row_dtype, spec.key_dtype)
        for shard in shards or spec.shards[:1]
    ]
    return joined(parts) if shards else _emptied(parts[0])


def joined(parts: Sequence[Snapshot]) -> Snapshot:
    """The snapshots of some shards as one, sorted by (bucket, key)."""
    if len(parts) == 1:
        return parts[0]
    columns = concat([part.rows.columns() for part in parts])
    order, buckets = by_bucket(columns["keys"])
    waiting = concat([{name: part.admission[name] for name in WAITING_COLUMNS} for part in parts])
    rows = Exported.of_columns(
        take(columns, order),
        last_step=max(part.rows.last_step for part in parts),
        total=sum(part.rows.total for part in parts),
    )
    return Snapshot(
        rows,
        offsets=np.searchsorted(buckets, np.arange(host.NUM_BUCKETS + 1)).astype(np.int64),
        slot_types=next((part.slot_types for part in parts if part.slot_types), {}),
        # The cells of a bucket are used by the shard that owns it alone.
        admission=take(waiting, by_bucket(waiting["pending_keys"])[0])
        | {"sketch": np.max([part.admission["sketch"] for part in parts], axis=0)},
    )


def _emptied(part: Snapshot) -> Snapshot:
    rows = dataclasses.replace(part.rows.take(np.zeros(len(part.rows), bool)), total=0)
    admission = {name: array[:0] for name, array in part.admission.items()}
    return Snapshot(rows, np.zeros_like(part.offsets), part.slot_types, admission)


# ---- in --------------------------------------------------------------------------------------------------------


def checked(spec: TableSpec, rows: Exported | Snapshot, slot_types: dict[str, str] | None = None) -> Snapshot:
    """What `Table.load` is given, as a snapshot that fits the table.

    Raises:
      TypeError, ValueError: it does not fit.
    """
    exported = rows.rows if isinstance(rows, Snapshot) else rows
    if not isinstance(exported, Exported):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        got = type(rows).__name__
        raise fail(TypeError, spec.name, "load", "what table.export() gives", got, "arrays go in by table.upsert")
    own = {name: type_text(array.dtype, array.shape[1:]) for name, array in exported.slots.items()}
    if isinstance(rows, Snapshot):
        none = {name: np.zeros(0, dtype) for name, dtype in ADMISSION_COLUMNS.items()}
        given = dataclasses.replace(rows, admission=none | rows.admission, slot_types=slot_types or rows.slot_types)
        _warn_of_lost_counts(spec, given.admission)
    else:
        given = Snapshot(rows, np.zeros(0, np.int64), own if slot_types is None else dict(slot_types), {})
    rows = given.rows
    n, keys = len(rows.keys), np.asarray(rows.keys)
    if keys.dtype not in (np.dtype(np.int64), np.dtype(np.uint64)):
        want = "keys (n,) int64 or uint64"
        raise fail(TypeError, spec.name, "load", want, f"{keys.dtype}", "convert them first")
    if np.shape(rows.values) != (n, spec.dim) or rows.values.dtype != spec.row_dtype:
        raise fail(
            ValueError, spec.name, "load", f"values ({n}, {spec.dim}) {spec.dtype}",
            f"{np.shape(rows.values)} {rows.values.dtype}", "load into a table of that dim and dtype",
        )  # fmt: skip
    types = given.slot_types
    if types.keys() != own.keys() or any(parse_type(types[name]) != parse_type(own[name]) for name in own):
        raise fail(
            ValueError, spec.name, "load", f"slot_types as the arrays are, {own}", f"{types}", "leave slot_types out"
        )
    return given


def _warn_of_lost_counts(spec: TableSpec, counts: dict[str, np.ndarray]) -> None:
    """Says so if counts of keys without a row are about to be lost."""
    kept = {"pending_keys": spec.keeps_counts, "sketch": len(counts["sketch"]) == spec.sketch_cells}
    lost = [name for name, keeps in kept.items() if len(counts[name]) and not keeps]
    if lost:
        warnings.warn(
            f"kvjax: table {spec.name!r}, load: want the admission that the rows were saved with, got "
            f"{spec.admit}; the counts of keys without a row ({', '.join(lost)}) are left out",
            stacklevel=9,  # the caller of load
        )


def load(table: H, rows: Callable[[], Snapshot]) -> H:
    """Replaces the rows of every shard, or of none if that fails in any process.

    Args:
      table: the live handle.
      rows: gives what `checked` has let through. In several processes, each has the rows of its own shards, or all
        have those of the whole table.

    Returns:
      The next handle.
    """
    return prepare_load(table, rows)()


def prepare_load(table: H, rows: Callable[[], Snapshot]) -> Callable[[], H]:
    """As `load`, but nothing changes before the call that it gives."""
    spec = table.spec

    def prepare() -> tuple[list[Any], np.ndarray, bool]:
        version, given = version_on_host(table, "load"), rows()
        parts = split(spec, given)
        prepared = [spec.host.prepare_load(spec.name, i, version, to_native(part)) for i, part in enumerate(parts)]
        return prepared, _summary(spec, given, parts), all_present(given.slot_types, given.rows)

    prepared, mine, present = together(spec.placement, spec.name, "load", prepare)
    _check_summaries(spec, "load", allgather(spec.placement, mine))

    def commit() -> H:
        (version,) = {spec.host.commit_load(part) for part in prepared}
        if present:
            note_present(spec)
        return table.at(version_leaf(spec, version))

    return commit


def split(spec: TableSpec, whole: Snapshot) -> list[Snapshot]:
    """Rows by shard of this process; those that it does not own are left out."""
    placement = spec.placement
    if placement is None:
        return [whole]
    owners = placement.owners(whole.rows.keys.view(np.int64))
    has_counts = "pending_keys" in whole.admission
    waiting = placement.owners(whole.admission["pending_keys"]) if has_counts else None

    def part(shard: int) -> Snapshot:
        admission = {}
        if waiting is not None:
            admission = take({name: whole.admission[name] for name in WAITING_COLUMNS}, waiting == shard)
            admission["sketch"] = _own_cells(whole.admission["sketch"], placement, shard)
        return dataclasses.replace(whole, rows=whole.rows.take(owners == shard), admission=admission)

    parts = {shard: part(shard) for shard in {local.shard for local in placement.local}}  # copies share their arrays
    return [parts[local.shard] for local in placement.local]


def _own_cells(sketch: np.ndarray, placement: Placement, shard: int) -> np.ndarray:
    """The sketch with the cells of other shards' buckets at 0."""
    own = placement.cells(shard, shard, len(sketch))
    cells = np.zeros_like(sketch)
    cells[own] = sketch[own]
    return cells


def _summary(spec: TableSpec, whole: Snapshot, parts: list[Snapshot]) -> np.ndarray:
    """For each shard of the table and then for all that was given: whether it is here, rows, and a sum of their hashes;
    ``(num_shards + 1, 3)`` uint64."""
    out = np.zeros((spec.num_shards + 1, 3), np.uint64)
    numbers = [local.shard for local in spec.placement.local] if spec.placement else [0]
    for number, part in [*zip(numbers, parts, strict=True), (-1, whole)]:
        out[number] = 1, len(part.rows), sum_of_hashes(part.rows.keys)
    return out


def sum_of_hashes(keys: np.ndarray) -> np.uint64:
    """What sets of keys that are equal have in common, whatever their order."""
    return host.hash_integers(np.ascontiguousarray(keys).view(np.int64), 0).view(np.uint64).sum(dtype=np.uint64)


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
    check_capacity(spec, op, int(whole[0]), "make the table with a larger max_capacity, or prune the rows first")


def check_capacity(spec: TableSpec, op: str, rows: int, mend: str) -> None:
    """Whether so many rows fit the table.

    Raises:
      MemoryError: there are more than ``max_capacity``, unless ``on_full="grow"``.
    """
    if spec.max_capacity is not None and rows > spec.max_capacity and spec.on_full != "grow":
        raise fail(
            MemoryError, spec.name, op, f"at most max_capacity={spec.max_capacity} rows", f"{rows}", mend
        )  # fmt: skip


# ---- evicted rows ----------------------------------------------------------------------------------------------


def set_sink(table: Handle, sink: Sink | None) -> None:
    """Has the shards of this process call `Table.on_evict`'s function with the rows that they evict."""
    spec = table.spec
    spec.host.size(table.name, 0, version_on_host(table, "on_evict"))  # a stale handle says so

    def call(raw: dict[str, Any], reason: str) -> None:
        rows = spec.exported(raw)
        with PROCESS.calling_out():
            # Of a sink that is None there is no call.
            sink(rows.keys, rows.values, rows.slots, rows.freqs, rows.versions, reason)  # pyright: ignore[reportOptionalCall]

    given = None if sink is None else call
    for shard in spec.originals:
        spec.host.set_sink(table.name, shard, given)
    PROCESS.set_sink(table.name, given)
