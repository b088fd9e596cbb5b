"""Saving without Orbax: tables into a folder that is there as a whole or not at all."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import jax

from kvjax._sharded.processes import together
from kvjax._table.table import Table, check_table
from kvjax._values.prune import PruneLike
from kvjax.checkpoint._catalog import seal
from kvjax.checkpoint._files import flush
from kvjax.checkpoint._format import CheckpointError
from kvjax.checkpoint._locate import PathLike
from kvjax.checkpoint._write import check_saved, everyone, snapshot, write


def save(
    path: PathLike, tables: Mapping[str, Table] | Iterable[Table], *, prune: PruneLike | None = None,
    overwrite: bool = False,
) -> None:  # fmt: skip
    """Saves tables into a folder, which is there as a whole, or not at all.

    In several processes all save together, into a folder that they share, as `kvjax.orbax.TableSave` does.

    Args:
      path: of the folder, which is not there yet.
      tables: live handles by the names they get in the checkpoint; or just handles.
      prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep; by default all.
      overwrite: replace the checkpoint that is there.

    Raises:
      CheckpointError: there is something at the path.
      TypeError: something else than tables is given.
      OSError: the disk is full, or the folder cannot be written. Nothing is left at the path then.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_saved", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> kvjax.drop_table("doc_saved")
      >>> table = kvjax.checkpoint.restore(folder.name + "/one")["doc_saved"]
      >>> table.lookup(7).tolist()
      [1.0, 2.0]
      >>> kvjax.drop_table("doc_saved")
      >>> folder.cleanup()
    """
    target, given = Path(path).absolute(), named(tables)
    scratch = target.with_name(f".{target.name}.kvjax-new")
    place = everyone()

    def begin() -> None:
        if jax.process_index() == 0:
            check_free(target, overwrite)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)

    async def put() -> None:
        await asyncio.gather(*(write(scratch, s) for s in stored))

    def finish() -> None:
        if jax.process_index() == 0:
            seal(scratch)
            install(scratch, target)

    together(place, "", "save", begin)
    try:
        check_saved(given)
        stored = [snapshot(name, table, prune) for name, table in given.items()]
        together(place, "", "save", lambda: asyncio.run(put()))
        together(place, "", "save", finish)
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def named(tables: Mapping[str, Table] | Iterable[Table]) -> dict[str, Table]:
    """Tables by the names under which they are saved."""
    if not isinstance(tables, Mapping):
        tables = list(tables)
        for table in tables:
            check_table(table, "save")
        return {table.name: table for table in tables}
    given = dict(cast("Mapping[str, Table]", tables))
    for table in given.values():
        check_table(table, "save")
    return given


def check_free(target: Path, overwrite: bool) -> None:
    """Whether a checkpoint may be put there.

    Raises:
      CheckpointError: something is there.
    """
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"kvjax: save: want a path with nothing there, got {target}, which exists; give another, or overwrite=True"
        )


def install(scratch: Path, target: Path) -> None:
    """Puts a folder that is whole, and on the disk, where it belongs."""
    old = target.with_name(f".{target.name}.kvjax-old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    scratch.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)
