"""safetensors: a header of JSON, and then the bytes of each column.

Written here, because the library of that name takes only tensors that are in memory; read by it. The format has no
checksums, so kvjax's files have a CRC-32 of each column, and of what is said of all, in their metadata.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax._formats.atomic import written
from kvjax._formats.errors import FileError, needed
from kvjax._formats.source import Column, Source, digest_of, ranges, raw, row_bytes

WHAT = "a safetensors file"
_DTYPES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_CRC = "crc32"


def write(path: str | os.PathLike[str], source: Source) -> None:
    """Writes a column as a tensor each, and `Source.meta` as the metadata."""
    tensors: dict[str, object] = {}
    end = 0
    for name, (dtype, _) in source.types.items():
        if dtype.name not in _DTYPES:
            raise FileError(path, f"columns of {sorted(_DTYPES)}", f"{name!r} of {dtype.name}", "leave it out")
        start, end = end, end + source.num_rows * row_bytes(source.types[name])
        tensors[name] = {"dtype": _DTYPES[dtype.name], "shape": source.shape(name), "data_offsets": [start, end]}
    digests = {name: digest_of(name, kind, source.num_rows) for name, kind in source.types.items()}

    def header() -> bytes:
        said = {**source.meta, _CRC: _digest_of_all(digests, source.meta)}
        text = json.dumps({"__metadata__": said, **tensors}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with written(path) as file:
        file.write(header())
        for name in source.types:
            for piece in source.pieces(name):
                data = raw(piece)
                digests[name] = zlib.crc32(data, digests[name])
                file.write(data)
        file.seek(0)
        file.write(header())  # of the same length


def columns(path: str | os.PathLike[str]) -> tuple[dict[str, Column], dict[str, str]]:
    """The tensors of a file by name, which are read when they are asked for, and its metadata.

    What `write` has written is read once before, to compare it with its checksums.

    Raises:
      FileError: it is no such file, or not what `write` has written; so does reading from it.
      ImportError: safetensors is not installed.
    """
    library = needed("safetensors", "reading safetensors", "convert")
    try:
        file = library.safe_open(os.fspath(path), framework="numpy")
        arrays: dict[str, Column] = {name: _Tensor(path, file, name) for name in file.keys()}  # noqa: SIM118
        meta = dict(file.metadata() or {})
    except AttributeError as error:  # of NumPy, for its dtypes
        want = "a file of safetensors with dtypes that NumPy has"
        raise FileError(path, want, f"{error}", "write these as float32 or bfloat16") from error
    except (library.SafetensorError, OSError, TypeError, KeyError) as error:
        raise _none(path, error) from error
    said = meta.pop(_CRC, None)
    digests = {name: _digest(name, array) for name, array in arrays.items()}
    if said is not None and said != _digest_of_all(digests, meta):
        raise FileError(path, "the columns that were written", "others, by their CRC-32")
    return arrays, meta


def _none(path: str | os.PathLike[str], error: Exception) -> FileError:
    return FileError(path, "a file of safetensors with dtypes that NumPy has", f"{error}")


class _Tensor:
    def __init__(self, path: str | os.PathLike[str], file: Any, name: str) -> None:
        self._path, self._slice = path, file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        self.dtype = (self._slice[:1] if self.shape and self.shape[0] else file.get_tensor(name)).dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            return np.zeros((0, *self.shape[1:]), self.dtype)
        try:
            return self._slice[start:stop]
        except Exception as error:  # the library's
            raise _none(self._path, error) from error


def _digest(name: str, array: Column) -> int:
    size = row_bytes((array.dtype, array.shape[1:]))
    crc = digest_of(name, (array.dtype, array.shape[1:]), array.shape[0])
    for start, stop in ranges(array.shape[0], size):
        crc = zlib.crc32(raw(array[start:stop]), crc)
    return crc


def _digest_of_all(digests: Mapping[str, int], meta: Mapping[str, str]) -> str:
    """The digests as text; its length does not depend on them."""
    of_meta = zlib.crc32(json.dumps(dict(meta), sort_keys=True).encode())
    return " ".join(f"{digest:08x}" for digest in (of_meta, *(digests[name] for name in sorted(digests))))
