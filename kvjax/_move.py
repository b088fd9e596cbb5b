"""Moves a live table to other shards: they are made and filled while the table is still there, then replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax import _live
from kvjax._device import check_backend
from kvjax._export import Snapshot
from kvjax._handle import live_version
from kvjax._processes import gather, together
from kvjax._shards import split
from kvjax._spec import TableSpec

if TYPE_CHECKING:
    from kvjax._table import Table


def move(
    table: Table, spec: TableSpec, op: str, once: bool = False, bring: Callable[[Snapshot], Snapshot] | None = None
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
    group = table.spec.placement or spec.placement

    def begin() -> tuple[int, Snapshot]:
        check_backend(spec, op)
        table._check_spec(op)
        live_version(table.spec)  # waits for all that has been started, and not only for what this handle needs
        return table._settled(op), table.snapshot(once=once)

    def stage() -> Any:
        arrays = dict(table._contents(whole, whole.slot_types))
        return spec.host.stage(
            spec.name, op, spec.host_options(), **spec.host_shards(), version=behind, contents=split(spec, arrays),
            originals=spec.originals, sink=_live.sinks.get(spec.name),
        )  # fmt: skip

    version, mine = together(group, spec.name, op, begin)
    behind = int(gather(group, np.uint32(version)).max())
    whole = mine if bring is None else bring(mine)
    _live.replace(spec, op, version, together(group, spec.name, op, stage))
    return live_version(spec)
