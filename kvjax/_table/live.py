"""The live version of a table, and copies of the newest through a following handle (`kvjax.Table.live`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from kvjax._process import check_process
from kvjax._spec.spec import TableSpec
from kvjax._table import at_exit
from kvjax._table.handle import Handle
from kvjax._values.errors import fail

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for which shards have to stay at different versions before a write has stopped half-way, and for which writes
may come between a version and its copy."""


def live_version(spec: TableSpec) -> jax.Array:
    """The live version of the table that `spec` names, once the writes that have been started are done.

    Raises:
      RuntimeError: a write has stopped half-way, so that the table is at no version.
    """
    check_process(spec.name, "get_table")
    at_exit.wait_for_programs()
    versions, since = versions_of(spec), time.monotonic()
    while len(set(versions)) > 1:  # of a write that another thread has started, they move on
        before, versions = versions, versions_of(spec)
        if versions != before:
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            raise fail(
                RuntimeError, spec.name, "refresh", "shards of one version", f"versions {sorted(set(versions))}",
                "a write has stopped half-way: kvjax.drop_table(name) and restore the last checkpoint",
            )  # fmt: skip
        time.sleep(1e-4)
    return version_leaf(spec, versions[0])


def versions_of(spec: TableSpec) -> list[int]:
    """Of the shards of this process, while programs may write them."""
    return [spec.host.version(spec.name, shard) for shard in spec.shards]


def version_leaf(spec: TableSpec, version: int) -> jax.Array:
    """A version as the leaf of a handle: on all devices of the table.

    NumPy's where that will do: it starts no backend, so tables may be made before ``jax.distributed.initialize``.
    """
    if spec.placement is None or jax.process_count() == 1:
        leaf: Any = np.asarray(version, np.uint32)
        return leaf
    return jax.make_array_from_callback((), spec.placement.everywhere, lambda _: np.uint32(version))


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
