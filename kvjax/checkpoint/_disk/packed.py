"""Arrays of the formats v1 and v2: zarr v3 with chunks packed by zstd, which TensorStore unpacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from kvjax._formats.source import row_bytes
from kvjax.checkpoint._disk.files import Files
from kvjax.checkpoint._disk.format import Damaged

_CHUNK_BYTES = 1 << 22
# Bytes that a byte of zstd can stand for: a block of 4 bytes is 128 KiB at most.
_DENSEST = 1 << 15


def _chunk_rows(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return max(1, min(shape[0], _CHUNK_BYTES // row_bytes((dtype, shape[1:]))))


def _spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """An array as TensorStore opens it: from memory, so that it opens no file and believes none about the array."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        # A chunk that is missing is damage, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [_chunk_rows(dtype, shape), *(max(n, 1) for n in shape[1:])]},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
                {"name": "crc32c"},
            ],
        },
    }


def check_sizes(files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Whether all chunks of an array are there, with as many bytes as can stand for it.

    Raises:
      Damaged: one is not.
    """
    chunk = _chunk_rows(dtype, shape) if 0 not in shape else 1
    size = chunk * row_bytes((dtype, shape[1:]))
    for i in range(-(-shape[0] // chunk) if size else 0):
        _read_chunk(files, folder, i, shape, size)


def _read_chunk(files: Files, folder: str, i: int, shape: tuple[int, ...], size: int) -> tuple[str, bytes]:
    """The path of a chunk of so many bytes below its folder, and the bytes that stand for it."""
    path = "/".join(["c", str(i), *("0" for _ in shape[1:])])
    data = files.read(f"{folder}/{path}", size + (size >> 7) + 1024)
    if size > len(data) * _DENSEST:  # nothing is allocated for bytes that are not there
        raise Damaged(f"want {folder}/{path} with {size} bytes, got {len(data)}, which cannot hold them")
    return path, data


class PackedReading:
    """As `Reading`, of chunks that are packed."""

    def __init__(
        self, files: Files, folder: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, stop: int,
        kept: object = None,
    ) -> None:  # fmt: skip
        self._folder, chunk = folder, _chunk_rows(dtype, shape)
        size = chunk * row_bytes((dtype, shape[1:]))
        store: Any = ts.open(_spec(dtype, shape), create=True, context=ts.Context()).result()
        for i in range(start // chunk, -(-stop // chunk)):
            store.kvstore.write(*_read_chunk(files, folder, i, shape, size)).result()
        self._pending = store[start:stop].read()

    def end(self) -> np.ndarray:
        try:
            return self._pending.result()
        except ValueError as error:  # TensorStore's, for bytes that are no chunk
            raise Damaged(f"want whole chunks of {self._folder}, got {error!s:.300}") from error
