"""The start of a save by Orbax: what is copied of the tables, or an error after which nothing waits forever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from kvjax._formats.paths import anywhere
from kvjax._table.table import Table
from kvjax._values.prune import PruneLike
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._tables.save import freeze_all
from kvjax.checkpoint._tables.write import Stored

PATIENCE = 10
"""Seconds that an error waits for Orbax to make its folders."""


async def begin(
    folders: Callable[[], Awaitable[Any]], tables: Mapping[str, Table] | Iterable[Table], directory: PathLike,
    prune: PruneLike | None, cursor: str | None, since: str | None,
) -> list[Stored]:  # fmt: skip
    """What `freeze_all` gives of tables. An error comes once Orbax has made its folders.

    Threads of Orbax make these while a save begins, and others wait for them. A process that ends with the error before
    they are made would not end: no thread can begin anything then.

    Args:
      folders: waits for them.
      tables: as `freeze_all` takes them, with all that follows.
      directory: as Orbax gives it, which may be one of another store.
    """
    try:
        return freeze_all(tables, anywhere(directory, "save"), prune, cursor, since)
    except BaseException:
        with contextlib.suppress(Exception):  # the error that is on its way says more
            await asyncio.wait_for(folders(), PATIENCE)
        raise
