"""Moves of a live table to other shards: they are made and filled while the table is still there, then replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax._process import PROCESS
from kvjax._sharded.processes import allgather, together
from kvjax._spec.placement import described
from kvjax._spec.spec import TableSpec
from kvjax._spec.unsupported import check_backend
from kvjax._table import contents, lifetime, loads
from kvjax._table.behind import may_be_behind, note_loaded, note_moved
from kvjax._table.checks import check_spec, version_on_host
from kvjax._table.handle import Handle, live_version
from kvjax._values.snapshot import Snapshot


def move(
    table: Handle, spec: TableSpec, op: str, once: bool = False, bring: Callable[[Snapshot], Snapshot] | None = None
) -> jax.Array:
    """Makes `table` what `spec` says, which is of the same table in other shards. All its processes call this together.

    Args:
      table: the live handle.
      spec: of the table from then on.
      op: for errors.
      once: whether `bring` is given each row of the table by one process alone.
      bring: from the rows of this process to those of its new shards, or more; by default they are the same.

    Returns:
      The live version; old handles are behind it.
    """
    prepared = prepare_move(table, spec, op, once, bring)
    untouched = PROCESS.births.get(spec.name) == prepared.version
    live = prepared.commit()
    if untouched:
        PROCESS.births[spec.name] = int(live)
    return live


class Prepared(NamedTuple):
    """A move that is ready: the version that the table must still have, and the call that ends it."""

    version: int
    commit: Callable[[], jax.Array]


def prepare_move(
    table: Handle, spec: TableSpec, op: str, once: bool = False, bring: Callable[[Snapshot], Snapshot] | None = None,
    rows: loads.Loading | None = None,
) -> Prepared:  # fmt: skip
    """As `move`, but nothing changes before its commit.

    Args:
      table: as there.
      spec: as there.
      op: as there.
      once: as there.
      bring: as there.
      rows: which the table shall have instead of its own.
    """
    old = table.spec
    group = old.placement or spec.placement

    def begin() -> tuple[int, bool, Any]:
        check_backend(spec, op)
        check_spec(table, op)
        live_version(old)  # waits for all that has been started, and not only for what this handle needs
        version = version_on_host(table, op)
        own = old.originals if once else old.kept
        mine = loads.of_frozen(table, spec, op) if rows is None and bring is None else None
        if rows is None and mine is None:
            mine = contents.snapshot(old, op, version, True, own)
        return version, may_be_behind(table), mine

    def stage() -> tuple[Any, bool]:
        staged = lifetime.stage(spec, op, newest)
        given = loads.checked(spec, brought if rows is None else rows)
        filled = loads.fill(spec, given, lambda i, head: spec.host.begin_staged(staged, i, head))
        for part in filled.prepared:
            spec.host.commit_load(part)
        return staged, filled.caught_up

    places = {"placement": described(old.placement), "new placement": described(spec.placement)}
    version, behind, mine = together(group, spec.name, op, begin, places)
    newest, behind = (int(x) for x in allgather(group, np.array([version, behind], np.uint32)).max(0))
    brought = mine if bring is None else bring(mine)
    staged, caught_up = together(group, spec.name, op, stage)

    def commit() -> jax.Array:
        lifetime.replace(spec, op, version, staged)
        if rows is None:
            note_moved(spec, bool(behind))
        else:
            note_loaded(spec, caught_up)
        return live_version(spec)

    return Prepared(version, commit)
