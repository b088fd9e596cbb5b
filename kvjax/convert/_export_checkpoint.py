"""Checkpoints as sources: a table on disk as files of other programs, without a table in memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

from kvjax._formats import deeprec
from kvjax._formats.choices import EXPORTED, Quantised
from kvjax._formats.errors import FileError
from kvjax._formats.files import FORMATS
from kvjax._formats.paths import anywhere
from kvjax._formats.quantise import QuantisationReport
from kvjax._formats.quantised_source import quantised
from kvjax._formats.source import Source
from kvjax._values.arguments import check_progress
from kvjax._values.exported import SLOT
from kvjax._values.prune import Prune, PruneLike, rule_for
from kvjax.checkpoint._chains.chain import Chain, only_table, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._chains.new import check_outside
from kvjax.checkpoint._prune import kept


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What an export of a checkpoint has written.

    Attributes:
      table: name of the table.
      rows: number of rows in the file.
      total: number of rows in the checkpoint.
      format: of the file.
      error: the report of the quantisation error, if rows were quantised.
      left: what the format cannot hold, one line each.

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_export_report", dim=2).upsert([7, 8], [[1.0, 2.0], [0.0, 0.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/one", [table])
      ...     report = kvjax.convert.export_checkpoint(folder + "/one", folder + "/out.npz")
      >>> report.rows
      2
      >>> kvjax.drop_table("doc_export_report")
    """

    table: str
    rows: int
    total: int
    format: str
    error: QuantisationReport | None
    left: tuple[str, ...] = ()


def export_checkpoint(
    checkpoint: PathLike, path: PathLike, *, table: str | None = None, format: str | None = None,
    quantise: Quantised | None = None, slots: bool = False, prune: PruneLike | None = None,
    base: PathLike | Sequence[PathLike] | None = None, partitions: int = 1,
    progress: Callable[[int], object] | None = None,
) -> ExportReport:  # fmt: skip
    """Writes a table of a checkpoint as a file for other programs, without making a table.

    Rows are read in pieces of about 16 MiB, and checked as in a restore. Pruning takes about 24
    bytes for each row of the checkpoint, and 2 for each test; with ``top_k`` or ``keep`` 24 more. DeepRec's layout
    orders rows differently: it takes 16 bytes of memory for each row, with slots 32, and while the files are written,
    as much disk space again as they have.

    Args:
      checkpoint: a folder that `kvjax.checkpoint.save` wrote, a step of an Orbax ``CheckpointManager``, or the
        manager's folder (its last step is read).
      path: of the file, which is replaced if it exists, and not inside a checkpoint; for "deeprec" the prefix of the
        files.
      table: name of the table; by default the only one.
      format: "safetensors", "npz", "parquet" or "deeprec"; by default the extension of the path.
      quantise: "float16", "bfloat16" or "int8"; not for DeepRec.
      slots: whether to also write the optimizer's slots.
      prune: which rows to leave out, as in `kvjax.checkpoint.prune`.
      base: where to look for the checkpoints that a delta builds on, as in `kvjax.checkpoint.restore`.
      partitions: number of partitions of DeepRec's variable, see `kvjax.Exported.to_deeprec`.
      progress: function that is called with the number of bytes of each piece that has been read.

    Returns:
      What was written.

    Raises:
      ValueError: there is no such checkpoint or table, or it is damaged, or the format cannot hold it, or the path is
        inside a checkpoint.
      TypeError: `progress` is not a function of a number.
      ImportError: a library of the format is not installed.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> table = kvjax.get_table("doc_out", dim=2).upsert(np.array([7, 8]), [[1.0, 2.0], [0.0, 0.0]])
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> prune = kvjax.Prune(zero_rows=True)
      >>> kvjax.convert.export_checkpoint(folder.name + "/one", folder.name + "/out.npz", prune=prune).rows
      1
      >>> kvjax.drop_table("doc_out")
      >>> folder.cleanup()
    """
    path = anywhere(path, "export_checkpoint")
    check_progress(progress, "export")
    check_outside(path.resolve(), "export")
    kind = format or path.suffix.removeprefix(".")
    if kind not in EXPORTED:
        mend = "say format=, or end the path with it"
        raise FileError(path, f"a format of {[*EXPORTED]}", f"{kind!r}", mend)
    if partitions != 1 and kind != "deeprec":
        raise FileError(path, f"no partitions= for {kind}", f"{partitions}", "leave it out, or say format='deeprec'")

    def body(chain: Chain) -> ExportReport:
        rows = ChainRows(chain, only_table(chain, table))
        rows.check_sizes()
        rows.warn_if_behind("export")
        rule = None if prune is None else rule_for(prune, rows.name, rows.meta["key_dtype"], rows.shared_key)
        return _export(rows.name, rows.source(progress), path, kind, quantise, slots, rule, partitions)

    return unreplaced(checkpoint, base, "export", body)


def _export(
    name: str, source: Source, path: PathLike, kind: str, quantise: Quantised | None, slots: bool,
    rule: Prune | None, partitions: int,
) -> ExportReport:  # fmt: skip
    whole = source.num_rows
    keep = None if rule is None else kept(source, rule)
    if not slots:
        source = source.only([column for column in source.types if not column.startswith(SLOT)])
    if keep is not None:
        source = source.where(keep)
    quantiser, left = None, ()
    if kind == "deeprec":
        if quantise is not None:
            raise FileError(path, "no quantise= for DeepRec, which has none", f"{quantise!r}", "leave it out")
        own = {column.removeprefix(SLOT): column for column in source.types if column.startswith(SLOT)}
        left = deeprec.write(path, name, source, own, partitions)
    else:
        if quantise is not None:
            source, quantiser = quantised(source, quantise, os.fspath(path))
        FORMATS[kind].write(path, source)
    return ExportReport(name, source.num_rows, whole, kind, quantiser and quantiser.report(), left)
