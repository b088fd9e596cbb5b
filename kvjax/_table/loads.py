"""Loads: contents on their way into a table, where all shards get their part, or none does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvjax._formats.source import Source, ahead
from kvjax._sharded.processes import allgather, together
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._table.behind import OneStepCheck, note_loaded
from kvjax._table.checks import version_on_host
from kvjax._table.frozen import freeze_rows
from kvjax._table.handle import Handle
from kvjax._table.live import of_newest, version_leaf
from kvjax._values.errors import fail, warn
from kvjax._values.exported import SLOT, Exported, check_keys
from kvjax._values.integers import as_int64
from kvjax._values.key_width import is_of_32_bits, own_bits
from kvjax._values.slot_layout import parse_type, type_text
from kvjax._values.snapshot import (
    ADMISSION_COLUMNS,
    Snapshot,
    head_to_native,
    rows_to_native,
    take,
    waiting_of,
)
from kvjax.ffi import host, is_device

H = TypeVar("H", bound=Handle)


@dataclasses.dataclass(frozen=True)
class Loading:
    """Contents on their way into a table, of which some rows are in memory at a time.

    Attributes:
      rows: the columns that all rows have, and those of the slots.
      last_step: of the table.
      slot_types: as in `Snapshot`.
      admission: as there; none at all for what the table has.
      counts: rows of each virtual bucket, ``(buckets,)`` int64, of rows that can be read once; None for others.
    """

    rows: Source
    last_step: int
    slot_types: dict[str, str]
    admission: dict[str, np.ndarray]
    counts: np.ndarray | None = None


def of_frozen(table: Handle, spec: TableSpec, op: str) -> Loading | None:
    """The contents of a table, of which a piece is copied at a time; None where it takes a whole copy: of a table over
    several processes or on a device, and for one with a partitioner, of which nobody knows how many rows a shard gets.

    Args:
      table: the live handle, or a following one.
      spec: of the table that is to have them.
      op: for errors.
    """
    old, new = table.spec.placement, spec.placement
    several = any(place is not None and place.num_processes > 1 for place in (old, new))
    dealt = new is not None and new.partitioner is not None
    if several or dealt or is_device(table.spec.storage.backend):
        return None
    frozen = of_newest(table, functools.partial(freeze_rows, op=op))
    if frozen is None:
        return None
    return Loading(frozen.source(), frozen.last_step, frozen.slot_types, frozen.admission, np.diff(frozen.offsets))


def checked(spec: TableSpec, given: Exported | Snapshot | Loading, slot_types: dict[str, str] | None = None) -> Loading:
    """What `Table.load` is given, as contents that fit the table.

    Raises:
      TypeError, ValueError: it does not fit.
    """
    if not isinstance(given, Loading):
        given = _loading(spec, given, slot_types)
    if given.admission:
        _warn_of_lost_counts(spec, given.admission)
    n, types = given.rows.num_rows, given.rows.types
    check_keys(types["keys"][0], spec.name, "load")
    given = _with_own_keys(given, spec.key_dtype)
    if types["values"] != (spec.row_dtype, (spec.dim,)):
        dtype, shape = types["values"]
        raise fail(
            ValueError, spec.name, "load", f"values ({n}, {spec.dim}) {spec.dtype}", f"{(n, *shape)} {dtype}",
            "load into a table of that dim and dtype",
        )  # fmt: skip
    own = {name.removeprefix(SLOT): kind for name, kind in types.items() if name.startswith(SLOT)}
    try:
        said = {name: parse_type(text) for name, text in given.slot_types.items()}
    except (AttributeError, ValueError):  # of what is no such text
        said = None
    if said != own:
        texts = {name: type_text(*kind) for name, kind in own.items()}
        raise fail(
            ValueError, spec.name, "load", f"slot_types as the arrays are, {texts}", f"{given.slot_types}",
            "leave slot_types out",
        )  # fmt: skip
    return given


def _with_own_keys(given: Loading, key_dtype: str) -> Loading:
    """The same under the keys that the table has them under."""
    if not is_of_32_bits(key_dtype):
        return given

    def own(keys: np.ndarray) -> np.ndarray:
        return own_bits(keys, key_dtype, "load").view(keys.dtype)

    rows = given.rows.changed("keys", given.rows.types["keys"][0], lambda keys, _: own(keys))
    waiting = {name: own(keys) for name, keys in given.admission.items() if name == "pending_keys"}
    return dataclasses.replace(given, rows=rows, admission=given.admission | waiting)


def _loading(spec: TableSpec, given: Exported | Snapshot, slot_types: dict[str, str] | None) -> Loading:
    rows = given.rows if isinstance(given, Snapshot) else given
    if not isinstance(rows, Exported):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        got = type(given).__name__
        raise fail(TypeError, spec.name, "load", "what table.export() gives", got, "arrays go in by table.upsert")
    rows, admission = rows.checked(spec.name, "load"), {}
    if slot_types is None and isinstance(given, Snapshot):
        slot_types = given.slot_types
    if slot_types is None:
        slot_types = {name: type_text(array.dtype, array.shape[1:]) for name, array in rows.slots.items()}
        if slot_types and (held := dict(spec.host.slots(spec.name, 0))) == slot_types:
            slot_types = held  # in the order of the optimizer
    if not isinstance(slot_types, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        want = "slot_types as a dict of types by name"
        raise fail(TypeError, spec.name, "load", want, f"{slot_types!r:.200}", "leave slot_types out")
    if isinstance(given, Snapshot):
        admission = {name: np.zeros(0, dtype) for name, dtype in ADMISSION_COLUMNS.items()} | given.admission
    return Loading(Source.of(rows.columns(), {}), rows.last_step, dict(slot_types), admission)


def _warn_of_lost_counts(spec: TableSpec, counts: dict[str, np.ndarray]) -> None:
    """Says so if counts of keys without a row are about to be lost."""
    kept = {"pending_keys": spec.keeps_counts, "sketch": len(counts["sketch"]) == spec.sketch_cells}
    lost = [name for name, keeps in kept.items() if len(counts[name]) and not keeps]
    if lost:
        warn(
            f"kvjax: table {spec.name!r}, load: want the admission that the rows were saved with, got "
            f"{spec.admit}; the counts of keys without a row ({', '.join(lost)}) are left out"
        )


def load(table: H, rows: Callable[[], Loading]) -> H:
    """Replaces the rows of every shard, or of none if that fails in any process.

    Args:
      table: the live handle.
      rows: gives what `checked` has let through. In several processes, each has the rows of its own shards, or all
        have those of the whole table.

    Returns:
      The next handle.
    """
    return prepare_load(table, rows)()


def prepare_load(table: H, rows: Callable[[], Loading]) -> Callable[[], H]:
    """As `load`, but nothing changes before the call that it gives."""
    spec = table.spec

    def prepare() -> FilledShards:
        version, given = version_on_host(table, "load"), rows()
        check_capacity(spec, "load", given.rows.num_rows, _OF_CAPACITY)  # of all, before a shard says it of its own
        return fill(spec, given, lambda i, head: spec.host.begin_load(spec.name, i, version, head))

    filled = together(spec.placement, spec.name, "load", prepare)
    _check_summaries(spec, "load", allgather(spec.placement, filled.summary))

    def commit() -> H:
        (version,) = {spec.host.commit_load(part) for part in filled.prepared}
        note_loaded(spec, filled.caught_up)
        return table.at(version_leaf(spec, version))

    return commit


class FilledShards(NamedTuple):
    """Shards that are ready to be replaced.

    Attributes:
      prepared: of each shard of this process what `commit_load` takes.
      summary: for each shard of the table and then for all that was given: whether it is here, rows, and a sum of
        their hashes; ``(num_shards + 1, 3)`` uint64.
      caught_up: whether no row is behind.
    """

    prepared: list[Any]
    summary: np.ndarray
    caught_up: bool


def fill(spec: TableSpec, given: Loading, begin: Callable[[int, dict[str, Any]], Any]) -> FilledShards:
    """Fills shards of this process; rows that it does not own are left out.

    Args:
      spec: of the table.
      given: what `checked` has let through.
      begin: from the number of a local shard and what comes, in the native form, to what gets it.
    """
    placement, types = spec.placement, given.slot_types
    numbers = [local.shard for local in placement.local] if placement else [0]
    summary = _summary(spec, given, numbers)
    prepared: list[Any] = []
    for i, shard in enumerate(numbers):
        counts = given.admission if placement is None else _own_counts(given.admission, placement, shard)
        prepared.append(begin(i, head_to_native(int(summary[shard, 1]), given.last_step, types, counts)))
    of_one_step = OneStepCheck(types)
    with closing(ahead(given.rows.rows())) as pieces:
        for piece in pieces:
            of_one_step.add(piece)
            owners = None if placement is None else placement.owners(piece["keys"].view(np.int64))
            parts = {
                shard: rows_to_native(piece if owners is None else take(piece, owners == shard), types)
                for shard in set(numbers)  # copies share their arrays
            }
            for i, shard in enumerate(numbers):
                spec.host.add_load(prepared[i], parts[shard])
    for one in prepared:
        spec.host.end_load(one)
    return FilledShards(prepared, summary, of_one_step.all())


def _own_counts(admission: dict[str, np.ndarray], placement: Placement, shard: int) -> dict[str, np.ndarray]:
    """What a shard has of counts of keys without a row: of a sketch the cells of its buckets, and 0 elsewhere."""
    if not admission:
        return {}
    waiting = waiting_of(admission)
    out = take(waiting, placement.owners(waiting["pending_keys"]) == shard)
    own = placement.cells(shard, shard, len(admission["sketch"]))
    out["sketch"] = np.zeros_like(admission["sketch"])
    out["sketch"][own] = admission["sketch"][own]
    return out


def _summary(spec: TableSpec, given: Loading, numbers: Sequence[int]) -> np.ndarray:
    out = np.zeros((spec.num_shards + 1, 3), np.uint64)
    out[[*numbers, -1], 0] = 1
    if spec.placement is None:  # of which nobody else has a part
        out[:, 1] = given.rows.num_rows
        return out
    if given.counts is not None:  # of one process, whose sums nobody compares
        for shard in range(spec.num_shards):
            out[shard, 1] = given.counts[slice(*spec.placement.buckets(shard, shard))].sum()
        return out
    for keys in given.rows.pieces("keys"):
        owners = spec.placement.owners(keys.view(np.int64))
        for shard, mine in [*((shard, owners == shard) for shard in set(numbers)), (-1, slice(None))]:
            out[shard, 1:] += np.array([len(keys[mine]), sum_of_hashes(keys[mine])], np.uint64)
    return out


def sum_of_hashes(keys: np.ndarray) -> np.uint64:
    """What sets of keys that are equal have in common, whatever their order."""
    return host.hash_integers(as_int64(keys), 0).view(np.uint64).sum(dtype=np.uint64)


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
    check_capacity(spec, op, int(whole[0]), _OF_CAPACITY)


def check_capacity(spec: TableSpec, op: str, rows: int, mend: str) -> None:
    """Whether so many rows fit the table.

    Raises:
      MemoryError: there are more than ``max_capacity``, unless ``on_full="grow"``.
    """
    if spec.max_capacity is not None and rows > spec.max_capacity and spec.on_full != "grow":
        raise fail(MemoryError, spec.name, op, f"at most max_capacity={spec.max_capacity} rows", f"{rows}", mend)


_OF_CAPACITY = "make the table with a larger max_capacity, or prune the rows first"
