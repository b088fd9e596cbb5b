"""safetensors: a header of JSON, and then the bytes of each column.

Written here, because the library of that name takes only tensors that are in memory; read by it.
"""

from __future__ import annotations

import json
import os

import numpy as np

from kvjax._formats.atomic import written
from kvjax._formats.errors import FileError, needed
from kvjax._formats.source import Source, raw, row_bytes

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def write(path: str | os.PathLike[str], source: Source) -> None:
    """Writes a column as a tensor each, and `Source.meta` as the metadata."""
    header: dict[str, object] = {"__metadata__": dict(source.meta)}
    end = 0
    for name, (dtype, _) in source.types.items():
        if dtype.name not in _DTYPES:
            raise FileError(path, f"columns of {sorted(_DTYPES)}", f"{name!r} of {dtype.name}", "leave it out")
        start, end = end, end + source.num_rows * row_bytes(source.types[name])
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": source.shape(name), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in source.types:
            for piece in source.pieces(name):
                file.write(raw(piece))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
      FileError: it is no such file.
      ImportError: safetensors is not installed.
    """
    library = needed("safetensors", "reading safetensors", "convert")
    try:
        with library.safe_open(os.fspath(path), framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (library.SafetensorError, OSError, TypeError, KeyError, AttributeError) as error:
        raise FileError(path, "a file of safetensors with dtypes that NumPy has", f"{error}") from error
