"""SOK: the files of ``sok.dump``."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvjax._formats.columns import InFile
from kvjax._formats.errors import FileError
from kvjax._formats.paths import local
from kvjax._formats.regular import check_regular
from kvjax._values.exported import SLOT
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, check_asked, chosen_slots, incoming

_HEADER = 296
_DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")


def from_sok(
    folder: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Imported:  # fmt: skip
    """Reads a variable that ``sok.dump`` of NVIDIA's SparseOperationKit wrote.

    It follows SOK's source, ``dump_load.py``; real files have not been tried, because SOK needs a GPU. The files are
    "<table>-key", "<table>-weight" and "<table>-<optimizer>-<slot>", where punctuation in the name is "_". Each has a
    header of 296 bytes (name, kind, slot, dtype; big-endian) and a bare array. The number of rows is checked against
    "meta_info".

    Args:
      folder: folder of the files.
      name: name of the variable.
      slots: slots to import: SOK's name ("Adagrad-accumulator") to the name in kvjax's optimizer ("sum_of_squares").
        Others are left.
      fill: see `from_tfra`.

    Returns:
      `Imported`: rows in the order of the files, slots ``(n, dim)`` or ``(n,)`` by their names in kvjax's optimizer.

    Raises:
      FileError: a file is missing or is not one of SOK's, or sizes do not fit each other.

    Example:
      >>> import tempfile, pathlib, kvjax, numpy as np
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> def header(kind, dtype):  # name, kind, slot and dtype
      ...     return b"ad".ljust(256) + kind.to_bytes(4, "big") + bytes(32) + dtype.to_bytes(4, "big")
      >>> _ = (folder / "ad-key").write_bytes(header(0, 1) + np.array([7, 2**40]).tobytes())
      >>> _ = (folder / "ad-weight").write_bytes(header(1, 5) + np.ones((2, 3), np.float32).tobytes())
      >>> kvjax.convert.from_sok(folder, "ad")
      Imported(rows=2, dim=3, float32, keys int64, of SOK's 'ad')
    """
    return open_sok(folder, name, slots=slots, fill=fill).read()


def open_sok(
    folder: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Incoming:  # fmt: skip
    """As `from_sok`, to be read piece by piece."""
    path = local(folder, "from_sok")
    check_asked(path, name)
    stem = name.translate(str.maketrans(dict.fromkeys(string.punctuation, "_")))
    keys = _read(path / f"{stem}-key", 0)
    weights = _read(path / f"{stem}-weight", 1)
    (rows,), (elements,) = keys.shape, weights.shape
    said = _said(path / "meta_info", name, stem)
    dim = elements // rows if rows else (said or (0, 0))[1]  # of a variable without rows the files do not say it
    if not rows and not dim:
        raise FileError(path, f"rows of {name!r}, or a file meta_info, which say dim", "neither", "leave it out")
    if rows * dim != elements or not dim:
        raise FileError(path / f"{stem}-weight", f"whole rows for {rows} keys", f"{elements} elements")
    if said not in (None, (rows, dim)):
        want = f"{name!r} with (rows, dim) {(rows, dim)}, as its files have"
        raise FileError(path / "meta_info", want, f"{said}")
    there = {file.name.removeprefix(f"{stem}-"): file for file in sorted(path.glob(f"{stem}-*-*"))}
    wanted, left = chosen_slots(path, name, slots, there)
    columns = {"keys": keys, "values": weights.of_shape((rows, dim))}
    for slot, ours in wanted.items():
        array = _read(there[slot], 2)
        if array.shape != (rows * dim,):
            raise FileError(there[slot], f"({rows}, {dim})", f"{array.shape[0]} elements")
        columns[SLOT + ours] = array.of_shape((rows, dim))
    return incoming(path, f"SOK's {name!r}", columns, fill=fill, left=left)


def _read(path: Path, kind: int) -> InFile:
    """What follows the header of a file of this kind: keys, weights or a slot."""
    check_regular(path, "a file of sok.dump")
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER)
        size = os.path.getsize(path) - _HEADER
    except OSError as error:
        raise FileError(path, "a file of sok.dump", f"{error.strerror}") from error
    found, number = (int.from_bytes(header[i : i + 4], "big") for i in (256, 292))
    if len(header) < _HEADER or found != kind or number >= len(_DTYPES):
        got = f"{size + _HEADER} bytes of kind {found} and dtype {number}"
        raise FileError(path, f"SOK's header of kind {kind}", got)
    dtype = np.dtype(_DTYPES[number])
    if size % dtype.itemsize:
        raise FileError(path, f"whole elements of {dtype}", f"{size} bytes")
    return InFile(path, dtype, (size // dtype.itemsize,), _HEADER)


def _said(path: Path, name: str, stem: str) -> tuple[int, int] | None:
    """Rows and dim of the variable, if meta_info is there and has it."""
    if not path.exists():
        return None
    check_regular(path, "what sok.dump says of its tables")
    with open(path, "rb") as file:
        count, size = int.from_bytes(file.read(4), "big"), path.stat().st_size
        # Of each table: dtypes of keys and rows, dim, rows, name and optimizer; each field of all tables together.
        ends = np.cumsum([4, 4 * count, 4 * count, 4 * count, 8 * count, 256 * count, 32 * count])
        if size != ends[-1]:
            raise FileError(path, f"{ends[-1]} bytes for {count} tables", f"{size}")
        data = bytes(4) + file.read()
    dims, numbers, names = (data[ends[i] : ends[i + 1]] for i in (2, 3, 4))
    for i in range(count):
        if names[256 * i : 256 * (i + 1)].decode("utf-8", "replace").strip() in (name, stem):
            rows, dim = numbers[8 * i : 8 * i + 8], dims[4 * i : 4 * i + 4]
            return int.from_bytes(rows, "big"), int.from_bytes(dim, "big")
    return None
