"""Rewriting checkpoints piece by piece: compact makes one of a delta and what it builds on, prune leaves rows out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax._formats.paths import AnyPath, anywhere
from kvjax._formats.source import offsets_of
from kvjax._values.prune import Prune, PruneLike, PruneReport, rule_for
from kvjax.checkpoint._chains.chain import Chain, chosen_tables, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows, cuts
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._chains.new import check_free, new_checkpoint
from kvjax.checkpoint._disk.format import FORMAT
from kvjax.checkpoint._disk.write_shard import write_shard
from kvjax.checkpoint._prune import judged


def compact(
    path: PathLike, out: PathLike, *, base: PathLike | Sequence[PathLike] | None = None, overwrite: bool = False
) -> None:
    """Makes one checkpoint from a delta and everything it builds on, as if everything had been saved at that time.

    It makes no tables, and needs no memory for all rows. Later deltas can build on the new checkpoint. The old ones are
    not changed, and you may delete them.

    Args:
      path: folder of the last delta, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is
        read).
      out: folder of the new checkpoint, where nothing is yet, and not inside another checkpoint.
      base: where to look for the checkpoints that it builds on, as in `restore`.
      overwrite: replace the checkpoint that is there, if it is another than that of `path`, and nothing builds on it.

    Raises:
      CheckpointError: a checkpoint is not there, or damaged, or `out` is taken, in a checkpoint, or one that others
        build on.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_compact", dim=1).upsert(np.array([7, 8]), [[1.0], [2.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/base", [table], cursor="serving")
      >>> table = table.remove(np.array([7]))
      >>> kvjax.checkpoint.save(folder.name + "/delta", [table], since="serving")
      >>> kvjax.checkpoint.compact(folder.name + "/delta", folder.name + "/whole")
      >>> kvjax.checkpoint.diff(folder.name + "/base", folder.name + "/whole").tables["doc_compact"].removed
      1
      >>> kvjax.drop_table("doc_compact")
      >>> folder.cleanup()
    """
    target = anywhere(out, "compact")
    unreplaced(
        path, base, "compact",
        lambda chain: _rewrite("compact", chain, target, overwrite, {}, stands_for=chain.catalog.digests),
    )  # fmt: skip


def prune(
    path: PathLike, out: PathLike | None, prune: PruneLike, *, tables: Collection[str] | None = None,
    base: PathLike | Sequence[PathLike] | None = None, overwrite: bool = False,
) -> dict[str, PruneReport]:  # fmt: skip
    """Copies a checkpoint without some of its rows, a few rows at a time. The checkpoint itself is not changed.

    Args:
      path: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is
        read).
      out: folder of the new checkpoint, where nothing is yet, and not inside another checkpoint; None for a dry run,
        which writes nothing.
      prune: `kvjax.Prune`, whose ``top_k`` counts the rows of a whole table; or a function from a `kvjax.Exported` of
        some rows of the table to ``(n,)`` bool, true for rows to keep.
      tables: names of the tables to prune, by default all; the others are copied.
      base: where to look for the checkpoints that a delta builds on, as in `restore`.
      overwrite: replace the checkpoint that is there, if it is another than that of `path`, and nothing builds on it.

    Returns:
      What is left out of each pruned table, by rule.

    Raises:
      CheckpointError: a checkpoint is not there, or damaged, or `out` is taken, in a checkpoint, or one that others
        build on, or there is no such table.
      TypeError, ValueError: `tables` is no list of names, or an empty one.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_prune", dim=1).upsert(np.arange(3), [[0.0], [1.0], [3.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> reports = kvjax.checkpoint.prune(folder.name + "/one", folder.name + "/two", kvjax.Prune(min_norm=2.0))
      >>> reports["doc_prune"].dropped.rows, reports["doc_prune"].norm_lost
      (2, 0.25)
      >>> kvjax.checkpoint.restore(folder.name + "/two")["doc_prune"].shape
      (1, 1)
      >>> kvjax.drop_table("doc_prune")
      >>> folder.cleanup()
    """
    target = None if out is None else anywhere(out, "prune")
    chosen = chosen_tables(tables, "prune")

    def body(chain: Chain) -> dict[str, PruneReport]:
        if target is not None:
            check_free(target.resolve(), overwrite, "prune", chain)
        keeps: dict[str, _Kept] = {}
        reports: dict[str, PruneReport] = {}
        for name in chain.names if chosen is None else sorted(chosen):
            rows = ChainRows(chain, name)
            rows.check_sizes()
            rule = rule_for(prune, name, rows.meta["key_dtype"], rows.shared_key)
            if rule.reads_rows:
                rows.warn_if_behind("prune")
            mask, report = judged(rows.source(), rule)
            waiting = 0 if rule.remove is None else int(rule.forgets(rows.counts()).sum())
            keeps[name], reports[name] = _Kept(mask, rule), dataclasses.replace(report, waiting=waiting)
        if target is not None:
            _rewrite("prune", chain, target, overwrite, keeps)
        return reports

    return unreplaced(path, base, "prune", body)


class _Kept(NamedTuple):
    """What is kept of a table: which of its rows ``(n,)`` bool, and the rule, which counts of keys without one."""

    rows: np.ndarray
    rule: Prune


def _rewrite(
    op: str, chain: Chain, out: AnyPath, overwrite: bool, keeps: Mapping[str, _Kept],
    stands_for: Sequence[str] = (),
) -> None:  # fmt: skip
    """Writes the tables of a checkpoint as another, and of some only what is kept."""
    with new_checkpoint(out.resolve(), overwrite, op, chain, stands_for) as folder:
        for name in chain.names:
            _rewrite_table(folder, ChainRows(chain, name), keeps.get(name), op)


def _rewrite_table(directory: AnyPath, rows: ChainRows, kept: _Kept | None, op: str) -> None:
    offsets, extras, keep = rows.offsets, rows.counts(), None
    if kept is not None:
        keep = kept.rows
        offsets, extras = offsets_of(keep)[offsets], kept.rule.counts_kept(extras)
    pinned = np.concatenate([part["pinned"] for part in _parts(rows, keep, ["pinned"])])
    if pinned.any():
        extras["pinned"] = pinned
    whole = {"offsets": offsets} | extras
    columns = [name for name in rows.types if name != "pinned"]
    write_table(directory, rows, {}, whole, columns, _parts(rows, keep, columns), op)


def write_table(
    directory: AnyPath, like: ChainRows, changed: Mapping[str, Any], whole: Mapping[str, np.ndarray],
    columns: Sequence[str], pieces: Iterator[Mapping[str, np.ndarray]], op: str,
) -> None:  # fmt: skip
    """Writes a table of other rows than one on the disk.

    Args:
      directory: of the new checkpoint.
      like: the table that it is otherwise like.
      changed: fields of what is said of it that are others.
      whole: "offsets", and what not each row has some of, whole.
      columns: names of the columns of rows.
      pieces: these columns of rows that follow each other.
      op: what it is written for, which errors name.
    """
    n = int(whole["offsets"][-1])
    extras = {name: [array.dtype.name, list(array.shape)] for name, array in whole.items() if name != "offsets"}
    meta: dict[str, Any] = {field: value for field, value in like.meta.items() if field != "shards"}
    meta |= {"format": FORMAT, "rows": n, "num_shards": 1, "extras": extras, **changed}
    arrays = {**whole, **like.pool()}
    kinds = {name: (like.types[name][0], (n, *like.types[name][1])) for name in columns}
    kinds |= {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_shard(directory, meta, 0, kinds, itertools.chain([arrays], pieces), op=op)


def _parts(rows: ChainRows, keep: np.ndarray | None, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
    for first, last in cuts([rows]):
        columns = rows.between(first, last, names)
        if keep is not None:
            mine = keep[int(rows.offsets[first]) : int(rows.offsets[last])]
            columns = {name: array[mine] for name, array in columns.items()}
        yield {name: columns[name] for name in names}
