"""Steps: whether a state and its tables are of the same time, as their steps say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from kvjax._keys.steps import MOST_COUNTED
from kvjax._table.table import Table
from kvjax._training.partitions import partitions
from kvjax._values.errors import warn


def warn_of_another_step(state: Any, tables: Mapping[str, Table]) -> None:
    """Warns where an optimizer's state has counted other steps than tables that it trains.

    A state that counts 0 is a new one, and has trained none. Nothing is known of tables that are not part of a
    `kvjax.optax.partition`.
    """
    for part in partitions(state):
        if isinstance(part.count, Tracer) or np.size(part.count) != 1:
            continue
        count = int(np.asarray(part.count).item())
        if count >= MOST_COUNTED:  # where it stops, with steps of a clock that are greater
            continue
        others = {name: _last_step(tables[name]) for name in part.tables if name in tables} if count else {}
        others = {name: last for name, last in others.items() if last not in (None, count)}
        if not others:
            continue
        name = min(others)
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        warn(
            f"kvjax: table {name!r}{more}, combine: want a state and tables of one step, got optimizer state after "
            f"step {count} and rows after step {others[name]}; give what TableRestore has restored beside the state, "
            "or what split gave with it. If the optimizer's state was begun anew while the rows were kept, this is as "
            "it should be"
        )


def _last_step(table: Table) -> int | None:
    """None for one of which it is not known yet."""
    if table.follows or table.tape is not None or isinstance(table.version, Tracer):
        return None
    return table.stats().last_step
