"""Restoring tables together: all that a call asks for, or none."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax._keys.keys import Keys, KeysLike, as_keys
from kvjax._process import PROCESS
from kvjax._sharded.processes import all_of, each_together, together
from kvjax._spec.placement import Placement
from kvjax._spec.sharding import placement_of
from kvjax._table.registry import tables as tables_of_process
from kvjax._table.table import Table, check_table
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.tracing import check_not_traced
from kvjax.checkpoint._chains.chain import Chain, unreplaced
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._tables.cursors import put
from kvjax.checkpoint._tables.restore_table import Ready, Restore, RestoreOptions
from kvjax.storage import Storage

Wanted: TypeAlias = Mapping[str, Table | str | None] | Sequence[Table | str] | None
"""Tables to load into, by their names in a checkpoint; or of those names."""


def restore(
    path: PathLike,
    tables: Wanted = None,
    *,
    mesh: Mesh | None = None,
    devices: Sequence[object] | None = None,
    axis: str | tuple[str, ...] | None = None,
    partitioner: Callable[[Keys, int], ArrayLike] | None = None,
    replicated: bool = False,
    wire: DTypeLike | None = None,
    storage: Storage | None = None,
    dtype: DTypeLike | None = None,
    slots: bool = True,
    keys: KeysLike | None = None,
    merge: bool = False,
    own_initializer: bool = False,
    base: PathLike | Sequence[PathLike] | None = None,
    cursor: str | None = None,
) -> dict[str, Table]:
    """Restores tables: all tables of the call, or none if one of them cannot be restored.

    A checkpoint has the options of its tables, so a process without tables needs only the path. Your own functions (an
    initializer, a constraint, a score) are not in it: make such a table first; otherwise the error names the option.
    The contents of a table that exists are replaced, including slots, frequencies and versions, and a handle given here
    may be stale. Any number of shards and processes may have written the checkpoint: a table stays in its place.

    It needs memory for the new tables beside those that they replace, and about 90 MB, or 190 for a delta; with
    `merge` also for a copy of each existing table.

    In several processes, all that have a part of a table restore together, with the same tables and arguments. What is
    restored without `tables` counts as part of all live tables and of `mesh`; a process may restore tables in one place
    alone if it names them.

    Args:
      path: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, of the manager (its last step is
        restored), or of numbered checkpoints ("12", "delta_12"; the last is restored).
      tables: tables to load into, by their names in the checkpoint; None instead of a table loads into the table of
        that name, or makes it as it was saved; a name instead does so under that name: ``{"saved": "here"}``. Or a list
        of tables and names, if these names are the same in the checkpoint. By default all tables of the checkpoint.
      mesh: devices over which new tables are sharded, as in `kvjax.get_table`; by default each new table is in one
        place.
      devices: as there.
      axis: as there.
      partitioner: as there. A table that had one needs one; it may be a different one.
      replicated: as there.
      wire: as there.
      storage: where the rows of new tables live, one of `kvjax.storage`; by default as in `kvjax.get_table`. If a table
        exists, is not given in `tables` and lives elsewhere, that is an error.
      dtype: dtype to convert rows to; a table that exists must have it. A value that it cannot hold is an error.
      slots: whether to restore the optimizer's slots; without them training begins with fresh ones.
      keys: keys ``(n,)`` of the rows to restore; by default all. A key that the checkpoint lacks has no row afterwards.
      merge: keep the rows of an existing table whose keys are not in the checkpoint. Counts of waiting keys are merged
        in the same way; the counts of a sketch are those of the checkpoint.
      own_initializer: an existing table keeps its initializer and seed, which may differ from the saved ones. Keys
        without a row then read differently than before.
      base: for a delta, where to look for the checkpoints that it builds on: a checkpoint, a folder of checkpoints, a
        manager, or several of these. After these, `restore` looks beside the delta, in the other steps of its manager,
        and beside what `base` names.
      cursor: puts a cursor of this name at the checkpoint, so that deltas can start there (`save`). All tables of the
        checkpoint must be restored, and as they were saved.

    Returns:
      The live handles, by the names in the checkpoint, sorted by these.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged, or a checkpoint that a delta builds on is missing.
      ValueError: a table has other options than the saved one, a function is missing, an argument does not fit, or the
        calls of several processes are not the same.
      TypeError: `keys` are not keys, or JAX may have cut them to 32 bits; `tables` or `path` is something else; or the
        call is inside ``jit``.
      RuntimeError: there is no backend for the storage of a new table.
      MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``; or there is no memory for them.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_read", dim=2).upsert(np.array([7, 8]), [[1.0, 2.0], [3.0, 4.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> kvjax.drop_table("doc_read")
      >>> table = kvjax.checkpoint.restore(folder.name + "/one", dtype="bfloat16", keys=np.array([8]))["doc_read"]
      >>> len(table), table.spec.dtype, table.lookup(8).tolist()
      (1, 'bfloat16', [3.0, 4.0])
      >>> kvjax.drop_table("doc_read")
      >>> folder.cleanup()
    """
    check_not_traced(None, "restore")
    how = RestoreOptions(
        mesh=mesh, devices=devices, axis=axis, partitioner=partitioner, replicated=replicated, wire=wire,
        storage=storage, dtype=dtype, slots=slots, keys=keys, merge=merge, own_initializer=own_initializer,
    )  # fmt: skip
    if jax.process_count() > 1:  # of which each would find out by itself
        return restore_all(lambda: Chain(path, base), tables, how, cursor)
    return unreplaced(path, base, "restore", lambda chain: restore_all(lambda: chain, tables, how, cursor))


def restore_all(
    find: Callable[[], Chain], tables: Wanted, how: RestoreOptions,
    cursor: str | None = None,
) -> dict[str, Table]:  # fmt: skip
    """As `restore`, from the chain that `find` gives, or an error of its in all processes."""
    wanted = _by_name(tables)
    place = _place(wanted, how)

    def at_first() -> tuple[Chain, dict[str, Restore]]:
        chain = find()
        given = dict.fromkeys(chain.names) if wanted is None else wanted
        for table in given.values():
            if table is not None and not isinstance(table, str):
                check_table(table, "restore")
        if cursor is not None:
            _check_all(chain, given, how)
        for name in sorted(set(given) - set(chain.names), key=str):
            chain.catalog.open(name)  # which says what there is
        restores = {name: Restore(chain, name, given[name], how) for name in sorted(given)}
        _check_distinct(list(restores.values()))
        return chain, restores

    def one(name: str) -> Ready:  # so that what was read of one table is in memory at a time
        return restores[name].prepare(restores[name].open(), cursor is not None)

    chain, restores = together(place, None, "restore", at_first)
    digest = chain.catalog.digest
    said = {"cursor": cursor, "keys": _keys_said(how.keys), "dtype": repr(how.dtype)}
    said |= {name: getattr(how, name) for name in _PLAIN}
    together(place, None, "restore", lambda: None, {"checkpoint": digest} | said)  # of two steps each may see another
    try:
        ready = each_together(place, "restore", {name: each.processes for name, each in restores.items()}, one)
        with _alone():
            together(place, None, "restore", lambda: [each.check() for each in ready.values()])
            restored = {name: each.commit() for name, each in ready.items()}
    except BaseException:
        with _alone():
            for each in restores.values():
                each.undo()
        raise
    if cursor is not None and digest is not None:
        put(cursor, restored, chain, digest)
    return restored


def _alone() -> contextlib.AbstractContextManager[object]:
    """No other thread's restore is between its last look and its end. Not where processes meet in between: their
    threads could wait for one another."""
    return PROCESS.restoring if jax.process_count() == 1 else contextlib.nullcontext()


def _by_name(tables: Wanted) -> Mapping[str, Table | str | None] | None:
    anything = cast("object", tables)
    if anything is None or isinstance(anything, Mapping):
        return cast("Mapping[str, Table | str | None] | None", tables)
    items: list[Any] = list(anything) if isinstance(anything, Sequence) and not isinstance(anything, str) else [None]
    if not all(isinstance(item, (str, Table)) for item in items):
        raise TypeError(
            f"kvjax: restore: want tables by their names in the checkpoint, got {type(anything).__name__}; give "
            "{name: table}, or {name: None} for the table of that name, {name: 'other'} for one of another; or a list "
            "of tables and names"
        )
    return {item.name if isinstance(item, Table) else item: item if isinstance(item, Table) else None for item in items}


def _keys_said(keys: KeysLike | None) -> str | None:
    if keys is None:
        return None
    words = np.asarray(as_keys(keys, "restore, keys").words)
    return f"{words.size // 2} with CRC-32 {zlib.crc32(words.tobytes()):08x}"


def _place(tables: Mapping[str, Table | str | None] | None, how: RestoreOptions) -> Placement | None:
    """What the processes have in common that restore these tables, as far as it is known without the checkpoint."""
    if jax.process_count() == 1:
        return None
    live = tables_of_process()
    if tables is None:
        found = list(live.values())
    else:
        found = [
            into if isinstance(into, Table) else live.get(into if isinstance(into, str) else name)
            for name, into in tables.items()
        ]
    placements = [None if table is None else table.spec.placement for table in found]
    if how.given and (tables is None or None in found):
        with contextlib.suppress(ValueError):  # which comes later, with a table's name
            placements.append(placement_of(how, "", "restore"))
    return all_of(placements)


def _check_all(chain: Chain, tables: Mapping[str, Table | str | None], how: RestoreOptions) -> None:
    """Whether deltas can go on from what is restored.

    Raises:
      ValueError: it is not all of the checkpoint.
    """
    changed = [name for name in ("dtype", "keys") if getattr(how, name) is not None]
    changed += [name for name, value in _PLAIN.items() if getattr(how, name) != value]
    changed += [] if set(tables) == set(chain.names) else ["tables"]
    changed += [] if chain.catalog.digest is not None else ["a format without a manifest"]
    if changed:
        raise ValueError(
            f"kvjax: restore: want cursor= beside all of a checkpoint, as it was saved, got {', '.join(changed)}; "
            "leave that out, or save the tables whole, with a cursor"
        )


_PLAIN = {"slots": True, "merge": False, "own_initializer": False}
"""Options of a restore, as they are for all of a checkpoint."""


def _check_distinct(restores: Sequence[Restore]) -> None:
    sources: dict[str, str] = {}
    for one in restores:
        if one.target in sources:
            raise fail(
                ValueError, one.target, "restore", "one table of the checkpoint to load into it",
                f"{sources[one.target]!r} and {one.name!r}", "give each a table of its own",
            )  # fmt: skip
        sources[one.target] = one.name
