"""Writing: what each process has of a table, frozen or copied, and put on disk."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax._formats.paths import AnyPath
from kvjax._formats.source import Source, offsets_of
from kvjax._keys.buckets import buckets_of
from kvjax._sharded.processes import allgather_json, together
from kvjax._spec.placement import Placement
from kvjax._table.behind import warn_if_found_behind
from kvjax._table.changes import TableChanges, changes_since
from kvjax._table.contents import copied
from kvjax._table.frozen import FrozenRows, freeze_rows
from kvjax._table.live import of_newest
from kvjax._table.table import Table
from kvjax._values.integers import as_int64
from kvjax._values.prune import PruneLike, rule_for
from kvjax._values.snapshot import Snapshot
from kvjax.checkpoint._disk.format import POOL, REMOVED
from kvjax.checkpoint._disk.meta import described, made_with
from kvjax.checkpoint._disk.rules import name_of
from kvjax.checkpoint._disk.threads import side_by_side
from kvjax.checkpoint._disk.write_shard import write_shard
from kvjax.checkpoint._tables.cursors import Cursor
from kvjax.initializers import Pool


@dataclasses.dataclass(frozen=True)
class Stored:
    """A table as it goes to disk: its description, and what this process has of it.

    Attributes:
      meta: what kvjax.json says.
      arrays: those of which not each row has some, by name.
      rows: the columns of rows; None if there is no part of the table here.
      shard: which of the shards on disk this process writes, None for none. The first also writes what all share.
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    rows: Source | FrozenRows | None
    shard: int | None


def freeze(name: str, table: Table, prune: PruneLike | None, since: Cursor | None) -> Stored:
    """What this process has of a table, to be saved under a name; training may go on while it is written.

    Rows are copied as they are written, and before that those that training comes to. Copied here are those that are
    pruned, that have changed since a cursor, or that `freeze_rows` does not freeze.
    """
    spec, placement, process = table.spec, shared_placement(table), jax.process_index()
    if placement is None and process != 0:
        return Stored({}, {}, None, None)
    together(placement, spec.name, "save", lambda: None, made_with(spec.dim, vars(spec)))
    changes = None if since is None else _changes(table, name, since)
    if changes is not None:
        taken: Snapshot | FrozenRows = changes.rows
        rows = _rows_of(taken)
    elif prune is not None:
        taken, keep = _pruned(table, prune)
        rows = _rows_of(taken, keep)
    else:
        taken = together(
            placement, spec.name, "save", lambda: of_newest(table, freeze_rows) or copied(table, "save", once=True)
        )
        rows = taken if isinstance(taken, FrozenRows) else _rows_of(taken)
    # A sketch of zeros is none; the only key that waits may be 0.
    arrays = {name: x for name, x in taken.admission.items() if (x.any() if name == "sketch" else len(x))}
    if changes is not None and len(changes.removed):
        arrays[REMOVED] = changes.removed
    extras = {name: [array.dtype.name, list(array.shape)] for name, array in arrays.items()}
    if "pinned" in rows.types:
        extras["pinned"] = ["bool", [rows.num_rows]]
    own = {
        "rows": rows.num_rows,
        "extras": extras,
        "last_step": taken.last_step if isinstance(taken, FrozenRows) else taken.rows.last_step,
        "slots": list(taken.slot_types.items()),  # in the optimizer's order, which is part of what they are
    }
    writers, processes = (placement.writers, placement.processes) if placement else ((0,), (0,))
    by_process = dict(zip(processes, allgather_json(placement, own), strict=True))
    meta = described(name, spec.dim, vars(spec), [by_process[p] for p in writers])
    if spec.placement is not None and spec.placement.partitioner is not None:
        meta["partitioner"] = name_of(spec.placement.partitioner)
    if since is not None and changes is not None:
        meta["delta"] = {"since": since.checkpoint, "counts_of_all": changes.counts_of_all}
    arrays["offsets"] = taken.offsets
    if isinstance(spec.initializer, Pool):
        arrays[POOL] = spec.initializer.array()
    return Stored(meta, arrays, rows, writers.index(process) if process in writers else None)


def _rows_of(copy: Snapshot, keep: np.ndarray | None = None) -> Source:
    """The rows of a copy, or those where `keep` is true, without a column of pins if none is pinned. Nothing is copied:
    what is kept would be a second copy of the table, if few rows are left out."""
    rows = Source.of(copy.rows.columns(), {})
    if keep is not None:
        rows = rows.where(keep)
    pinned = any(pins.any() for pins in rows.pieces("pinned"))
    return rows if pinned else rows.only([name for name in rows.types if name != "pinned"])


def _pruned(table: Table, prune: PruneLike) -> tuple[Snapshot, np.ndarray]:
    """A copy, and which of its rows ``(n,)`` bool are kept, of which ``top_k`` is of those of all processes."""
    placement, name = shared_placement(table), table.spec.name
    rule = rule_for(prune, name, table.spec.key_dtype, table.spec.shared_key)

    def begin() -> tuple[Snapshot, np.ndarray]:
        copy = copied(table, "save", once=True)
        warn_if_found_behind(table, "save", copy.rows)
        return copy, rule.passing(copy.rows)

    copy, passing = together(placement, name, "save", begin)
    rows = copy.rows
    if rule.top_k is not None and placement is not None:
        some = (array[passing] for array in (rows.keys, rows.freqs, rows.versions))
        rule = dataclasses.replace(rule, top_k=_part_of_best(placement, rule.top_k, *some))
    keep = rule.chosen(passing, rows.keys, rows.freqs, rows.versions)
    admission = rule.counts_kept(copy.admission)
    return dataclasses.replace(copy, offsets=offsets_of(keep)[copy.offsets], admission=admission), keep


def _part_of_best(placement: Placement, k: int, keys: np.ndarray, freqs: np.ndarray, versions: np.ndarray) -> int:
    """How many of this process's rows are among the k most frequent of all; all ask together.

    Ties go to the row that was written later, then to the order of the disk, as in `kvjax.Prune`. Processes tell each
    other one row at a time, some 2 log(n) times for each of them, and never all of theirs.

    Args:
      placement: of the table.
      k: rows of all.
      keys: ``(n,)``, of this process.
      freqs: ``(n,)`` int64.
      versions: ``(n,)`` int64.
    """
    words, buckets = as_int64(keys), buckets_of(keys)
    order = np.lexsort((words, buckets, -versions, -freqs))

    def place(i: int) -> list[int]:
        at = order[i]
        return [-int(freqs[at]), -int(versions[at]), int(buckets[at]), int(words[at])]

    # Of the rows in order those before `low` are among them, and those from `high` on are not.
    low, high, every = 0, len(order), range(len(order))
    while True:
        said = allgather_json(placement, [low, high, place((low + high) // 2) if low < high else None])
        lows, highs, middles = zip(*said, strict=True)
        if sum(highs) <= k:
            return high
        if sum(lows) == sum(highs):
            return low
        pivot = max(zip(highs, lows, middles, strict=True), key=lambda one: one[0] - one[1])[2]
        through = min(max(bisect_right(every, pivot, key=place), low), high)
        if sum(allgather_json(placement, through)) <= k:
            low = through
        else:
            high = min(max(bisect_left(every, pivot, key=place), low), high)


def _changes(table: Table, name: str, since: Cursor) -> TableChanges | None:
    """What has changed since a cursor, if that is known in all processes of the table."""
    placement, mark = shared_placement(table), since.marks.get(name)
    found = together(
        placement, table.spec.name, "save", lambda: None if mark is None else changes_since(table, mark[1])
    )
    known = allgather_json(placement, None if found is None else found.counts_of_all)
    return None if None in known or len(set(known)) != 1 else found


def shared_placement(table: Table) -> Placement | None:
    """Where a table is of which several processes have parts. Of any other each process has one of its own, and
    process 0 saves it."""
    return table.spec.placement if table.spec.num_processes > 1 else None


def savers(table: Table) -> Sequence[int]:
    """The processes that a save of a table needs."""
    placement = shared_placement(table)
    return (0,) if placement is None else placement.processes


def write(directory: AnyPath, stored: Sequence[Stored]) -> None:
    """Writes what this process has of tables below `directory`, and lists it; `write_manifest` comes when all have.

    Everything is on the disk then.

    Raises:
      CheckpointError: a table is there already.
    """
    side_by_side([functools.partial(_write_shard, directory, s, s.shard) for s in stored if s.shard is not None])


def _write_shard(directory: AnyPath, stored: Stored, number: int) -> None:
    rows, pieces, frozen = stored.rows, [stored.arrays], None
    assert rows is not None, "who writes a shard has rows"
    kinds = {name: (array.dtype, array.shape) for name, array in stored.arrays.items()}
    kinds |= {name: (dtype, (rows.num_rows, *shape)) for name, (dtype, shape) in rows.types.items()}
    if isinstance(rows, FrozenRows):
        frozen = rows
    else:
        pieces = itertools.chain(
            pieces, rows.rows()
        )  # not ahead, by a thread, which the end of the process may not have
    write_shard(directory, stored.meta, number, kinds, pieces, frozen)
