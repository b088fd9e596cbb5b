"""Copies through a following handle (`kvjax.Table.live`): each is of the newest version of its table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvjax._table.handle import Handle, live_version

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for which writes may come between a version and its copy."""


def of_newest(table: H, copy: Callable[[H, bool], T]) -> T:
    """What `copy` makes of a handle; through a following one, of the newest version of the table.

    If a write comes in between, the copy is made again.

    Args:
      table: the handle.
      copy: gets the handle of one version, and whether to raise what other calls on the table were refused for. On a
        device that comes late, and a read through a following handle leaves it to the code that writes.
    """
    if not table.follows or table.view is not None:
        return copy(table, True)
    end = time.monotonic() + _PATIENCE
    while True:
        version = live_version(table.spec)
        try:
            return copy(type(table)(version, table.spec), False)
        except (ValueError, RuntimeError):
            if int(live_version(table.spec)) == int(version) or time.monotonic() > end:
                raise
