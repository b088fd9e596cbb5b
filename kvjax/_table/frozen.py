"""Frozen rows: a table as it was at one moment, copied out part by part while writes go on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvjax._spec.spec import TableSpec
from kvjax._table.handle import Handle, version_on_host
from kvjax._values.snapshot import ADMISSION_COLUMNS, WAITING_COLUMNS, column_types, concat, from_native
from kvjax.storage import External


@dataclasses.dataclass(frozen=True)
class FrozenRows:
    """What some shards of this process held together.

    Writes keep the rows that they are about to change until `parts` has given them, or until this is forgotten. So
    there are two of a row only where a write has come to it first.

    Attributes:
      size: number of rows.
      pinned: whether one of them is pinned.
      last_step: of the table.
      offsets: ``(buckets + 1,)`` int64, the first row of each virtual bucket.
      slot_types: dtype and shape of each slot, "float32[64]", in the optimizer's order.
      admission: as in `Snapshot`.
      types: dtype and shape of what a row has in each column; "pinned" is only there if one is.
    """

    size: int
    pinned: bool
    last_step: int
    offsets: np.ndarray
    slot_types: dict[str, str]
    admission: dict[str, np.ndarray]
    types: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    _spec: TableSpec
    _shards: tuple[Any, ...]

    def __len__(self) -> int:
        return self.size

    def parts(self, pause: Callable[[float], object] = time.sleep) -> Iterator[dict[str, np.ndarray]]:
        """The columns, a few rows at a time, sorted by (bucket, key); each row is given once.

        Args:
          pause: called while the table is written, before each part, with the seconds to wait so that writes, which
            cannot go on while a part is copied, have to wait for a fortieth of the time.
        """
        spec = self._spec
        for shard in self._shards:
            while True:
                raw: dict[str, Any] = spec.host.next_part(shard)
                if len(raw["keys"]) == 0:
                    break
                if raw["pause"] > 0:
                    pause(raw["pause"])
                columns = from_native(raw, spec.dim, spec.row_dtype, spec.key_dtype).rows.columns()
                n = len(columns["keys"])
                # A shard that no training has come to has no slots.
                yield {
                    name: columns[name] if name in columns else np.zeros((n, *shape), dtype)
                    for name, (dtype, shape) in self.types.items()
                }


def freeze_rows(table: Handle) -> FrozenRows | None:
    """Freezes the shards of this process of which others are copies.

    Args:
      table: the live handle.

    Returns:
      None if there are none, or they live in an engine of the user's, or their rows, one shard after the other, are not
      sorted: a partitioner has dealt them out; or if the handle has a view, whose rows are not those that are stored.
    """
    if table.view is not None:
        return None
    spec, version = table.spec, version_on_host(table, "save")
    placement, shards = spec.placement, spec.originals
    dealt = placement is not None and placement.partitioner is not None and len(shards) > 1
    if not shards or dealt or isinstance(spec.storage, External):
        return None
    if placement is not None:  # each has a range of buckets
        shards = sorted(shards, key=lambda i: placement.local[i].shard)
    frozen: list[dict[str, Any]] = [spec.host.freeze(spec.name, shard, version, True) for shard in shards]
    slots: dict[str, str] = next((dict(one["slots"]) for one in frozen if one["slots"]), {})
    types = column_types(spec.dim, spec.row_dtype, spec.key_dtype, slots)
    pinned = any(one["pinned"] for one in frozen)
    if not pinned:
        del types["pinned"]
    waiting = concat([{name: one[name] for name in WAITING_COLUMNS} for one in frozen])
    # The cells of a bucket are used by the shard that owns it alone.
    admission = waiting | {"sketch": np.max([one["sketch"] for one in frozen], axis=0)}
    assert admission.keys() == ADMISSION_COLUMNS.keys()
    return FrozenRows(
        size=sum(one["rows"] for one in frozen),
        pinned=pinned,
        last_step=max(one["last_step"] for one in frozen),
        offsets=np.sum([one["offsets"] for one in frozen], axis=0),
        slot_types=slots,
        admission=admission,
        types=types,
        _spec=spec,
        _shards=tuple(one["frozen"] for one in frozen),
    )
