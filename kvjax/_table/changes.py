"""Changes: the rows that have changed since a cursor, and the keys that no longer have one, for deltas."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from kvjax._keys.buckets import by_bucket
from kvjax._table import contents
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle
from kvjax._values.errors import fail
from kvjax._values.snapshot import Snapshot, from_native


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a cursor is in a table.

    Attributes:
      backend: of the table, on which no two cursors have a token in common.
      tokens: what each shard of this process knows the cursor by.
    """

    backend: str
    tokens: dict[int, int]


class TableChanges(NamedTuple):
    """What has changed since a cursor.

    Attributes:
      rows: those that may be others, or are new, and counts of keys that wait.
      removed: keys ``(m,)`` int64 that may have had a row and have none.
      counts_of_all: whether the counts are of all keys that wait, and not only of those among the removed.
    """

    rows: Snapshot
    removed: np.ndarray
    counts_of_all: bool


def open_cursor(table: Handle) -> Mark:
    """Has a table remember what it is at this handle, as far as it takes to know what changes.

    Raises:
      ValueError: the handle is what `kvjax.optax.caught_up` gives, on whose rows no delta can build.
      RuntimeError: the handle is stale.
    """
    spec = table.spec
    if table.view is not None:
        raise fail(
            ValueError, spec.name, "save", "the rows that are stored beside a cursor of deltas",
            "those of kvjax.optax.caught_up", "leave the cursor out, or save the table itself",
        )  # fmt: skip
    version, mark = version_on_host(table, "save"), Mark(spec.storage.backend, {})
    try:
        for shard in spec.originals:
            mark.tokens[shard] = spec.host.open_cursor(spec.name, shard, version)
    except BaseException:
        close_cursor(table, mark)
        raise
    return mark


def close_cursor(table: Handle, mark: Mark) -> None:
    """Has a table forget a cursor, if it is still the one that has it."""
    if mark.backend != table.spec.storage.backend:
        return
    for shard, token in mark.tokens.items():
        try:
            table.spec.host.close_cursor(table.name, shard, token)
        except (KeyError, ValueError, IndexError):  # dropped, or moved to fewer shards
            return


def changes_since(table: Handle, mark: Mark) -> TableChanges | None:
    """What has changed since a cursor; None if the table does not know, and may be another altogether."""
    spec, version = table.spec, version_on_host(table, "save")
    if mark.backend != spec.storage.backend or mark.tokens.keys() != set(spec.originals):
        return None
    raws: list[Any] = [spec.host.export_since(spec.name, shard, version, token) for shard, token in mark.tokens.items()]
    raw = [part for part in raws if part is not None]
    if len(raw) < len(raws) or len({part["counts_of_all"] for part in raw}) != 1:
        return None
    parts = [from_native(part, spec.dim, spec.row_dtype, spec.key_dtype) for part in raw]
    removed = np.concatenate([part["removed"] for part in raw])
    return TableChanges(
        contents.joined(parts),
        removed[by_bucket(removed)[0]] if len(parts) > 1 else removed,
        raw[0]["counts_of_all"],
    )
