"""Following: writes a release of a checkpoint, from an older one and the deltas since then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._values.behind import can_be_behind, warn_of_left
from kvjax._values.errors import warn
from kvjax._values.exported import ROW_COLUMNS, Exported
from kvjax._values.integers import as_int64
from kvjax._values.prune import PruneLike, rule_for
from kvjax._values.snapshot import take
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._prune import in_words
from kvjax.serving._contents import initial_row, of_chain, unseen
from kvjax.serving._folder import file_of, write_files
from kvjax.serving._format import share
from kvjax.serving._frozen import FrozenTable
from kvjax.serving._info import write_info
from kvjax.serving._pruned import followed
from kvjax.serving._release import Release
from kvjax.serving._write import stays, write_whole


class ReleaseOptions:
    """How a release has the rows of a checkpoint.

    Args:
      quantise: as `FrozenTable.write` does; by default as a table from before is.
      prune: as there.
      missing: as there; by default as a table from before is, except for a row that unadmitted keys share.

    Raises:
      ValueError: changed rows do not say all that `prune` leaves out.
    """

    def __init__(self, quantise: Any, prune: PruneLike | None, missing: Any) -> None:
        self.quantise, self.missing = quantise, missing
        self.prune = None if prune is None else followed(prune)
        self.pruned_by = None if self.prune is None else in_words(self.prune)

    def is_of(self, before: Release) -> bool:
        """Whether a release has its rows like that."""
        return before.info.prune == self.pruned_by and all(map(self.stays, before.values()))

    def stays(self, before: FrozenTable) -> bool:
        """Whether rows of a table that do not change are stored, and those that are not there read, like that."""
        return stays(before, self.quantise, self.missing)


def write_release(
    folder: Path,
    chain: Chain,
    names: Collection[str],
    before: Release | None,
    files: Mapping[str, bytes],
    options: ReleaseOptions,
) -> None:
    """Fills the folder of a release.

    Args:
      folder: of the new release.
      chain: of the checkpoint.
      names: of its tables that are taken.
      before: the current release, if there is one; its files stay.
      files: those that change, by name.
      options: how the rows of the checkpoint are taken.
    """
    old: Mapping[str, FrozenTable] = {} if before is None else before
    since = () if before is None or before.info.prune != options.pruned_by else before.checkpoint
    if before is not None:
        _warn_of_older(chain, names, before, before.files.keys() - files.keys())
    for name in names:
        _write_table(file_of(folder, name, op="follow"), chain, name, old.get(name), since, options)
    write_files(folder, ({} if before is None else before.files) | dict(files))
    write_info(folder, chain.catalog.digests, str(chain.catalog.directory.resolve()), prune=options.pruned_by)


def _write_table(
    path: Path, chain: Chain, name: str, before: FrozenTable | None, since: Collection[str], options: ReleaseOptions
) -> None:
    """Writes a table of a checkpoint.

    Args:
      path: of the new file.
      chain: of the checkpoint.
      name: of the table.
      before: the table as it was at another checkpoint; None if there is none.
      since: digests of that checkpoint, if its rows were pruned in the same way.
      options: how rows are taken.
    """
    if before is not None and since and options.stays(before):
        if set(since) & set(chain.catalog.digests):
            share(before.path, path)
            return
        rows = ChainRows(chain, name, since)
        if rows.since is not None:
            _write_changes(path, rows, before, options)
            return
    quantise, missing = options.quantise, options.missing
    if quantise is None and before is not None and before.error is not None:
        quantise = before.dtype
    contents = of_chain(chain, name, options.prune)
    if missing is None and before is not None and not isinstance(contents.missing, np.ndarray):
        missing = "init" if before.missing is None else before.missing
    write_whole(path, contents, quantise, missing)


def _write_changes(path: Path, rows: ChainRows, before: FrozenTable, options: ReleaseOptions) -> None:
    """Writes a table with what has changed since it was as before."""
    source, removed, step = rows.source(), rows.removed(), rows.meta["last_step"]
    names = ["keys", "values"] if options.prune is None else list(ROW_COLUMNS)
    columns = source.read(names, 0, source.num_rows)
    if step != before.step and can_be_behind(dict(rows.meta["slots"])):
        if sum(int(before.contains(keys).sum()) for keys in (columns["keys"], removed)) < len(before):
            warn_of_left(rows.name, "follow")
        else:
            rows.warn_if_behind("follow")
    shared = _shared(rows, columns["keys"], columns["values"], removed) if options.missing is None else None
    if options.prune is not None:
        rule = rule_for(options.prune, rows.name, rows.meta["key_dtype"], rows.shared_key)
        keep = rule.mask(Exported.of_columns(columns, step))
        removed = np.concatenate([removed, as_int64(columns["keys"][~keep])])
        columns = take(columns, keep)
    if not len(columns["keys"]) and not len(removed) and step == before.step:
        share(before.path, path)
        return
    before.update(columns["keys"], columns["values"], removed=removed, path=path, step=step, missing=shared)


def _warn_of_older(chain: Chain, names: Collection[str], before: Release, files: Collection[str]) -> None:
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
        warn(
            f"kvjax: releases {str(before.path.parent)!r}, follow: want files of the step of the tables, got tables "
            f"that go back ({', '.join(older)}) beside the files {sorted(files)} of release {before.number}; give the "
            "files of that step as files=, or go back to a release as a whole, with Releases.rollback"
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
