"""Unsaved copies: what the processes that do not save a table have in theirs, which a save leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvjax._sharded.processes import allgather_json, everyone, together
from kvjax._table.frozen import freeze_rows
from kvjax._table.live import of_newest
from kvjax._table.sizes import num_rows
from kvjax._table.table import Table
from kvjax._values.errors import warn
from kvjax.checkpoint._tables.write import shared_placement
from kvjax.ffi import host, is_device


def warn_of_unsaved_copies(tables: Mapping[str, Table]) -> None:
    """Warns if a table that is not sharded over processes has other rows in another process than in process 0, which
    saves its own. All processes call this together, and all warn.

    Where all train in lockstep the copies are equal. What is compared is cheap: no values.
    """
    place = everyone()
    if place is None:
        return
    alone = {name: table for name, table in tables.items() if shared_placement(table) is None}
    mine = together(place, None, "save", lambda: {name: _contents(table) for name, table in alone.items()})
    first, *others = allgather_json(place, mine)
    for name in sorted(first):
        other = next((i for i, said in enumerate(others, 1) if said.get(name, first[name]) != first[name]), None)
        if other is None:
            continue
        there = others[other - 1][name]
        keys = "" if there[:2] != first[name][:2] else " of other keys"
        warn(
            f"kvjax: table {name!r}, save: want the same rows in all processes of a table that is not sharded over "
            f"them, of which process 0 saves its own, got {_said(first[name])} in process 0 and {_said(there)}{keys} "
            f"in process {other}, which are not saved; make it with mesh= over all processes, or, if each is to have "
            "rows of its own, write what Table.export gives in each"
        )


def _said(contents: list[int]) -> str:
    return f"{contents[0]} rows after step {contents[1]}"


def _contents(table: Table) -> list[int]:
    """Number of rows, last step, and a digest of how many rows each bucket has, which tells other keys; 0 where that
    would take a copy of all rows."""
    frozen = None if is_device(table.spec.storage.backend) else of_newest(table, freeze_rows)
    if frozen is None:
        return [num_rows(table, table.spec.originals), table.stats().last_step, 0]
    return [frozen.num_rows, frozen.last_step, host.digest(frozen.offsets.view(np.uint8))]
