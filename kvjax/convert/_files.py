"""Files of columns, kvjax's own exports or anybody's: safetensors, npz and Parquet; and dense embeddings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from kvjax._formats.atomic import fetched
from kvjax._formats.errors import FileError
from kvjax._formats.files import FORMATS, columns_of, last_step_of
from kvjax._formats.quantised_source import SCALES, restored
from kvjax._formats.source import Column
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


def open_file(format: str, path: Path, columns: Mapping[str, str | None] | None = None) -> Incoming:
    """A file of columns, as `from_safetensors` and the like take it, to be read piece by piece."""
    arrays, meta = columns_of(format, path)
    ours = _names(path, arrays, columns)
    found = {name: arrays[there] for name, there in ours.items() if there is not None}
    if ours["keys"] is None:
        found["keys"] = _numbers(path, found["values"])
    scales = found.pop(SCALES, None)
    if found["values"].dtype == np.int8:
        found["values"] = _floats(path, found["values"], scales)
    elif scales is not None:  # of what is no int8
        ours.pop(SCALES)
    # Other programs may mean something else by these names.
    key_dtype = meta.get("key_dtype") if ours["keys"] == "keys" else None
    fits = key_dtype in KEY_DTYPES and key_dtype.startswith("u") == (found["keys"].dtype.kind == "u")
    key_dtype, last_step = key_dtype if fits else None, last_step_of(meta)
    said = {"last_step": last_step, "key_dtype": key_dtype}
    left = [f"the column {name!r}" for name in arrays if name not in ours.values()]
    left += [f"{name} of the metadata, {meta[name]!r:.50}" for name in said if name in meta and said[name] is None]
    return incoming(path, FORMATS[format].WHAT, found, last_step=last_step, key_dtype=key_dtype, left=left)


def _names(path: Path, arrays: Mapping[str, Column], columns: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """The names of columns there, by kvjax's names; None for keys that are the numbers of rows.

    Raises:
      FileError: what `columns` says is not there, or means nothing.
    """
    if not isinstance(cast("object", columns), Mapping | None):
        raise FileError(path, "columns= by kvjax's names", type(columns).__name__, _SAY)
    given = dict(columns or {})
    if unknown := [name for name in given if not _is_known(str(name))]:
        known = [*ROW_COLUMNS, SCALES, SLOT + "<name>"]
        raise FileError(path, f"columns= by kvjax's names, {known}", f"{unknown}", _SAY)
    # A column that has been given another name is not taken for one of kvjax's.
    taken = dict.fromkeys(given.values())
    by_default = {name: name for name in arrays if _is_known(name) and name not in taken}
    ours = {"keys": "keys", "values": "values"} | by_default | given
    if lost := {there for there in ours.values() if there is not None} - arrays.keys():
        mend = "say with columns= what they are called"
        raise FileError(path, f"the columns {sorted(lost)}", f"{sorted(arrays)}", mend)
    if none := sorted(name for name, there in ours.items() if there is None and name != "keys"):
        want = "names of columns (None for keys alone, to number the rows)"
        raise FileError(path, want, f"None for {none}", "name them")
    return ours


_SAY = 'give {"keys": "ids"} for keys that are called "ids" there'


def _is_known(name: str) -> bool:
    return name in (*ROW_COLUMNS, SCALES) or name.startswith(SLOT)


def _numbers(path: Path, values: Column) -> Column:
    """Keys of rows that have none."""
    if path.is_dir():
        mend = "join them in the order that is meant, or write the keys"
        raise FileError(path, "one file, whose rows are numbered", "a folder", mend)
    return _Numbers(values.shape[0] if values.shape else 0)


def _floats(path: Path, values: Column, scales: Column | None) -> Column:
    """Rows of int8 as the floats that they stand for."""
    if scales is None or len(values.shape) != 2 or scales.shape != values.shape[:1]:
        got = f"rows {values.shape} and {'none' if scales is None else scales.shape}"
        raise FileError(path, f"a scale for each row of int8, as {SCALES!r}", got)
    if scales.dtype.kind != "f":
        raise FileError(path, f"{SCALES!r} of floats", f"{scales.dtype}")
    return _Restored(values, scales)


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
