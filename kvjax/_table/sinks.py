"""Sinks: functions of the user's that get the rows which a table evicts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._table.checks import version_on_host
from kvjax._table.handle import Handle
from kvjax._values.arguments import why_not_taken
from kvjax._values.errors import fail

Sink: TypeAlias = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray, np.ndarray, str], object]
"""What `Table.on_evict` takes."""

_TAKES = ("keys", "values", "slots", "freqs", "versions", "reason")


def set_sink(table: Handle, sink: Sink | None) -> None:
    """Has the shards of this process call a sink with the rows that they evict; None for no sink any more.

    Raises:
      TypeError: it is no such function.
    """
    if sink is not None and not callable(sink):
        raise fail(TypeError, table.name, "on_evict", "a function or None", repr(sink), "see Table.on_evict")
    if sink is not None and (why := why_not_taken(sink, _TAKES)):
        want = f"a function of ({', '.join(_TAKES)})"
        raise fail(TypeError, table.name, "on_evict", want, f"one of {why}", "see Table.on_evict")
    spec = table.spec
    spec.host.size(table.name, 0, version_on_host(table, "on_evict"), "on_evict")  # a stale handle says so
    given = None if sink is None else functools.partial(_call, spec, sink)
    for shard in spec.originals:
        spec.host.set_sink(table.name, shard, given)
    PROCESS.set_sink(table.name, given)


def _call(spec: TableSpec, sink: Sink, raw: dict[str, Any], reason: str) -> None:
    rows = spec.exported(raw)
    with PROCESS.calling_out():
        sink(rows.keys, rows.values, rows.slots, rows.freqs, rows.versions, reason)
