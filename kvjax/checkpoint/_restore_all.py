"""Restoring tables together: all that a call asks for, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax._keys.keys import Keys, KeysLike
from kvjax._table.table import Table, check_table
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax.checkpoint._chain import Chain, unreplaced
from kvjax.checkpoint._cursors import put
from kvjax.checkpoint._locate import PathLike
from kvjax.checkpoint._restore import How, Restore
from kvjax.storage import Storage


def restore(
    path: PathLike,
    tables: Mapping[str, Table | str | None] | None = None,
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
    base: PathLike | Sequence[PathLike] | None = None,
    cursor: str | None = None,
) -> dict[str, Table]:
    """Restores tables: all that are asked for, or none if one of them cannot be.

    A checkpoint says what its tables were: a process that has none needs no more than the path. Only functions of
    yours (an initializer, a constraint, a score) are not in it, and the error says which: make such a table first. The
    contents of a table that exists are replaced, slots, frequencies and versions with them, and a handle given here may
    be stale. Any number of shards and processes may have written the checkpoint: a table keeps the place that it has.

    Args:
      path: of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager: then of its last step; or
        of a folder of numbered checkpoints ("12", "delta_12"): then of the last.
      tables: tables to load into, by their names in the checkpoint; None instead of a table loads into the one of that
        name, or makes it as it was saved, and a name does so with the table of that name: ``{"saved": "here"}``. By
        default all tables of the checkpoint.
      mesh: over which tables that are made here are sharded, as in `kvjax.get_table`; by default each is in one place.
      devices: as there.
      axis: as there.
      partitioner: as there. Tables that had one need one; it may be another.
      replicated: as there.
      wire: as there.
      storage: where the rows of tables that are made here live, one of `kvjax.storage`; by default where a new table's
        would. A table that is not given here and lives elsewhere is an error.
      dtype: to convert rows to, which a table that exists must have. A value that it cannot hold is an error.
      slots: whether to restore the optimizer's slots; without them training begins with fresh ones.
      keys: of the rows to restore, ``(n,)``; by default all. A key that the checkpoint lacks has no row afterwards.
      merge: leave the rows of a table that exists where the checkpoint has none of their keys. Counts of waiting keys
        are merged likewise; of a sketch, the checkpoint's are taken.
      base: of a delta, where to look for the checkpoints that it builds on: one, a folder of some, a manager, or
        several of these. After them, those next to it are tried, the other steps of its manager, and those next to what
        was given.
      cursor: puts a cursor of this name at the checkpoint, of the tables that are restored as they were saved, all of
        them, so that deltas go on from there (`save`).

    Returns:
      The live handles, by the names in the checkpoint.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged, or one is not there that a delta builds on.
      ValueError: a table is not what was saved, a function is missing, or an argument does not fit.
      TypeError: `keys` are none, or JAX may have cut them to 32 bits.

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
    how = How(
        mesh=mesh, devices=devices, axis=axis, partitioner=partitioner, replicated=replicated, wire=wire,
        storage=storage, dtype=dtype, slots=slots, keys=keys, merge=merge,
    )  # fmt: skip
    if jax.process_count() > 1:  # of which each would find out by itself
        return restore_all(Chain(path, base), tables, how, cursor)
    return unreplaced(path, base, "restore", lambda chain: restore_all(chain, tables, how, cursor))


def restore_all(
    chain: Chain, tables: Mapping[str, Table | str | None] | None, how: How, cursor: str | None = None
) -> dict[str, Table]:
    """As `restore`, from a chain."""
    if tables is None:
        tables = {name: None for name in chain.names}
    anything = cast("object", tables)
    if not isinstance(anything, Mapping):
        raise TypeError(
            f"kvjax: restore: want tables by their names in the checkpoint, got {type(anything).__name__}; give "
            "{name: table}, or {name: None} for the table of that name, {name: 'other'} for one of another"
        )
    for table in tables.values():
        if table is not None and not isinstance(table, str):
            check_table(table, "restore")
    if cursor is not None:
        _check_all(chain, tables, how)
    restores = [Restore(chain, name, table, how) for name, table in tables.items()]
    _check_distinct(restores)
    try:
        for one in restores:  # so that what was read of one table is in memory at a time
            one.open()
            one.prepare(cursor is not None)
    except BaseException:
        for one in restores:
            one.undo()
        raise
    restored = {one.name: one.commit() for one in restores}
    if cursor is not None and chain.catalog.digest is not None:
        put(cursor, restored, chain, chain.catalog.digest)
    return restored


def _check_all(chain: Chain, tables: Mapping[str, Table | str | None], how: How) -> None:
    """Whether deltas can go on from what is restored.

    Raises:
      ValueError: it is not all of the checkpoint.
    """
    changed = [name for name in ("dtype", "keys") if getattr(how, name) is not None]
    changed += [name for name, plain in (("slots", True), ("merge", False)) if getattr(how, name) != plain]
    changed += [] if set(tables) == set(chain.names) else ["tables"]
    changed += [] if chain.catalog.digest is not None else ["a format without a manifest"]
    if changed:
        raise ValueError(
            f"kvjax: restore: want cursor= beside all of a checkpoint, as it was saved, got {', '.join(changed)}; "
            "leave that out, or save the tables whole, with a cursor"
        )


def _check_distinct(restores: Sequence[Restore]) -> None:
    sources: dict[str, str] = {}
    for one in restores:
        if one.target in sources:
            raise fail(
                ValueError, one.target, "restore", "one table of the checkpoint to load into it",
                f"{sources[one.target]!r} and {one.name!r}", "give each a table of its own",
            )  # fmt: skip
        sources[one.target] = one.name
