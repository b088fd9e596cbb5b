"""Spreading: rows in any order are put on disk by ranges of bins (of hashes, say), a piece at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np

from kvjax._formats import source
from kvjax._formats.source import Source, Type, offsets_of, raw, row_bytes

_MOST = 4096
"""Ranges, so that what goes to each at a time is not too little for a disk."""


BinsOf: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""From keys ``(n,)``, as a source has them, to the bin of each ``(n,)``."""


def spread(
    sources: Mapping[str, Source], folder: Path | None, bins_of: BinsOf, num_bins: int
) -> Iterator[dict[str, Mapping[str, np.ndarray]]]:
    """The rows of several sources by ranges of bins: of each source the rows of a range, in its order.

    A few times `source.PIECE_BYTES` are in memory, or a 4096th of the rows, if that is more. Keys are read once more
    before. What does not fit is in files meanwhile, which have no names.

    Args:
      sources: each with a column "keys".
      folder: where to put the files; by default among the system's temporary ones.
      bins_of: tells the bins of keys.
      num_bins: how many there are.
    """
    counts = {name: _counts(each, bins_of, num_bins) for name, each in sources.items()}
    widths = {name: each.row_bytes for name, each in sources.items()}
    total = np.cumsum(sum(counts[name] * widths[name] for name in sources))
    size = max(2 * source.PIECE_BYTES, int(total[-1]) // _MOST)
    last = np.searchsorted(total, np.arange(1, total[-1] // size + 1) * size, "right")
    bounds = np.unique([0, *last, num_bins])
    if len(bounds) == 2:
        yield {name: each.read(list(each.types), 0, each.num_rows) for name, each in sources.items()}
        return
    with ExitStack() as files:
        on_disk = {name: _put(each, bins_of, counts[name], bounds, folder, files) for name, each in sources.items()}
        starts = {name: offsets_of(counts[name])[bounds].tolist() for name in sources}
        for i in range(len(bounds) - 1):
            yield {
                name: {column: rows[starts[name][i] : starts[name][i + 1]] for column, rows in columns.items()}
                for name, columns in on_disk.items()
            }


def _pieces(rows: Source) -> Iterator[tuple[int, int]]:
    return source.ranges(rows.num_rows, max(map(row_bytes, rows.types.values())))


def _counts(rows: Source, bins_of: BinsOf, num_bins: int) -> np.ndarray:
    """The number of rows in each bin."""
    counts = np.zeros(num_bins, np.int64)
    for start, stop in _pieces(rows):
        counts += np.bincount(bins_of(rows.read(["keys"], start, stop)["keys"]), minlength=num_bins)
    return counts


def _put(
    rows: Source, bins_of: BinsOf, counts: np.ndarray, bounds: np.ndarray, folder: Path | None, files: ExitStack
) -> dict[str, _OnDisk]:
    """Writes each column into a file, in which the rows between two bounds follow each other."""
    opened: dict[str, _OnDisk] = {}
    for name, kind in rows.types.items():
        opened[name] = _OnDisk(files.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)), kind)  # noqa: SIM115
    place = offsets_of(counts)[bounds[:-1]].tolist()  # of the next row of each range
    for start, stop in _pieces(rows):
        columns = rows.read(list(rows.types), start, stop)
        ranges = np.searchsorted(bounds, bins_of(columns["keys"]), "right") - 1
        order = np.argsort(ranges, kind="stable")
        cuts = np.searchsorted(ranges[order], np.arange(len(bounds)))
        for name, array in columns.items():
            grouped, size = array[order], row_bytes(rows.types[name])
            for i in np.flatnonzero(np.diff(cuts)).tolist():
                opened[name].put(raw(grouped[cuts[i] : cuts[i + 1]]), place[i] * size)
        for i, n in enumerate(np.diff(cuts).tolist()):
            place[i] += n
    return opened


class _OnDisk:
    """A column in an open file."""

    def __init__(self, file: IO[bytes], kind: Type) -> None:
        self._fd, (self._dtype, self._shape) = file.fileno(), kind

    def put(self, data: memoryview, at: int) -> None:
        while len(data) > 0:  # the system may take less than all
            n = os.pwrite(self._fd, data, at)
            data, at = data[n:], at + n

    def __getitem__(self, rows: slice) -> np.ndarray:
        out = np.empty((rows.stop - rows.start, *self._shape), self._dtype)
        rest, at = out.reshape(-1).view(np.uint8).data, rows.start * row_bytes((self._dtype, self._shape))
        while len(rest) > 0:
            n = os.preadv(self._fd, [rest], at)
            rest, at = rest[n:], at + n
        return out
