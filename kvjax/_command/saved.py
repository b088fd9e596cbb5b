"""Saved tables: those of a checkpoint, and columns of their rows, for commands that show them."""

from __future__ import annotations

import numpy as np

from kvjax._formats.source import Source, concat, row_bytes
from kvjax._values.exported import ROW_COLUMNS
from kvjax._values.prune import norms_of
from kvjax._values.snapshot import take
from kvjax.checkpoint._chains.chain import Chain, only_table
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._disk.files import files_below

_BLOCK_BYTES = 1 << 22


class SavedTable:
    """A table of a checkpoint.

    Args:
      chain: of the checkpoint.
      name: of the table; None for the only one.

    Attributes:
      name: of the table.
      meta: what kvjax.json says.
      last_step: of the table.

    Raises:
      CheckpointError: it is damaged.
      FileError: there is no such table, or there are several.
    """

    def __init__(self, chain: Chain, name: str | None) -> None:
        self._chain, self.name = chain, only_table(chain, name)
        self.meta, _ = chain.catalog.open(self.name)
        self.last_step: int = self.meta["last_step"]

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(files_below(self._chain.catalog.folder(self.name)).values())

    @property
    def all_rows(self) -> int:
        """How many there are, of a delta with those of what it builds on."""
        return self.open().num_rows if "delta" in self.meta else self.meta["rows"]

    def open(self) -> SavedRows:
        """Its rows, and of a delta those of what it builds on. It takes some MiB of memory, so not for all tables at a
        time."""
        return SavedRows(ChainRows(self._chain, self.name).source())


class SavedRows:
    """The rows of a table on disk, sorted by (bucket, key)."""

    def __init__(self, source: Source) -> None:
        self._source, self.num_rows = source, source.num_rows

    def column(self, name: str) -> np.ndarray:
        """A column of all rows."""
        parts = list(self._source.pieces(name))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def norms(self) -> np.ndarray:
        """The Euclidean norm of each row, ``(rows,)`` float64."""
        parts = [norms_of(piece) for piece in self._source.pieces("values")]
        return np.concatenate(parts) if parts else np.zeros(0)

    def at(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """All columns but the slots of some rows, by their places ``(n,)``. Only blocks that have one of them are
        read."""
        order, block = np.argsort(rows, kind="stable"), max(1, _BLOCK_BYTES // row_bytes(self._source.types["values"]))
        places = rows[order]
        parts = [self._source.read(ROW_COLUMNS, 0, 0)]
        for near in np.split(places, np.flatnonzero(np.diff(places // block)) + 1):
            if len(near):
                first = int(near[0])
                parts.append(take(self._source.read(ROW_COLUMNS, first, int(near[-1]) + 1), near - first))
        return take(concat(parts), np.argsort(order))


def tables_of(chain: Chain, only: str | None = None) -> list[SavedTable]:
    """The tables of a checkpoint, or one of them."""
    return [SavedTable(chain, name) for name in (chain.names if only is None else [only])]
