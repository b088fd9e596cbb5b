"""Following: writes a frozen table as it is at a checkpoint, from an older one and the deltas since then."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._values.errors import level_of_user
from kvjax.serving._contents import initial_row, of_chain, unseen
from kvjax.serving._format import share
from kvjax.serving._frozen import FrozenTable
from kvjax.serving._release import Release
from kvjax.serving._write import stays, write_whole

if TYPE_CHECKING:
    from kvjax.checkpoint import Chain, ChainRows


def write_at(
    path: Path, chain: Chain, name: str, before: FrozenTable | None, since: Collection[str], quantise: Any, missing: Any
) -> None:
    """Writes a table of a checkpoint.

    Args:
      path: of the new file.
      chain: of the checkpoint.
      name: of the table.
      before: the table as it was at another checkpoint; None if there is none.
      since: digests of that checkpoint.
      quantise: as `FrozenTable.write` does; by default as `before` is.
      missing: as there; by default as `before` is, except for a row that unadmitted keys share.
    """
    from kvjax.checkpoint import ChainRows

    if before is not None and since and stays(before, quantise, missing):
        if set(since) & set(chain.catalog.digests):
            share(before.path, path)
            return
        rows = ChainRows(chain, name, since)
        if rows.since is not None:
            source, removed, step = rows.source(), rows.removed(), rows.meta["last_step"]
            keys, values = source.read(["keys", "values"], 0, source.num_rows).values()
            if not len(keys) and not len(removed) and step == before.step:
                share(before.path, path)
                return
            shared = _shared(rows, keys, values, removed) if missing is None else None
            before.update(keys, values, removed=removed, path=path, step=step, missing=shared)
            return
    if quantise is None and before is not None and before.error is not None:
        quantise = before.dtype
    contents = of_chain(chain, name)
    if missing is None and before is not None and not isinstance(contents.missing, np.ndarray):
        missing = "init" if before.missing is None else before.missing
    write_whole(path, contents, quantise, missing)


def warn_of_older(chain: Chain, names: Collection[str], before: Release, files: Collection[str]) -> None:
    """Warns if tables go back to an older step, and files do not.

    Args:
      chain: of the checkpoint that is followed.
      names: of its tables that are taken.
      before: the current release.
      files: names of its files that stay.
    """
    steps = {name: (before[name].step, chain.catalog.open(name)[0]["last_step"]) for name in names if name in before}
    older = [f"{name!r} from step {was} to {is_now}" for name, (was, is_now) in steps.items() if is_now < was]
    if older and files:
        warnings.warn(
            f"kvjax: releases {str(before.path.parent)!r}, follow: want files of the step of the tables, got tables "
            f"that go back ({', '.join(older)}) beside the files {sorted(files)} of release {before.number}; give the "
            "files of that step as files=, or go back to a release as a whole, with Releases.rollback",
            stacklevel=level_of_user(),
        )


def _shared(rows: ChainRows, keys: np.ndarray, values: np.ndarray, removed: np.ndarray) -> Any:
    """The row ``(dim,)`` that unadmitted keys share, if it is another; else None."""
    key, initial, pool = unseen(rows)
    if isinstance(key, str):
        return None
    if len(at := np.flatnonzero(keys.view(np.uint64) == np.uint64(key))):
        return values[at[0]]
    gone = (removed.view(np.uint64) == np.uint64(key)).any()
    return initial_row(initial, pool, key, rows.meta["dim"]) if gone else None
