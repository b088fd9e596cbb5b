"""TFRA: the files of ``save_to_file_system``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from kvjax._formats.columns import Concatenated, InFile
from kvjax._formats.errors import FileError
from kvjax._formats.paths import local
from kvjax._formats.source import Column
from kvjax._values.exported import SLOT
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, Joined, check_asked, check_wanted, incoming


def from_tfra(
    folder: str | os.PathLike[str], name: str, dim: int | None = None, *, key_dtype: str = "int64",
    dtype: str = "float32", slots: Mapping[str, str] | None = None, fill: Mapping[str, float] | None = None,
) -> Imported:  # fmt: skip
    """Reads a ``dynamic_embedding.Variable`` of TensorFlow Recommenders Addons that ``save_to_file_system`` wrote.

    The files are bare arrays, "<name>_mht_<i>of<n>_rank<r>_size<s>-keys" and "-values", little-endian. They do not
    contain `dim` and dtypes: only sizes that do not fit show that these are wrong, and a warning of rows with a NaN or
    an infinity. So look at `dim` and some rows of the result. All shards and ranks must be there.
    Optimizer slots are separate variables with their own files, whose names begin with "<name>_<slot>_mht_" ("/" in a
    name is "_"). TFRA saves neither frequencies nor
    scores.

    It was tested with files of TFRA 0.8.1 with TensorFlow 2.16.2.

    Args:
      folder: folder of the files.
      name: name of the variable.
      dim: width of the rows; by default computed from the sizes.
      key_dtype: dtype of the variable's keys.
      dtype: dtype of its values.
      slots: slots to import: TFRA's name to the name in kvjax's optimizer: ``{"m": "mu", "v": "nu"}`` for Adam. The end
        of a variable's name is enough ("m" for "items/lookup/m"). A key that a slot lacks has no slots; other slots are
        left.
      fill: slots that no file has, by their names in kvjax's optimizer: the number that each row gets. TensorFlow's
        Adam counts its steps once for all rows, ``optax.adam`` in a table for each row: ``{"count": 10_000}`` after
        10,000 steps.

    Returns:
      `Imported`: rows in the order of the files, slots ``(n, dim)`` or ``(n,)`` by their names in kvjax's optimizer.

    Raises:
      FileError: a shard is missing, or sizes do not fit.

    Example:
      >>> import tempfile, pathlib, kvjax, numpy as np
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> np.arange(3).tofile(folder / "items_mht_1of1_rank0_size1-keys")
      >>> np.ones((3, 2), np.float32).tofile(folder / "items_mht_1of1_rank0_size1-values")
      >>> kvjax.convert.from_tfra(folder, "items", dim=2).rows.values.shape
      (3, 2)
    """
    return open_tfra(folder, name, dim, key_dtype=key_dtype, dtype=dtype, slots=slots, fill=fill).read()


def dtype_of(path: Path, argument: str, given: str, kinds: str) -> np.dtype[np.generic]:
    """What an argument says that the files have, of some kinds of NumPy's.

    Raises:
      FileError: it says something else.
    """
    try:
        dtype = np.dtype(object if cast("object", given) is None else given)  # of None, NumPy makes float64
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in kinds:
        want = "numbers, such as 'float32'" if "f" in kinds else "integers, such as 'int64'"
        raise FileError(path, f"{argument}= of {want}", f"{given!r:.50}", "say what the files have")
    return dtype


FLOATS = "fiuV"  # that of bfloat16 is V
_UNSAID = "say dim=, key_dtype= and dtype= of the variable, or source_dtype= if dtype= is that of a new checkpoint"


def open_tfra(
    folder: str | os.PathLike[str], name: str, dim: int | None = None, *, key_dtype: str = "int64",
    dtype: str = "float32", slots: Mapping[str, str] | None = None, fill: Mapping[str, float] | None = None,
) -> Incoming:  # fmt: skip
    """As `from_tfra`, to be read piece by piece."""
    path = local(folder, "from_tfra")
    check_asked(path, name, dim)
    kinds = dtype_of(path, "key_dtype", key_dtype, "iu"), dtype_of(path, "dtype", dtype, FLOATS)
    keys, values = _joined(path, name, *kinds, dim)
    check_wanted(path, slots)
    there = _slots(path, name)
    chosen = {ours: _meant(path, name, slot, there) for slot, ours in (slots or {}).items()}
    taken = {
        SLOT + ours: Joined.slot(folder, stem, *_joined(path, stem, *kinds, None)) for ours, stem in chosen.items()
    }
    left = [f"{stem}, which may be a slot" for stem in there if stem not in chosen.values()]
    columns = {"keys": keys, "values": values}
    return incoming(folder, f"TFRA's {name!r}", columns, joined=taken, fill=fill, left=left, unsaid=_UNSAID)


def _joined(
    folder: Path, name: str, key_dtype: np.dtype[np.generic], dtype: np.dtype[np.generic], dim: int | None
) -> tuple[Column, Column]:
    """Keys and rows of all shards of a variable."""
    parts = [_read(stem, key_dtype, dtype, dim) for stem in _stems(folder, name)]
    dims = {values.shape[1] for _, values in parts if values.shape[0]} or {dim}
    if len(dims) > 1 or None in dims:
        got = f"{sorted(map(str, dims))}" if len(dims) > 1 else "no rows, which say none"
        raise FileError(folder, f"shards of one dim of {name!r}", got, "say dim=")
    (width,) = dims
    rows = [values.of_shape((values.shape[0], int(width or 0))) for _, values in parts]
    return Concatenated([keys for keys, _ in parts]), Concatenated(rows)


_ONE = "give a folder that has one"
_SHARD = r"(?:_mht_(?P<shard>\d+)of(?P<shards>\d+)(?:_rank(?P<rank>\d+)_size(?P<size>\d+))?)?"


def _stems(folder: Path, name: str) -> list[Path]:
    """The paths of all shards of a variable, without "-keys" and "-values"."""
    found: dict[tuple[int, int], Path] = {}
    whole: set[tuple[int, int]] = set()
    for path in _keys_files(folder):
        match = re.fullmatch(re.escape(_stem(name)) + _SHARD + "-keys", path.name)
        if match:
            shard, shards, rank, size = (int(match[group] or 0) for group in ("shard", "shards", "rank", "size"))
            if (shard, rank) in found:
                raise FileError(folder, "one save of the variable", f"{found[shard, rank].name} and {path.name}", _ONE)
            found[shard, rank] = path.with_name(path.name.removesuffix("-keys"))
            whole.add((max(shards, 1), max(size, 1)))
    if not found:
        names = [path.name for path in _keys_files(folder)][:5]
        got = f"{names}" if folder.is_dir() else "no such folder"
        raise FileError(folder, f"files of {name!r}, {_stem(name)}_mht_...-keys", got, "give its name and folder")
    if len(whole) > 1:
        raise FileError(folder, f"one save of {name!r}", f"shards and processes {sorted(whole)}", _ONE)
    ((shards, size),) = whole
    wanted = {(i + 1, r) for i in range(shards) for r in range(size)} if (0, 0) not in found else {(0, 0)}
    if found.keys() != wanted:
        raise FileError(folder, f"all {len(wanted)} shards of {name!r}", f"shards (number, rank) {sorted(found)}")
    return [found[key] for key in sorted(found)]


def _read(
    stem: Path, key_dtype: np.dtype[np.generic], dtype: np.dtype[np.generic], dim: int | None
) -> tuple[InFile, InFile]:
    try:
        keys_bytes, values_bytes = (os.path.getsize(f"{stem}{end}") for end in ("-keys", "-values"))
    except OSError as error:
        raise FileError(stem, "files -keys and -values", f"{error.strerror}") from error
    rows, rest = divmod(keys_bytes, key_dtype.itemsize)
    width = dim if dim is not None else values_bytes // max(1, rows * dtype.itemsize)
    if rest or values_bytes != rows * width * dtype.itemsize:
        raise FileError(
            stem, f"keys of {key_dtype} and rows of {width} {dtype}", f"{keys_bytes} and {values_bytes} bytes",
            _UNSAID,
        )  # fmt: skip
    return InFile(f"{stem}-keys", key_dtype, (rows,)), InFile(f"{stem}-values", dtype, (rows, width))


def _slots(folder: Path, name: str) -> list[str]:
    """The stems of variables that look like slots of this one."""
    others = {re.sub(_SHARD + "-keys$", "", path.name) for path in _keys_files(folder)}
    return sorted(other for other in others if other.startswith(_stem(name) + "_"))


def _meant(folder: Path, name: str, slot: str, there: list[str]) -> str:
    """The stem of the variable that a slot's name means.

    Raises:
      FileError: there is none, or more than one.
    """
    found = [stem for stem in there if stem == _stem(f"{name}/{slot}")] or [
        stem for stem in there if stem.endswith(_stem(f"/{slot}"))
    ]
    if len(found) != 1:
        want, got = f"one slot {slot!r} of {name!r}, as {_stem(f'{name}/{slot}')}_mht_...-keys", f"{found or there}"
        raise FileError(folder, want, got, "give more of its name")
    return found[0]


def _keys_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-keys"))


def _stem(name: str) -> str:
    return name.replace("/", "_")
