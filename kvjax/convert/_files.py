"""Files of columns, kvjax's own exports or anybody's: safetensors, npz and Parquet; and dense embeddings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from kvjax._formats import npz, parquet, safetensors
from kvjax._formats.atomic import fetched
from kvjax._formats.errors import FileError, check_regular
from kvjax._formats.quantised import SCALES, restored
from kvjax._formats.source import Column, Concatenated, Lazy, Source
from kvjax._values.arrays import ArrayLike
from kvjax._values.exported import ROW_COLUMNS, SLOT
from kvjax._values.key_width import KEY_DTYPES, check_whole
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, incoming


def from_safetensors(path: str | os.PathLike[str], columns: Mapping[str, str | None] | None = None) -> Imported:
    """Reads rows of a safetensors file; needs safetensors (``pip install kvjax[convert]``).

    By default the columns have the names of `kvjax.Exported`, and slots "slot.<name>", so an export comes back as
    it was; only keys and values are required. Rows of int8 come back as float32.

    Args:
      path: of the file, which may be in a store; or of a folder of such files, as Spark writes them, or the processes
        of a sharded table. Their rows are read together.
      columns: names in the file, by kvjax's names, where they differ; "keys": None to number the rows.

    Returns:
      `Imported`: rows in the order of the file, and the slots that it has.

    Raises:
      ValueError: it is not such a file, lacks a column, or columns do not fit each other.
      ImportError: safetensors is not installed.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> path = tempfile.mkdtemp() + "/rows.safetensors"
      >>> kvjax.convert.from_dense(np.ones((3, 2), np.float32)).rows.to_safetensors(path)
      >>> kvjax.convert.from_safetensors(path)
      Imported(rows=3, dim=2, float32, keys int64, of a safetensors file)
      >>> kvjax.convert.from_safetensors(path, {"keys": None}).rows.keys.tolist()
      [0, 1, 2]
    """
    with fetched(path, "from_safetensors") as file:
        return open_file("safetensors", file, columns).read()


def from_npz(path: str | os.PathLike[str], columns: Mapping[str, str | None] | None = None) -> Imported:
    """Reads rows of NumPy's archive of arrays.

    By default the columns have the names of `kvjax.Exported`, and slots "slot.<name>", so an export comes back as
    it was; only keys and values are required. Rows of int8 come back as float32.

    Args:
      path: of the file, which may be in a store; or of a folder of such files, as Spark writes them, or the processes
        of a sharded table. Their rows are read together.
      columns: names in the file, by kvjax's names, where they differ; "keys": None to number the rows.

    Returns:
      `Imported`: rows in the order of the file, and the slots that it has.

    Raises:
      ValueError: it is not such a file, lacks a column, or columns do not fit each other.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> path = tempfile.mkdtemp() + "/rows.npz"
      >>> np.savez(path, ids=np.array([7, 2**40]), rows=np.ones((2, 3)))
      >>> kvjax.convert.from_npz(path, {"keys": "ids", "values": "rows"})
      Imported(rows=2, dim=3, float64, keys int64, of an npz file)
    """
    with fetched(path, "from_npz") as file:
        return open_file("npz", file, columns).read()


def from_parquet(path: str | os.PathLike[str], columns: Mapping[str, str | None] | None = None) -> Imported:
    """Reads rows of a Parquet file; needs pyarrow (``pip install kvjax[parquet]``).

    By default the columns have the names of `kvjax.Exported`, and slots "slot.<name>", so an export comes back as
    it was (bfloat16 as float32, which holds it); only keys and values are required. Rows are lists of the same length.

    Args:
      path: of the file, which may be in a store; or of a folder of such files, as Spark writes them, or the processes
        of a sharded table. Their rows are read together.
      columns: names in the file, by kvjax's names, where they differ; "keys": None to number the rows.

    Returns:
      `Imported`: rows in the order of the file, and the slots that it has.

    Raises:
      ValueError: it is not such a file, lacks a column, has nulls, or columns do not fit each other.
      ImportError: pyarrow is not installed.

    Example:
      >>> import tempfile, kvjax, pyarrow, pyarrow.parquet
      >>> path = tempfile.mkdtemp() + "/items.parquet"
      >>> items = pyarrow.table({"id": [7, 8], "values": [[1.0, 2.0], [3.0, 4.0]]})
      >>> pyarrow.parquet.write_table(items, path)
      >>> imported = kvjax.convert.from_parquet(path, {"keys": "id"})
      >>> imported.rows.keys.tolist(), imported.rows.values.tolist()
      ([7, 8], [[1.0, 2.0], [3.0, 4.0]])
    """
    with fetched(path, "from_parquet") as file:
        return open_file("parquet", file, columns).read()


def from_dense(embedding: ArrayLike, keys: ArrayLike | None = None) -> Imported:
    """Takes the rows of a dense embedding, such as the ``embedding`` of Linen's or NNX's ``Embed``.

    Args:
      embedding: ``(n, dim)`` floats.
      keys: ``(n,)`` integers, the key of each row; by default its number.

    Returns:
      `Imported`: row i of the array under the key i.

    Raises:
      ValueError: keys and rows do not fit each other, or a key occurs twice.
      TypeError: JAX may have cut the keys to 32 bits.

    Example:
      >>> import kvjax, numpy as np
      >>> imported = kvjax.convert.from_dense(np.eye(2, dtype=np.float32), keys=np.array([-1, 2**40]))
      >>> imported.rows.keys.tolist()
      [-1, 1099511627776]
    """
    values = np.asarray(embedding)
    if values.ndim != 2:
        raise ValueError(
            f"kvjax: from_dense: want an array (n, dim) of floats, got {values.shape} {values.dtype}; give the array "
            "alone, as params['embedding']"
        )
    check_whole(keys, "from_dense")
    given = np.arange(len(values)) if keys is None else np.asarray(keys)
    if given.shape != values.shape[:1]:
        raise ValueError(f"kvjax: from_dense: want keys ({len(values)},), got {given.shape}; give one for each row")
    return incoming("from_dense", "an array", {"keys": given, "values": values}).read()


class Format(Protocol):
    """A module of `kvjax._formats`."""

    @property
    def WHAT(self) -> str: ...

    @staticmethod
    def write(path: str | os.PathLike[str], source: Source, /) -> None: ...

    @staticmethod
    def columns(path: str | os.PathLike[str], /) -> tuple[Mapping[str, Column], dict[str, str]]: ...


FORMATS: Mapping[str, Format] = {"safetensors": safetensors, "npz": npz, "parquet": parquet}
"""By the names of `FILE_FORMATS`."""


def open_file(format: str, path: Path, columns: Mapping[str, str | None] | None = None) -> Incoming:
    """A file of columns, as `from_safetensors` and the like take it, to be read piece by piece."""
    what, (arrays, meta) = FORMATS[format].WHAT, _columns(format, path)
    if not isinstance(cast("object", columns), Mapping | None):
        want, got = "columns= by kvjax's names", type(columns).__name__
        raise FileError(path, want, got, 'give {"keys": "ids"} for keys that are called "ids" there')
    given = dict(columns or {})
    known = (*ROW_COLUMNS, SCALES)
    if unknown := [name for name in given if name not in known and not str(name).startswith(SLOT)]:
        raise FileError(
            path,
            f"columns= by kvjax's names, {[*known, SLOT + '<name>']}",
            f"{unknown}",
            'give {"keys": "ids"} for keys that are called "ids" there',
        )
    theirs = dict.fromkeys(given.values())
    # A column that has been given another name is not taken for one of kvjax's.
    ours = {
        name: name
        for name in arrays
        if (name in (*ROW_COLUMNS, SCALES) or name.startswith(SLOT)) and name not in theirs
    }
    ours |= given
    ours = {"keys": "keys", "values": "values"} | ours
    if lost := {there for there in ours.values() if there is not None} - arrays.keys():
        raise FileError(
            path, f"the columns {sorted(lost)}", f"{sorted(arrays)}", "say with columns= what they are called"
        )
    if none := sorted(name for name, there in ours.items() if there is None and name != "keys"):
        raise FileError(
            path, "names of columns (None for keys alone, to number the rows)", f"None for {none}", "name them"
        )
    found = {name: arrays[there] for name, there in ours.items() if there is not None}
    if ours["keys"] is None and path.is_dir():
        mend = "join them in the order that is meant, or write the keys"
        raise FileError(path, "one file, whose rows are numbered", "a folder", mend)
    if ours["keys"] is None:
        found["keys"] = _Numbers(found["values"].shape[0] if found["values"].shape else 0)
    scales = found.pop(SCALES, None)
    if found["values"].dtype == np.int8:
        if scales is not None and scales.dtype.kind != "f":
            raise FileError(path, f"{SCALES!r} of floats", f"{scales.dtype}")
        if len(found["values"].shape) != 2 or scales is None or scales.shape != found["values"].shape[:1]:
            raise FileError(path, f"a scale for each row of int8, as {SCALES!r}", f"{sorted(arrays)}")
        found["values"] = _Restored(found["values"], scales)
    elif scales is not None:  # of what is no int8
        ours.pop(SCALES)
    left = [f"the column {name!r}" for name in arrays if name not in ours.values()]
    last_step, key_dtype = _last_step(meta), meta.get("key_dtype")
    fits = key_dtype in KEY_DTYPES and key_dtype.startswith("u") == (found["keys"].dtype.kind == "u")
    key_dtype = key_dtype if fits and ours["keys"] == "keys" else None
    # Other programs may mean something else by these names.
    said = {"last_step": last_step, "key_dtype": key_dtype}
    left += [f"{name} of the metadata, {meta[name]!r:.50}" for name in said if name in meta and said[name] is None]
    return incoming(path, what, found, last_step=last_step, key_dtype=key_dtype, left=left)


def _last_step(meta: Mapping[str, str]) -> int | None:
    """What the metadata says of the table's last step; None if it says none that a table can have."""
    step = meta.get("last_step", "")
    return int(step) if step.isdecimal() and int(step) < 2**63 else None


def _columns(format: str, path: Path) -> tuple[Mapping[str, Column], dict[str, str]]:
    """The columns of a file, or of all files of the format in a folder, one file's rows after the other's; and what
    their metadata says."""
    module = FORMATS[format]
    if not path.is_dir():
        check_regular(path, module.WHAT)
        return module.columns(path)
    files = sorted(file for file in path.glob(f"*.{format}") if not file.name.startswith((".", "_")))
    if not files:
        raise FileError(path, f"{module.WHAT}, or a folder of such", f"a folder without any *.{format}", "give another")
    if below := next(path.glob(f"*/**/*.{format}"), None):
        want, mend = "files in one folder", "give the folder that has all, or move them into one"
        raise FileError(path, want, f"another below, {below.relative_to(path)}", mend)
    for file in files:
        check_regular(file, module.WHAT)
    parts, said = zip(*map(module.columns, files), strict=True)

    def joined(name: str) -> Column:
        columns = [part[name] for part in parts]
        columns = [column for column in columns if not column.shape or column.shape[0]] or columns[:1]
        if not all(column.shape for column in columns):
            return columns[0]  # which is none of rows
        if len(kinds := {(column.dtype, column.shape[1:]) for column in columns}) > 1:
            raise FileError(path, f"one type of {name!r} in all files", f"{sorted(map(str, kinds))}")
        return Concatenated(columns)

    names = [name for name in parts[0] if all(name in part for part in parts)]
    if others := sorted({name for part in parts for name in part} - set(names)):
        raise FileError(path, "the same columns in all files", f"{others} in some", "give files of one table")
    meta = {key: value for key, value in said[0].items() if all(each.get(key) == value for each in said)}
    if len(kinds := {each["key_dtype"] for each in said if "key_dtype" in each}) > 1:
        raise FileError(path, "files of one table", f"those of tables of {sorted(kinds)}", "read them one by one")
    steps = list(map(_last_step, said))
    for kind in kinds:  # of which there is one, if any
        meta["key_dtype"] = kind
    if None not in steps:
        meta["last_step"] = str(max(filter(None, steps), default=0))
    return Lazy(names, joined), meta


class _Numbers:
    """The number of each row."""

    def __init__(self, rows: int) -> None:
        self.dtype, self.shape = np.dtype(np.int64), (rows,)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.arange(*rows.indices(self.shape[0]))


class _Restored:
    """Rows of int8 as the floats that they stand for."""

    def __init__(self, values: Column, scales: Column) -> None:
        self._values, self._scales, self.shape, self.dtype = values, scales, values.shape, np.dtype(np.float32)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return restored({"values": self._values[rows], SCALES: self._scales[rows]})
