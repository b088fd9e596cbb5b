"""Changes: the keys that writes have touched or removed since a cursor, for deltas."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvjax import ffi
from kvjax._keys.buckets import by_bucket
from kvjax._spec.spec import TableSpec
from kvjax._table import contents
from kvjax._table.compared import Digests
from kvjax._table.handle import Handle, version_on_host
from kvjax._values.errors import fail
from kvjax._values.snapshot import Snapshot, from_native

Mark = dict[int, int] | Digests
"""Where a cursor is in a table: what each shard of this process knows it by, which no two cursors have in common; or,
of a table on a device, what its rows were."""


class Changes(NamedTuple):
    """What has changed since a cursor.

    Attributes:
      rows: those that were touched and are there, and counts of keys that wait.
      removed: keys ``(m,)`` int64 that were touched and have no row.
      counts_of_all: whether the counts are of all keys that wait, and not only of those among the removed.
    """

    rows: Snapshot
    removed: np.ndarray
    counts_of_all: bool


def open_cursor(table: Handle) -> Mark:
    """Has a table remember, from this handle on, which of its keys are touched.

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
    version, tokens = version_on_host(table, "save"), dict[int, int]()
    if ffi.is_device(spec.storage.backend):
        return Digests.of(spec, _snapshot(spec, version))
    try:
        for shard in spec.originals:
            tokens[shard] = spec.host.open_cursor(spec.name, shard, version)
    except BaseException:
        close_cursor(table, tokens)
        raise
    return tokens


def close_cursor(table: Handle, mark: Mark) -> None:
    """Has a table forget a cursor, if it is still the one that has it."""
    for shard, token in () if isinstance(mark, Digests) else mark.items():
        try:
            table.spec.host.close_cursor(table.name, shard, token)
        except (KeyError, ValueError, IndexError):  # dropped, or moved to fewer shards
            return


def changes_since(table: Handle, mark: Mark) -> Changes | None:
    """What has changed since a cursor; None if the table does not know, and may be another altogether."""
    spec, version = table.spec, version_on_host(table, "save")
    if isinstance(mark, Digests):
        found = mark.changed(spec, _snapshot(spec, version))
        return None if found is None else Changes(*found, counts_of_all=True)
    if mark.keys() != set(spec.originals):
        return None
    raws: list[Any] = [spec.host.export_since(spec.name, shard, version, token) for shard, token in mark.items()]
    raw = [part for part in raws if part is not None]
    if len(raw) < len(raws) or len({part["counts_of_all"] for part in raw}) != 1:
        return None
    parts = [from_native(part, spec.dim, spec.row_dtype, spec.key_dtype) for part in raw]
    removed = np.concatenate([part["removed"] for part in raw])
    return Changes(
        contents.joined(parts),
        removed[by_bucket(removed)[0]] if len(parts) > 1 else removed,
        raw[0]["counts_of_all"],
    )


def _snapshot(spec: TableSpec, version: int) -> Snapshot:
    return contents.snapshot(spec, version, slots=True, shards=spec.originals)
