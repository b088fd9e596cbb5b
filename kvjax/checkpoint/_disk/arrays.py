"""Arrays on disk: zarr v3 with plain chunks, each a file of rows as they lie in memory."""

from __future__ import annotations

import json
from concurrent.futures import wait
from typing import Any

import numpy as np

from kvjax._formats.paths import AnyPath
from kvjax._formats.source import row_bytes
from kvjax.checkpoint._disk.direct import aligned, give_back
from kvjax.checkpoint._disk.files import FileEntry, Files
from kvjax.checkpoint._disk.format import Damaged, chunk_path, chunk_rows
from kvjax.checkpoint._disk.pace import Spent
from kvjax.checkpoint._disk.threads import THREADS

ZARR = "zarr.json"


def zarr_json(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What other readers of zarr have to know of an array; kvjax does not read it."""
    said = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [chunk_rows(dtype, shape), *(max(n, 1) for n in shape[1:])]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": False if dtype.kind == "b" else [0, 0] if dtype.kind == "c" else 0,
    }
    return json.dumps(said).encode()


class ArrayWriter:
    """Writes an array into a folder that is there, as its rows come.

    Args:
      folder: of the array.
      dtype: of its elements.
      shape: of all of it.
      spent: by which it is written.
    """

    def __init__(self, folder: AnyPath, dtype: np.dtype[Any], shape: tuple[int, ...], spent: Spent) -> None:
        self._folder, self._shape, self._spent = folder, shape, spent
        self._row = row_bytes((dtype, shape[1:]))
        self._chunk = chunk_rows(dtype, shape) * self._row
        self._begun: np.ndarray | None = None  # a chunk of which the first `_filled` bytes are here
        self._filled = 0
        self._files = {ZARR: THREADS.submit(spent.write, folder / ZARR, zarr_json(dtype, shape))}

    def space(self) -> np.ndarray:
        """The bytes ``(n,)`` uint8 that the next rows go to: what is left of a chunk."""
        if self._begun is None:
            self._begun, self._filled = aligned(self._chunk), 0
        return self._begun[self._filled :]

    def fill(self, rows: int) -> None:
        """So many rows have come to the space; waits while many files are under way."""
        self._fill(rows * self._row)

    def add(self, rows: np.ndarray) -> None:
        """Adds rows, as `fill`."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        while len(data) > 0:
            space = self.space()
            n = min(len(space), len(data))
            space[:n] = data[:n]
            self._fill(n)
            data = data[n:]

    def end(self) -> dict[str, FileEntry]:
        """Fills up the last chunk; gives the entry of each file, once it is on the disk."""
        if self._begun is not None and self._filled > 0:
            self._begun[self._filled :] = 0
            self._submit(self._begun)
        return {path: file.result() for path, file in self._files.items()}

    def wait(self) -> None:
        """Until nothing is under way, whatever has become of it."""
        wait(self._files.values())

    def _fill(self, size: int) -> None:
        self._filled += size
        if self._begun is not None and size > 0 and self._filled == self._chunk:
            self._submit(self._begun)

    def _submit(self, chunk: np.ndarray) -> None:
        path = chunk_path(len(self._files) - 1, self._shape)
        THREADS.under_way.acquire()
        try:
            self._files[path] = file = THREADS.submit(self._spent.write, self._folder / path, chunk)
        except BaseException:
            THREADS.under_way.release()
            raise
        file.add_done_callback(lambda _: self._written(chunk))
        self._begun = None

    @staticmethod
    def _written(chunk: np.ndarray) -> None:
        give_back(chunk)
        THREADS.under_way.release()


class Reading:
    """Rows start..stop of an array, on their way into memory; `end` gives them.

    Nothing is allocated for chunks that are not there as they were listed.

    Args:
      files: of the table.
      folder: of the array.
      dtype: of its elements.
      shape: of all of it.
      start: first row.
      stop: row after them.
      kept: a chunk of the array by its number, of which an earlier reading has taken a part; then that of this one.

    Raises:
      Damaged: they are not.
    """

    def __init__(
        self, files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, stop: int,
        kept: dict[int, np.ndarray],
    ) -> None:  # fmt: skip
        self._folder, self._kept, n, size = folder, kept, chunk_rows(dtype, shape), row_bytes((dtype, shape[1:]))
        chunks: list[tuple[int, str]] = []
        for i in range(start // n, -(-stop // n)):  # of which a forged shape has more than a list can hold
            chunks.append((i, f"{folder}/{chunk_path(i, shape)}"))
            if i not in kept:
                files.check_size(chunks[-1][1], n * size)
        self._rows = np.empty((stop - start, *shape[1:]), dtype)
        to = self._rows.reshape(-1).view(np.uint8)
        self._parts = [
            THREADS.submit(_read_part, files, path, n * size, to, (i * n - start) * size, kept.get(i))
            for i, path in chunks
        ]
        self._last = chunks[-1][0] if stop % n and stop < shape[0] else None

    def end(self) -> np.ndarray:
        chunks = [part.result() for part in self._parts]
        self._kept.clear()  # who reads in order needs no other again
        if self._last is not None and chunks[-1] is not None:
            self._kept[self._last] = chunks[-1]
        if self._rows.dtype == bool and (self._rows.view(np.uint8) > 1).any():
            raise Damaged(f"want truth values in {self._folder}, got other bytes than 0 and 1")
        return self._rows


def check_sizes(files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Whether all chunks of an array are there, with as many bytes as it needs.

    Raises:
      Damaged: one is not.
    """
    n, size = chunk_rows(dtype, shape), row_bytes((dtype, shape[1:]))
    for i in range(-(-shape[0] // n) if size else 0):
        files.check_size(f"{folder}/{chunk_path(i, shape)}", n * size)


def _read_part(
    files: Files, path: str, size: int, to: np.ndarray, at: int, chunk: np.ndarray | None
) -> np.ndarray | None:
    """Reads a chunk of so many bytes whose first is for to[at], unless it is here; gives it if not all is for `to`."""
    if at >= 0 and at + size <= len(to):
        files.read_into(path, to[at : at + size])
        return None
    if chunk is None:
        chunk = np.empty(size, np.uint8)
        files.read_into(path, chunk)
    low, high = max(at, 0), min(at + size, len(to))
    to[low:high] = chunk[low - at : high - at]
    return chunk
