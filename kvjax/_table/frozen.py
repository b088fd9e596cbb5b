"""Frozen rows: a table as it was at one moment, copied out part by part while writes go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.source import Source, row_bytes
from kvjax._spec.spec import TableSpec
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle
from kvjax._values.exported import slot_column
from kvjax._values.snapshot import ADMISSION_COLUMNS, column_types, joined_admission
from kvjax.storage import External


@dataclasses.dataclass(frozen=True)
class FrozenRows:
    """What some shards of this process held together.

    Writes keep the rows that they are about to change until `copy_next` has given them, or until this is forgotten. So
    there are two of a row only where a write has come to it first.

    Attributes:
      num_rows: number of rows.
      last_step: of the table.
      offsets: ``(buckets + 1,)`` int64, the first row of each virtual bucket.
      slot_types: dtype and shape of each slot, "float32[64]", in the optimizer's order.
      admission: as in `Snapshot`.
      types: dtype and shape of what a row has in each column; "pinned" is only there if one is.
    """

    num_rows: int
    last_step: int
    offsets: np.ndarray
    slot_types: dict[str, str]
    admission: dict[str, np.ndarray]
    types: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    _spec: TableSpec
    _shards: Sequence[tuple[Any, Sequence[str]]]  # each with its slots

    def copy_next(self, to: Mapping[str, np.ndarray], pause: Callable[[float], object]) -> int:
        """Copies the next rows, sorted by (bucket, key); each row is given once.

        Args:
          to: the bytes ``(n,)`` uint8 of each of the columns of `types`. Their front gets as many rows as all have
            space for, or fewer.
          pause: called while the table is written, behind the rows, with the seconds to wait so that writes, which
            cannot go on while rows are copied, have to wait for a fortieth of the time.

        Returns:
          How many rows have come; 0 if none are left.
        """
        for shard, slots in self._shards:
            own = [to[slot_column(name)] for name in slots]
            rows, seconds = self._spec.host.next_part(shard, dict(to), own)
            if rows == 0:
                continue
            for column in () if slots else map(slot_column, self.slot_types):  # no training has come to the shard
                to[column][: rows * row_bytes(self.types[column])] = 0
            if seconds > 0:
                pause(seconds)
            return rows
        return 0

    def source(self) -> Source:
        """All columns, of which each row can be read once, one piece behind the other."""
        types = self.types | {"pinned": (np.dtype(np.bool_), ())}

        def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
            piece = {name: np.empty((stop - start, *shape), dtype) for name, (dtype, shape) in types.items()}
            if "pinned" not in self.types:
                piece["pinned"][:] = False
            rest = {name: piece[name].reshape(-1).view(np.uint8) for name in self.types}
            while len(rest["keys"]):
                rows = self.copy_next(rest, lambda seconds: None)  # nobody is to wait for long: it is soon done
                assert rows, "a row is read twice"
                rest = {name: data[rows * row_bytes(types[name]) :] for name, data in rest.items()}
            return {name: piece[name] for name in names}

        return Source(types, self.num_rows, read, {})


def freeze_rows(table: Handle, raises: bool = True, op: str = "save") -> FrozenRows | None:
    """Freezes the shards of this process of which others are copies.

    Args:
      table: the live handle.
      raises: whether to raise what other calls were refused for, as `of_newest` says.
      op: for errors.

    Returns:
      None if there are none, or they live in an engine of the user's, or their rows, one shard after the other, are not
      sorted: a partitioner has dealt them out; or if the handle has a view, whose rows are not those that are stored.
    """
    if table.view is not None:
        return None
    spec, version = table.spec, version_on_host(table, op)
    placement, shards = spec.placement, spec.originals
    dealt = placement is not None and placement.partitioner is not None and len(shards) > 1
    if not shards or dealt or isinstance(spec.storage, External):
        return None
    if placement is not None:  # each has a range of buckets
        shards = sorted(shards, key=lambda i: placement.local[i].shard)
    frozen: list[dict[str, Any]] = [spec.host.freeze(spec.name, shard, version, True, op, raises) for shard in shards]
    slots: dict[str, str] = next((dict(one["slots"]) for one in frozen if one["slots"]), {})
    types = column_types(spec.dim, spec.row_dtype, spec.key_dtype, slots)
    if not any(one["pinned"] for one in frozen):
        del types["pinned"]
    return FrozenRows(
        num_rows=sum(one["rows"] for one in frozen),
        last_step=max(one["last_step"] for one in frozen),
        offsets=np.sum([one["offsets"] for one in frozen], axis=0),
        slot_types=slots,
        admission=joined_admission([{name: one[name] for name in ADMISSION_COLUMNS} for one in frozen]),
        types=types,
        _spec=spec,
        _shards=[(one["frozen"], [name for name, _ in one["slots"]]) for one in frozen],
    )
